"""What a policy costs, measured on tensors that have shapes but no values: parameters per block, FLOPs of forward and
backward, bytes of activations that autograd saves, with and without checkpointing. No weights, no GPU, seconds.

One forward and one backward run under torch's FakeTensorMode without checkpointing. What checkpointing of the first k
blocks would save follows from the same run: a checkpointed block keeps its inputs instead of what was saved inside it.
[Note: storages] Several saved tensors are often views of one storage, and the input of a block is often saved outside
of it as well. Hence all counting is over sets of storages, which are kept alive so that none is mistaken for another.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from leangrpo.planners.ledger import Ledger
from leangrpo.planners.types import BlockTrace, PolicyTrace

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Storages = dict[int, Any]
"""id -> storage, see [Note: storages]"""


def trace_module(
    module: nn.Module,
    inputs: Mapping[str, Any],
    *,
    dtype: Literal["float32", "bfloat16"],
    batch: int = 1,
    latents: str | None = None,
    name: str = "",
) -> PolicyTrace:
    """Trace `module(**inputs)`, whose result or its first part is the prediction.

    `module` may be on any device, meta included; it is not changed. Parameters and floating inputs count as `dtype`
    (inputs in float32 stay). `inputs`: of one sample, that is `batch` rows (two under classifier-free guidance); of
    tensors only the shapes are used. `latents`: the input that changes from step to step, the first by default.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        run = TraceRun(module, DTYPES[dtype])
        given = {key: _fake_input(value) for key, value in inputs.items()}
        fakes = {key: value for key, value in given.items() if isinstance(value, Tensor)}
        run.forward_and_backward(given, batch)
        peaks, first = run.peaks(), latents or next(iter(fakes))
    return PolicyTrace(
        name=name or type(module).__name__,
        dtype=dtype,
        blocks=run.block_traces(),
        root_parameters=_count(module) - sum(map(_count, run.order)),
        root_trainable=_count(module, trainable=True) - sum(_count(block, trainable=True) for block in run.order),
        forward_flops=float(run.forward_flops),
        backward_flops=float(run.ledger.flops - run.forward_flops),
        saved_bytes=tuple(of_samples for of_samples, _ in run.saved),
        fixed_bytes=tuple(fixed for _, fixed in run.saved),
        peak_bytes=peaks,
        forward_operators=run.forward_operators,
        backward_operators=run.ledger.operators - run.forward_operators,
        transient_bytes=run.ledger.new_peak,
        rollout_bytes=run.rollout_bytes(),
        forward_traffic=run.forward_traffic,
        backward_traffic=run.backward_traffic,
        trainable_tensors=sum(p.requires_grad for p in module.parameters()),
        gradient_bytes=max((p.numel() for p in module.parameters() if p.requires_grad), default=0)
        * DTYPES[dtype].itemsize,
        separable=_is_separable(module),
        shared_bytes=sum(fake.numel() * fake.element_size() for key, fake in fakes.items() if key != first),
        latent_bytes=fakes[first].numel() * 4 // batch,
    )


def shardable_blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The units of sharding and checkpointing: entries, with parameters, of every outermost ModuleList."""
    found: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        inner = child.named_children() if isinstance(child, nn.ModuleList) else shardable_blocks(child)
        found += [(f"{name}.{key}", one) for key, one in inner if next(one.parameters(), None) is not None]
    return found


def gradient_shapes(module: nn.Module) -> set[tuple[int, ...]]:
    """What the gradients of trainable matrices look like, also before they are transposed.

    They do not grow with the samples, so they must not count as activations; the memory model has its own term.
    """
    shapes = {tuple(p.shape) for p in module.parameters() if p.requires_grad and p.dim() > 1}
    return shapes | {shape[::-1] for shape in shapes}


class TraceRun:
    """One forward and backward under fake tensors, and what was saved where."""

    def __init__(self, module: nn.Module, dtype: torch.dtype):
        self.module, self.ledger = module, Ledger()
        self.names = {block: name for name, block in shardable_blocks(module)}
        self.order: list[nn.Module] = []
        self.block_flops: dict[nn.Module, int] = {}
        self.forward_flops = self.forward_operators = 0
        self.forward_traffic = self.backward_traffic = (0, 0)
        self.tensors = {name: _fake(tensor, dtype) for name, tensor in _named_tensors(module)}
        self.saved_in: dict[nn.Module, Storages] = {module: {}}
        """saved for the backward inside of a block, or under `module` outside of all"""
        self.inputs_of: dict[nn.Module, Storages] = {}
        self.calls: dict[nn.Module, tuple[Any, Any]] = {}
        self.saved: list[tuple[int, int]] = []
        """over k: bytes of one step with the first k blocks checkpointed, of the samples and independent of them"""
        self.kept: list[int] = []
        """over k: of it what is saved outside of blocks, or is an input of one of the first k"""
        self.sizes: dict[nn.Module, tuple[int, int]] = {}
        """bytes of a block's inputs, and of what is saved inside of it"""
        self._now: nn.Module = module
        self._transient = 0

    def forward_and_backward(self, inputs: dict[str, Any], batch: int) -> None:
        """Fill the books. Raises RuntimeError where the module cannot run on fake tensors."""
        tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
        self.ledger.ignore([*self.tensors.values(), *tensors])
        self.ledger.mark_samples(t for t in tensors if t.dim() and t.shape[0] == batch)
        removers = [hook for block in self.names for hook in self._watch(block)]
        try:
            with self.ledger, torch.autograd.graph.saved_tensors_hooks(self._save, lambda saved: saved):
                result = torch.func.functional_call(self.module, self.tensors, (), inputs)
                self.forward_flops, self.forward_operators = self.ledger.flops, self.ledger.operators
                fixed, of_samples = self.ledger.traffic
                self.forward_traffic = fixed, of_samples // batch
                prediction = tree_leaves(result)[0]
                del result
                self._close_books()
                saved_now = self.ledger.restart_peak()
                self.ledger.uncounted_shapes = gradient_shapes(self.module)
                prediction.backward(torch.empty_like(prediction))
                self._transient = self.ledger.peak - saved_now
                self.backward_traffic = (
                    self.ledger.traffic[0] - fixed,
                    (self.ledger.traffic[1] - of_samples) // batch,
                )
        finally:
            for remove in removers:
                remove()

    def block_traces(self) -> tuple[BlockTrace, ...]:
        """In the order of execution."""
        return tuple(
            BlockTrace(
                name=self.names[block],
                parameters=_count(block),
                trainable=_count(block, trainable=True),
                forward_flops=float(self.block_flops[block]),
            )
            for block in self.order
        )

    def _close_books(self) -> None:
        """Sizes instead of storages: what is saved must be freed when the backward has used it."""
        for k in range(len(self.order) + 1):
            kept = dict(self.saved_in[self.module])
            for block in self.order[:k]:
                kept |= self.inputs_of[block]
            self.kept.append(_bytes(kept))
            for block in self.order[k:]:
                kept |= self.saved_in[block]
            sizes = [(storage.nbytes(), self.ledger.is_of_samples(storage)) for storage in kept.values()]
            of_samples = sum(size for size, marked in sizes if marked)
            self.saved.append((of_samples, sum(size for size, _ in sizes) - of_samples))
        self.sizes = {block: (_bytes(self.inputs_of[block]), _bytes(self.saved_in[block])) for block in self.order}
        self.saved_in.clear()
        self.inputs_of.clear()
        for block, call in self.calls.items():
            self.calls[block] = tree_map_only(Tensor, _like, call)

    def peaks(self) -> tuple[int, ...]:
        """Over k: the most activations at one time.

        Either when the backward begins, or while it goes through the largest checkpointed block, which has to be run
        again with its graph; what later blocks saved is gone by then.
        """
        largest = self._largest()
        block_peak = self._peak_of(largest) if largest is not None else 0
        return tuple(
            max(sum(saved) + self._transient, kept + block_peak if k else 0)
            for k, (saved, kept) in enumerate(zip(self.saved, self.kept, strict=True))
        )

    def rollout_bytes(self) -> int:
        """The most at one time in a forward without grad: the largest block with its inputs."""
        largest = self._largest()
        if largest is None:
            return 0
        with torch.no_grad():
            return self.sizes[largest][0] + self._peak_of(largest)

    def _largest(self) -> nn.Module | None:
        return max(self.order, key=lambda block: self.sizes[block][1], default=None)

    def _peak_of(self, block: nn.Module) -> int:
        """Most bytes while one block is run by itself, forward and, with grad enabled, backward."""
        ledger = Ledger()
        args, kwargs = self.calls[block]
        tensors = {name: self.tensors[f"{self.names[block]}.{name}"] for name, _ in _named_tensors(block)}
        ledger.ignore([*tensors.values(), *(t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))])
        with ledger:
            result = torch.func.functional_call(block, tensors, args, kwargs)
            outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
            ledger.uncounted_shapes = gradient_shapes(block)
            if outputs:
                torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])
        return ledger.peak

    def _watch(self, block: nn.Module) -> list[Callable[[], None]]:
        def enter(block: nn.Module, args: Any, kwargs: Any) -> None:
            if block not in self.block_flops:
                self.order.append(block)
                self.block_flops[block], self.saved_in[block], self.inputs_of[block] = 0, {}, {}
            self.calls[block] = (args, kwargs)
            self._keep(self.inputs_of[block], tree_leaves((args, kwargs)))
            self._now, self.block_flops[block] = block, self.block_flops[block] - self.ledger.flops

        def leave(block: nn.Module, args: Any, result: Any) -> None:
            self._now, self.block_flops[block] = self.module, self.block_flops[block] + self.ledger.flops

        return [
            block.register_forward_pre_hook(enter, with_kwargs=True).remove,
            block.register_forward_hook(leave).remove,
        ]

    def _save(self, tensor: Tensor) -> Tensor:
        self._keep(self.saved_in[self._now], [tensor])
        return tensor

    def _keep(self, storages: Storages, values: list[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if not self.ledger.is_known(storage):
                    storages[id(storage)] = storage


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _fake(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Parameters lose their gradient as soon as they have it: it is counted elsewhere."""
    fake = torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype)
    if tensor.requires_grad:
        fake.requires_grad_(True).register_post_accumulate_grad_hook(_drop_gradient)
    return fake


def _fake_input(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _like(tensor: Tensor) -> Tensor:
    """A leaf of the same shape, so that nothing that belongs to the graph stays alive."""
    return torch.empty_like(tensor, requires_grad=tensor.requires_grad)


def _is_separable(module: nn.Module) -> bool:
    """As the engine's capture of per-sample gradients requires it."""
    plain = {id(p) for layer in module.modules() if type(layer) in (nn.Linear, nn.Conv2d) for p in layer.parameters()}
    return all(id(p) in plain for p in module.parameters() if p.requires_grad)


def _count(module: nn.Module, trainable: bool = False) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trainable)


def _bytes(storages: Storages) -> int:
    return sum(storage.nbytes() for storage in storages.values())
