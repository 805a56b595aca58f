"""`Plan`: the choice with its predictions, the alternatives, and what was rejected and why; as dict, YAML, table."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from leangrpo.planners.types import (
    Candidate,
    Estimate,
    HardwareSpec,
    MemoryEstimate,
    PolicyTrace,
    TimeEstimate,
    Workload,
)

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `plan()` returns. Speed-ups are of seconds per update."""

    chosen: Estimate
    candidates: tuple[Estimate, ...]
    """all that were judged: those that fit first, from the fastest on"""
    public_native: Estimate
    """Native as the public trainers run it; it may not fit"""
    best_native_seconds: float | None
    """of Native under its own best plan; None if none fits"""
    trace: PolicyTrace
    workload: Workload
    hardware: HardwareSpec
    pinned: Mapping[str, Any]

    @property
    def candidate(self) -> Candidate:
        return self.chosen.candidate

    @property
    def memory(self) -> MemoryEstimate:
        return self.chosen.memory

    @property
    def time(self) -> TimeEstimate:
        return self.chosen.time

    @property
    def alternatives(self) -> tuple[Estimate, ...]:
        """Everything else that fits, fastest first."""
        return tuple(one for one in self.candidates if one.feasible and one is not self.chosen)

    @property
    def rejected(self) -> tuple[tuple[Candidate, str], ...]:
        """What is not exact or does not fit, and why."""
        return tuple((one.candidate, one.reason) for one in self.candidates if not one.feasible)

    def speedup_over_public_native(self, estimate: Estimate) -> float:
        """Against Native as the public trainers run it."""
        return self.public_native.time.total / estimate.time.total

    def speedup_over_best_native(self, estimate: Estimate) -> float | None:
        """Against Native under its own best plan."""
        return None if self.best_native_seconds is None else self.best_native_seconds / estimate.time.total

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `choice` are the eight choices, `candidates` carry them and their predictions."""
        trace = self.trace
        return {
            "choice": dataclasses.asdict(self.candidate),
            "pinned": dict(self.pinned),
            "predicted": {
                "memory_bytes": dataclasses.asdict(self.memory),
                "seconds": dataclasses.asdict(self.time) | {"total": self.time.total},
                "speedup_over_public_native": self.speedup_over_public_native(self.chosen),
                "speedup_over_best_native": self.speedup_over_best_native(self.chosen),
            },
            "policy": {
                "name": trace.name,
                "parameters": trace.parameters,
                "trainable_parameters": trace.trainable,
                "blocks": len(trace.blocks),
                "forward_flops": trace.forward_flops,
                "backward_flops": trace.backward_flops,
                "saved_bytes": trace.saved_bytes[0],
                "saved_bytes_checkpointed": trace.saved_bytes[-1],
            },
            "workload": dataclasses.asdict(self.workload),
            "hardware": dataclasses.asdict(self.hardware),
            "public_native_seconds": self.public_native.time.total,
            "best_native_seconds": self.best_native_seconds,
            "candidates": [self._row(one) for one in self.candidates],
        }

    def to_yaml(self) -> str:
        """The choice as it could stand in a configuration, then everything else."""
        content = self.to_dict()
        return str(yaml.safe_dump(content["choice"] | {"plan": content}, sort_keys=False))

    def _row(self, one: Estimate) -> dict[str, Any]:
        return dataclasses.asdict(one.candidate) | {
            "peak_memory_bytes": one.memory.peak,
            "seconds_per_update": one.time.total,
            "speedup_over_public_native": self.speedup_over_public_native(one),
            "speedup_over_best_native": self.speedup_over_best_native(one),
            "feasible": one.feasible,
            "reason": one.reason,
        }

    def __str__(self) -> str:
        from leangrpo.planners.report import describe_plan  # the table knows the plan

        return describe_plan(self)
