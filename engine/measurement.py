"""Predicted against measured: peak memory and time of the first updates that follow a new plan."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from leangrpo.engine.memory_meter import MemoryMeter
from leangrpo.engine.phases import watch_phases
from leangrpo.engine.storage_meter import plain_tensors
from leangrpo.engine.trainer import Engine
from leangrpo.engine.types import StepMetrics
from leangrpo.planners.plan import Plan

log = logging.getLogger("leangrpo")

TOLERANCE = 0.10
"""of what was measured; a prediction further off is warned about"""


@dataclass(frozen=True)
class Measured:
    """What the predictions are held against."""

    peak_memory_bytes: int
    """of the rank that needs most, in an update that finds optimizer states; without what allocator and driver add"""
    seconds: float
    timed_update: int
    """whose seconds they are"""
    was_metered: bool
    """whether counting bytes has slowed that update down"""


@dataclass
class PlanCheck:
    """Measures the first update made with `plan` for its memory and the second for its time.

    The first would be too slow: caches are cold and, on a CPU, every storage is counted.
    """

    plan: Plan
    peak_bytes: int | None = field(default=None, init=False)
    updates: int = field(default=0, init=False)

    def train_step(self, engine: Engine, prompts: Sequence[str]) -> StepMetrics:
        """`engine.train_step`, measured."""
        self.updates += 1
        if self.updates > 1:
            return engine.train_step(prompts)
        with PeakMemory(engine) as peak:
            metrics = engine.train_step(prompts)
        self.peak_bytes = int(engine.world.maximum(torch.tensor([peak.bytes], dtype=torch.float64)))
        return metrics

    def conclude(self, engine: Engine, seconds: float) -> Measured:
        """Log both comparisons, on rank 0; `seconds`: of the last update."""
        assert self.peak_bytes is not None
        on_cpu = engine.policy.device.type == "cpu"
        measured = Measured(self.peak_bytes, seconds, engine.update, was_metered=on_cpu and self.updates == 1)
        if engine.world.is_main:
            for line, deviation in compare(self.plan, measured):
                log.log(logging.WARNING if abs(deviation) > TOLERANCE else logging.INFO, line)
        return measured


class PeakMemory:
    """`bytes`: the peak of the update made inside, on this rank; on CUDA the allocator's.

    Optimizer states that the update's first step makes count from the beginning, as they will in all that follow.
    """

    def __init__(self, engine: Engine):
        self.engine, self.bytes = engine, 0
        self._meter = MemoryMeter(engine) if engine.policy.device.type == "cpu" else None
        self._stack = ExitStack()
        self._before_step = self._states = 0

    def __enter__(self) -> "PeakMemory":
        self._states = state_bytes(self.engine)
        if self._meter is None:
            torch.cuda.reset_peak_memory_stats()
        else:
            self._stack.enter_context(self._meter)
        self._stack.enter_context(watch_phases(self.engine, self._changed))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
        made = state_bytes(self.engine) - self._states
        self.bytes = max(self._before_step + made, self._peak())

    def _changed(self, phase: str) -> None:
        if phase == "optimizer step" and self._before_step == 0:
            self._before_step = self._peak()

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self._meter is None else self._meter.peak_bytes


def state_bytes(engine: Engine) -> int:
    """Of the optimizer states that are on the device."""
    plain = (one for tensor in engine.backend.owned()["optimizer_states"] for one in plain_tensors(tensor))
    storages = {storage for one in plain if (storage := one.untyped_storage()).device.type == engine.policy.device.type}
    return sum(storage.nbytes() for storage in storages)


def compare(plan: Plan, measured: Measured) -> list[tuple[str, float]]:
    """A line on memory and one on time, each with the prediction's deviation as part of what was measured."""
    memory = plan.memory.peak / measured.peak_memory_bytes - 1
    time = plan.time.total / measured.seconds - 1
    slow = ", which counting bytes has slowed down" if measured.was_metered else ""
    lines = (
        f"memory per rank: predicted {plan.memory.peak / 1e6:,.1f} MB, measured "
        f"{measured.peak_memory_bytes / 1e6:,.1f} MB ({memory:+.1%})",
        f"time per update: predicted {plan.time.total:.3g} s, measured {measured.seconds:.3g} s in update "
        f"{measured.timed_update}{slow} ({time:+.1%})",
    )
    remedies = ("tools/profile_memory.py shows where it goes", "docs/planner.md tells how to calibrate this machine")
    return [
        (line + (f"; more than {TOLERANCE:.0%} off: {remedy}" if abs(deviation) > TOLERANCE else ""), deviation)
        for line, remedy, deviation in zip(lines, remedies, (memory, time), strict=True)
    ]
