"""The rank-local accounting of gradients: where a backward's result goes before anything is reduced or stepped.

All trainable parameters share one flat layout [N]. A hook moves every parameter gradient into a row of that layout as
soon as autograd has it and drops it, so that no gradient is ever held twice and none is reduced behind our back.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from leangrpo.configs.checks import ConfigError
from leangrpo.configs.schema import Sync
from leangrpo.engine.per_sample import PerSampleCapture
from leangrpo.engine.sharding.base import ShardingBackend
from leangrpo.kernels.rescale_accumulate import rescale_accumulate_


class Gradients:
    """Flat gradient buffers over a backend's trainable parameters.

    `total` [N] holds what already carries its final weight; `sync` says when it is handed to the backend's reduction.
    `numerators` [K] of [N] hold, under a global std, what still has to be divided by a standard deviation that is known
    after the last prompt. With `per_sample_batch` > 1 the module's layers are prepared for `backward_per_sample`.
    """

    def __init__(
        self,
        module: nn.Module,
        backend: ShardingBackend,
        *,
        sync: Sync,
        dtype: torch.dtype,
        device: torch.device,
        per_sample_batch: int = 1,
        sums_are_reduced: bool = False,
    ):
        self.parameters = backend.parameters
        if not self.parameters:
            raise ConfigError("policy.weights: nothing is trainable; use full, or lora with target_modules that match")
        self.backend, self.sync, self.dtype, self.device = backend, sync, dtype, device
        self.sizes = [full_shape(p).numel() for p in self.parameters]
        ends = list(itertools.accumulate(self.sizes))
        slices = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        self.numel = ends[-1]
        self.sums_are_reduced = sums_are_reduced
        self.total: Tensor | None = None
        self.numerators: dict[int, Tensor] = {}
        self._capture = PerSampleCapture(module) if per_sample_batch > 1 else None
        self._sink: Tensor | None = None
        for parameter, piece in zip(self.parameters, slices, strict=True):
            if backend.uses_accumulation:
                parameter.register_post_accumulate_grad_hook(self._after_accumulation(piece))
            else:
                parameter.register_hook(self._before_accumulation(piece))

    def _after_accumulation(self, piece: slice) -> Callable[[Tensor], None]:
        def move_gradient(parameter: Tensor) -> None:
            if parameter.grad is None:  # autograd calls the hook also for a gradient that a layer kept to itself
                return
            assert self._sink is not None, "a backward of the policy outside of Gradients"
            self._sink[piece].add_(parameter.grad.reshape(-1).to(self._sink.device))
            parameter.grad = None

        return move_gradient

    def _before_accumulation(self, piece: slice) -> Callable[[Tensor], Tensor | None]:
        def move_gradient(gradient: Tensor) -> Tensor | None:
            if self._sink is None:  # the backend injects the finished gradient through the same leaves
                return None
            self._sink[piece].add_(gradient.reshape(-1).to(self._sink.device))
            return gradient.new_zeros(()).expand(gradient.shape)  # autograd.grad's own result takes no memory

        return move_gradient

    def new_buffer(self, *leading: int) -> Tensor:
        """Zeros [*leading, N]."""
        return torch.zeros(*leading, self.numel, dtype=self.dtype, device=self.device)

    def backward(self, loss: Tensor, *, into: Tensor | None = None, retain_graph: bool = False) -> None:
        """Add d loss / d parameters to `into` [N], by default to `total`."""
        self._sink = self.get_total() if into is None else into
        try:
            self._run(loss, retain_graph)
        finally:
            self._sink = None
        if into is None and self.sync == "every_backward":
            self.reduce()

    def backward_per_sample(self, log_prob_B: Tensor, rows: Tensor, *, retain_graph: bool = False) -> None:
        """Add d log_prob_B[b] / d parameters to rows[b], for all b. rows [B, N]."""
        if len(log_prob_B) == 1:
            self.backward(log_prob_B.sum(), into=rows[0], retain_graph=retain_graph)
            return
        assert self._capture is not None, "Gradients was built for one sample per backward"
        self._capture.batch = len(log_prob_B)
        pieces = rows.split(self.sizes, dim=1)
        self._capture.rows = {
            id(parameter): piece.view(-1, *full_shape(parameter))
            for parameter, piece in zip(self.parameters, pieces, strict=True)
        }
        try:
            self._run(log_prob_B.sum(), retain_graph)
        finally:
            self._capture.rows = None

    def _run(self, loss: Tensor, retain_graph: bool) -> None:
        if self.backend.uses_accumulation:
            loss.backward(retain_graph=retain_graph)
        else:
            torch.autograd.grad(loss, self.parameters, retain_graph=retain_graph, allow_unused=True)
        self.backend.after_backward()

    def group_done(self) -> None:
        """All that a group contributes is in `total`."""
        if self.sync == "every_group":
            self.reduce()

    def update_done(self) -> None:
        """All that an optimizer step is made of is in `total`, unless it has been reduced already."""
        if self.sync == "every_update":
            self.reduce()

    def reduce(self) -> None:
        """Hand `total` to the backend: the collective, also where this rank has nothing to add."""
        assert not self.numerators, "numerators wait for their divisor"
        if self.total is None and self.sums_are_reduced:
            return
        total, self.total = self.get_total(), None
        self.backend.reduce(total)

    def get_total(self) -> Tensor:
        """`total`, made on first use."""
        if self.total is None:
            self.total = self.new_buffer()
        return self.total

    def get_numerator(self, term: int) -> Tensor:
        """The undivided policy gradient of reward term `term`, made on first use."""
        if term not in self.numerators:
            self.numerators[term] = self.new_buffer()
        return self.numerators[term]

    def divide_numerators(self, scale_K: Tensor) -> None:
        """total += sum_k scale_k numerators_k; what was in `total` before (the KL term) is not scaled."""
        for term in sorted(self.numerators):
            numerator = self.numerators.pop(term)
            if self.total is None:
                self.total = numerator.mul_(float(scale_K[term]))
            else:
                rescale_accumulate_(self.total, numerator[None], [float(scale_K[term])])

    def discard(self) -> None:
        """Forget what has been accumulated (after an error inside an update)."""
        self.total, self.numerators = None, {}


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """The shape of the whole parameter; under ZeRO-3 it is empty between uses and DeepSpeed keeps the shape aside."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))
