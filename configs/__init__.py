"""What a run is: `Config`, read by `load_config`, checked, and described for `--help`."""

from leangrpo.configs.checks import (
    ConfigError,
    check_config,
    check_trainable,
    resume_differences,
)
from leangrpo.configs.help import describe_keys
from leangrpo.configs.loader import dump_config, load_config, packaged_configs
from leangrpo.configs.ranks import check_world_size
from leangrpo.configs.schema import Config

__all__ = [
    "Config",
    "ConfigError",
    "check_config",
    "check_trainable",
    "check_world_size",
    "describe_keys",
    "dump_config",
    "load_config",
    "packaged_configs",
    "resume_differences",
]
