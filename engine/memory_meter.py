"""Device memory of an update, measured, in the components in which planners/memory.py predicts it.

    with MemoryMeter(engine) as meter:
        engine.train_step(prompts)
    meter.peak_bytes, meter.peak["activations"], meter.peak_phase

Parameters, gradients, optimizer states and gradient buffers are booked under their owners' names. Of the rest, what is
made in a forward or backward are activations (with the gradients that flow through the graph, and the stored
transitions), except gradients of weights and buffers of collectives; those, and what is made in other phases, are
temporaries. What existed before and belongs to nobody else are other models.
"""

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from leangrpo.engine.distributed import World
from leangrpo.engine.phases import replaced, watch_phases
from leangrpo.engine.reweight import schedule_type
from leangrpo.engine.schedules import Schedule
from leangrpo.engine.storage_meter import StorageMeter, tensors_in
from leangrpo.engine.trainer import Engine
from leangrpo.planners.memory import COMPONENTS

GRAPH_PHASES = ("rollout", "recompute", "backward")
"""phases whose tensors belong to a forward or backward of the policy"""


OPAQUE = (str, bytes, int, float, type, FunctionType, MethodType, ModuleType, World, dist.ProcessGroup)
"""where no tensor of the engine's is looked for"""


class MemoryMeter(StorageMeter):
    """Measures updates of `engine` while it is active: everything that the engine holds, and what it makes.

    Exact on the CPU. On CUDA it sees tensors, not what the allocator reserves around them. `peaks_of` has the most that
    each component held, `peak` what they held together at the peak; all in bytes.
    """

    def __init__(self, engine: Engine, *, keep_timeline: bool = False) -> None:
        super().__init__(engine.policy.device, COMPONENTS, keep_timeline=keep_timeline)
        self.engine = engine
        self._undo = ExitStack()
        self._schedule: weakref.ref[Schedule] | None = None

    def __enter__(self) -> "MemoryMeter":
        engine = self.engine
        self.label(held_by(engine.policy, engine.rewards), "other_models")
        self.label(held_by(engine.backend, engine.gradients), "temporaries")
        self.label(other_models(engine), "other_models")  # again: a sharded base is the backend's too
        self._undo.enter_context(watch_phases(engine, self._enter_phase))
        super().__enter__()
        self._watch_buffers()
        for parameter in engine.backend.parameters:
            self._undo.callback(parameter.register_hook(self._weight_gradient).remove)
        return self

    def __exit__(self, *error: Any) -> None:
        self._undo.close()
        super().__exit__(*error)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(operator, types, args, kwargs)
        if operator.namespace in ("c10d", "fsdp"):
            self._collective(operator, args, kwargs or {}, result)
        return result

    def ask_owners(self) -> None:
        for component, tensors in self.engine.backend.owned().items():
            self.label(tensors, component)
        gradients = self.engine.gradients
        total = [] if gradients.total is None else [gradients.total]
        self.label([*total, *gradients.numerators.values(), *self._sums()], "gradient_buffers")

    def _enter_phase(self, phase: str) -> None:
        self.take_frees()  # they belong to the phase before
        self.ask_owners()
        self.phase = phase
        self.component = "activations" if phase in GRAPH_PHASES else "temporaries"

    def _watch_buffers(self) -> None:
        """Book gradient buffers when they are made, and learn who keeps sums of them."""
        gradients, schedule = self.engine.gradients, schedule_type(self.engine.candidate)
        new_buffer, make = gradients.new_buffer, schedule.__init__

        def watched_buffer(*leading: int) -> Tensor:
            before, self.component = self.component, "gradient_buffers"
            try:
                return new_buffer(*leading)
            finally:
                self.component = before

        def watched_make(schedule: Schedule, *args: Any) -> None:
            self._schedule = weakref.ref(schedule)
            make(schedule, *args)

        self._undo.enter_context(replaced(gradients, "new_buffer", watched_buffer))
        self._undo.enter_context(replaced(schedule, "__init__", watched_make))

    def _sums(self) -> list[Tensor]:
        """What the schedule keeps from sample to sample; its statistics of rewards are float64."""
        schedule = self._schedule() if self._schedule is not None else None
        kept = tensors_in(vars(schedule).values()) if schedule is not None else ()
        return [tensor for tensor in kept if tensor.dtype == self.engine.gradients.dtype]

    def _weight_gradient(self, gradient: Tensor | None) -> None:
        if gradient is not None:  # a layer that captures per sample keeps it to itself
            self.label([gradient], "temporaries", instead_of="activations")

    def _collective(self, operator: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Flat buffers are temporaries, what FSDP2 unpacks them into are gathered parameters."""
        self.label(tensors_in((*args, result)), "temporaries", instead_of="activations")
        if operator.namespace == "fsdp" and "split" in operator.name():
            self.label(kwargs["out"], "gathered_parameters")


def other_models(engine: Engine) -> Iterator[Tensor]:
    """Parameters and buffers of the policy's modules but the trained one."""
    for value in vars(engine.policy).values():
        if isinstance(value, nn.Module) and value is not engine.policy.module:
            yield from value.parameters()
            yield from value.buffers()


def held_by(*owners: Any) -> Iterator[Tensor]:
    """Every tensor that attributes and containers lead to."""
    waiting, seen = list(owners), set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, OPAQUE):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset | deque):
            waiting += value
        waiting += vars(value).values() if hasattr(value, "__dict__") else ()
