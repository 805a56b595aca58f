"""Bytes of live storages on one device, counted exactly and by component: what a memory profile is made of.

Every storage counts once, however many views it has, from the operator that returns it until it is freed. Frees and
sizes come from the storages themselves (weak references, `resize_`), so that nothing depends on who held them.
[Note: what is not seen] Work space that a kernel or a collective takes and returns inside of one operator.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class _Live(weakref.ref[torch.UntypedStorage]):
    """A storage on the device: its size as last seen, and what it is held for."""

    __slots__ = ("component", "key", "size")
    key: int
    size: int
    component: str


class StorageMeter(TorchDispatchMode):
    """Counts while it is active; `peak_bytes` and `peak` (by component) are of the time since it was entered.

    A storage is booked under `component` as it stands when the storage appears; `label` books it anew. Backwards count
    too: autograd hands modes to its threads.
    """

    def __init__(self, device: torch.device, components: Iterable[str], *, keep_timeline: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.phase = ""
        self.component = next(iter(components := tuple(components)))
        self.peak_bytes = 0
        self.peak_phase = ""
        self.peak: dict[str, int] = {}
        self.peaks_of: dict[str, int] = dict.fromkeys(components, 0)
        """the most that each component held, each at its own time; what gets its label later counts where it began"""
        self.timeline: list[tuple[float, str, tuple[int, ...]]] | None = [] if keep_timeline else None
        """(seconds since the start, phase, bytes by component) after every change"""
        self._held: dict[str, int] = dict.fromkeys(components, 0)
        self._current = 0
        self._live: dict[int, _Live] = {}
        self._freed: deque[_Live] = deque()  # filled where storages die, in any thread and inside of any operator
        self._is_record = False
        self._start = 0.0
        self._resize: Callable[..., Any] | None = None

    @property
    def current(self) -> int:
        """Bytes that are live now."""
        self.take_frees()
        return self._current

    @property
    def held(self) -> dict[str, int]:
        """Bytes that are live now, by component."""
        self.take_frees()
        return dict(self._held)

    def ask_owners(self) -> None:
        """Called before a peak is written down; a subclass labels what has found its owner since it was made."""

    def label(self, tensors: Iterable[Tensor], component: str, *, instead_of: str | None = None) -> None:
        """Book the storages of `tensors` under `component`, those that were never seen included.

        `instead_of`: only what is booked under that.
        """
        for tensor in tensors:
            for plain in plain_tensors(tensor):
                storage = plain.untyped_storage()
                live = self._live.get(id(storage))
                if live is None or live() is not storage:
                    self._add(storage, component)
                elif live.component != component and instead_of in (None, live.component):
                    self._book(live.component, -live.size)
                    self._book(component, live.size)
                    live.component = component

    def __enter__(self) -> Any:
        """What is already labelled exists; the peak is that of what follows."""
        self.ask_owners()
        self._start = time.perf_counter()
        self.peaks_of = dict(self._held)
        if self.timeline is not None:
            self.timeline = [(0.0, self.phase, tuple(self._held.values()))]
        self._resize = original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:  # FSDP2 frees and allocates with it
            result = original(storage, size)
            self._see(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        assert self._resize is not None
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self.take_frees()
        self._write_down()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(one, "__tensor_flatten__") for one in types):
            return NotImplemented  # a tensor of tensors: its own operators follow
        result = operator(*args, **(kwargs or {}))
        for tensor in tensors_in((result, *args, *(kwargs or {}).values())):
            for plain in plain_tensors(tensor):
                self._see(plain.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        self.take_frees()  # first: the place of a dead storage may be the new one's
        live = self._live.get(id(storage))
        if live is None:
            self._add(storage, self.component)
        elif live.size != storage.nbytes():
            self._change(live, storage.nbytes() - live.size)

    def _add(self, storage: torch.UntypedStorage, component: str) -> None:
        if storage.device.type != self.device.type:
            return
        live = _Live(storage, self._freed.append)
        live.key, live.size, live.component = id(storage), 0, component
        self._live[live.key] = live
        self._change(live, storage.nbytes())

    def take_frees(self) -> None:
        """Book what has died since the last operator."""
        while self._freed:
            live = self._freed.popleft()
            self._change(live, -live.size)
            if self._live.get(live.key) is live:
                del self._live[live.key]

    def _change(self, live: _Live, by: int) -> None:
        if by < 0:
            self._write_down()  # the peak so far is as it was until now
        live.size += by
        self._current += by
        self._book(live.component, by)
        if self._current > self.peak_bytes:
            self.peak_bytes, self.peak_phase, self._is_record = self._current, self.phase, True
        if self.timeline is not None and by:
            self.timeline.append((time.perf_counter() - self._start, self.phase, tuple(self._held.values())))

    def _book(self, component: str, by: int) -> None:
        self._held[component] += by
        self.peaks_of[component] = max(self.peaks_of[component], self._held[component])

    def _write_down(self) -> None:
        if self._is_record:
            self.ask_owners()
            self.peak, self._is_record = dict(self._held), False


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """All tensors of an operator's arguments or results."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the memory of `tensor`: itself, or those inside of a DTensor or another wrapper."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        inner = getattr(tensor, name)
        if isinstance(inner, Tensor):  # a DTensor also names its mesh
            yield from plain_tensors(inner)
