"""Types that the planner and the engine share. `Candidate`: the eight choices that decide how an update is executed."""

from dataclasses import dataclass

from leangrpo.configs.schema import BufferDevice, BufferDtype, Buffers, Checkpointing, Config, Residency, Schedule, Sync


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to execute an update; the same names in YAML, on the command line and in code."""

    schedule: Schedule
    buffers: Buffers
    buffer_dtype: BufferDtype
    buffer_device: BufferDevice
    sync: Sync
    checkpointing: Checkpointing
    residency: Residency
    samples_per_forward: int

    @classmethod
    def from_config(cls, config: Config) -> "Candidate":
        """The choices that `config` pins."""
        return cls(**{name: getattr(config, name) for name in cls.__dataclass_fields__})
