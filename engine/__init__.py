"""The engine's public names: `plan` an update, train with `Engine`, bring a policy of your own as a `PolicyAdapter`."""

from leangrpo.configs.checks import ConfigError
from leangrpo.configs.loader import load_config
from leangrpo.engine.planning import plan
from leangrpo.engine.policies.base import FlowMatchingPolicy, PolicyAdapter, sample_trajectory
from leangrpo.engine.policies.digits import DigitsPolicy
from leangrpo.engine.rewards import Rewards
from leangrpo.engine.run import Run
from leangrpo.engine.trainer import Engine
from leangrpo.engine.types import DenoisingStep, Gaussian, StepMetrics, Timestep, Trajectory
from leangrpo.planners.plan import Plan
from leangrpo.planners.types import Candidate, HardwareSpec, OtherModel, Workload

__all__ = [
    "Candidate",
    "ConfigError",
    "DenoisingStep",
    "DigitsPolicy",
    "Engine",
    "FlowMatchingPolicy",
    "Gaussian",
    "HardwareSpec",
    "OtherModel",
    "Plan",
    "PolicyAdapter",
    "Rewards",
    "Run",
    "StepMetrics",
    "Timestep",
    "Trajectory",
    "Workload",
    "load_config",
    "plan",
    "sample_trajectory",
]
