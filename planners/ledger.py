"""A dispatch mode that keeps account of a forward and backward: FLOPs, live bytes, and which storages depend on the
samples."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from leangrpo.planners.flops import count_flops


class Ledger(TorchDispatchMode):
    """Counts while it is active. `live`, `peak`: bytes of storages that were made under it and still exist."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.operators = 0
        self.traffic = [0, 0]
        """bytes that operators read and write: of tensors that do not depend on the samples, and of those that do"""
        self.live = 0
        self.peak = 0
        self.new_peak = 0
        """most bytes of what was made since `restart_peak`, whatever older is freed meanwhile"""
        self._new = 0
        self._restarts = 0
        self.uncounted_shapes: set[tuple[int, ...]] = set()
        """results of these shapes are no activations: gradients of weights, during a backward"""
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._of_samples: weakref.WeakSet[Any] = weakref.WeakSet()
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """These exist already: parameters, buffers, inputs."""
        self._known.update(tensor.untyped_storage() for tensor in tensors)

    def mark_samples(self, tensors: Iterable[Tensor]) -> None:
        """Whatever is computed from these grows with the number of samples."""
        self._of_samples.update(tensor.untyped_storage() for tensor in tensors)

    def is_known(self, storage: Any) -> bool:
        """Whether it existed before."""
        return storage in self._known

    def is_of_samples(self, storage: Any) -> bool:
        """Whether it depends on a marked tensor."""
        return storage in self._of_samples

    def restart_peak(self) -> int:
        """Forget the peaks so far; returns the bytes that are live now."""
        self.peak = self.live
        self._new = self.new_peak = 0
        self._restarts += 1
        return self.live

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        if operator.namespace == "prim":  # a question to a fake tensor, e.g. for its device; most calls are
            return result
        works = not operator.is_view
        self.operators += works
        self.flops += count_flops(operator, args, kwargs, result)
        inputs = list(_tensors((*args, *kwargs.values())))
        marked = any(t.untyped_storage() in self._of_samples for t in inputs)
        for tensor in inputs if works else ():
            self.traffic[tensor.untyped_storage() in self._of_samples] += tensor.numel() * tensor.element_size()
        for tensor in _tensors(result if isinstance(result, tuple | list) else (result,)):
            storage = tensor.untyped_storage()
            is_weight = tuple(tensor.shape) in self.uncounted_shapes
            self.traffic[marked and not is_weight] += works * tensor.numel() * tensor.element_size()
            if marked:
                self._of_samples.add(storage)
            if is_weight:
                self._known.add(storage)
            elif storage not in self._known and storage not in self._alive:
                self._count(storage)
        return result

    def _count(self, storage: Any) -> None:
        size = storage.nbytes()
        self._alive.add(storage)
        self.live += size
        self._new += size
        self.peak, self.new_peak = max(self.peak, self.live), max(self.new_peak, self._new)
        weakref.finalize(storage, self._release, size, self._restarts)

    def _release(self, size: int, restarts: int) -> None:
        self.live -= size
        self._new -= size * (restarts == self._restarts)


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
