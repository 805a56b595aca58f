"""The engine's public names: train with `Engine`, or bring a policy of your own as a `PolicyAdapter`."""

from leangrpo.configs.checks import ConfigError
from leangrpo.configs.loader import load_config
from leangrpo.engine.policies.base import FlowMatchingPolicy, PolicyAdapter, sample_trajectory
from leangrpo.engine.policies.digits import DigitsPolicy
from leangrpo.engine.rewards import Rewards
from leangrpo.engine.run import Run
from leangrpo.engine.trainer import Engine
from leangrpo.engine.types import DenoisingStep, Gaussian, StepMetrics, Timestep, Trajectory

__all__ = [
    "ConfigError",
    "DenoisingStep",
    "DigitsPolicy",
    "Engine",
    "FlowMatchingPolicy",
    "Gaussian",
    "PolicyAdapter",
    "Rewards",
    "Run",
    "StepMetrics",
    "Timestep",
    "Trajectory",
    "load_config",
    "sample_trajectory",
]
