"""Backends: how parameters, gradients and optimizer states are spread over the ranks."""

from collections.abc import Callable

from leangrpo.configs.schema import Config
from leangrpo.engine.distributed import World
from leangrpo.engine.policies.base import PolicyAdapter
from leangrpo.engine.sharding.base import ShardingBackend
from leangrpo.engine.sharding.deepspeed import DeepSpeedZero
from leangrpo.engine.sharding.fsdp2 import FSDP2
from leangrpo.engine.sharding.replicated import Replicated

BACKENDS: dict[str, Callable[[PolicyAdapter, Config, World], ShardingBackend]] = {
    "replicated": Replicated,
    "fsdp2": FSDP2,
    "hsdp": FSDP2,
    "zero1": DeepSpeedZero,
    "zero2": DeepSpeedZero,
    "zero3": DeepSpeedZero,
}


def make_backend(policy: PolicyAdapter, config: Config, world: World) -> ShardingBackend:
    """The backend that `config` names, around `policy`."""
    return BACKENDS[config.backend](policy, config, world)
