"""The rank-local accounting of gradients: where a backward's result goes before anything is reduced or stepped.

All trainable parameters share one flat layout [N]. A hook moves every parameter gradient into a row of that layout as
soon as autograd has it and drops it, so that no gradient is ever held twice and none is reduced behind our back.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from leangrpo.configs.checks import ConfigError
from leangrpo.engine.per_sample import PerSampleCapture
from leangrpo.kernels.rescale_accumulate import rescale_accumulate_


class Gradients:
    """Flat gradient buffers of `module`'s trainable parameters.

    `total` [N] holds what already carries its final weight. `numerators` [K] of [N] hold, under a global std, what
    still has to be divided by a standard deviation that is known after the last prompt. With `per_sample_batch` > 1
    the module's layers are prepared for `backward_per_sample`.
    """

    def __init__(self, module: nn.Module, *, dtype: torch.dtype, device: torch.device, per_sample_batch: int = 1):
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        if not self.parameters:
            raise ConfigError("policy.weights: nothing is trainable; use full, or lora with target_modules that match")
        self.dtype, self.device = dtype, device
        self.slices: list[slice] = []
        start = 0
        for parameter in self.parameters:
            self.slices.append(slice(start, start + parameter.numel()))
            start += parameter.numel()
        self.numel = start
        self.total: Tensor | None = None
        self.numerators: dict[int, Tensor] = {}
        self._capture = PerSampleCapture(module) if per_sample_batch > 1 else None
        self._sink: Tensor | None = None
        for parameter, piece in zip(self.parameters, self.slices, strict=True):
            parameter.register_post_accumulate_grad_hook(self._hook(piece))

    def _hook(self, piece: slice) -> Callable[[Tensor], None]:
        def move_gradient(parameter: Tensor) -> None:
            if parameter.grad is None:  # autograd calls the hook also for a gradient that a layer kept to itself
                return
            assert self._sink is not None, "a backward of the policy outside of Gradients"
            self._sink[piece].add_(parameter.grad.reshape(-1).to(self._sink.device))
            parameter.grad = None

        return move_gradient

    def new_buffer(self, *leading: int) -> Tensor:
        """Zeros [*leading, N]."""
        return torch.zeros(*leading, self.numel, dtype=self.dtype, device=self.device)

    def backward(self, loss: Tensor, *, into: Tensor | None = None, retain_graph: bool = False) -> None:
        """Add d loss / d parameters to `into` [N], by default to `total`."""
        self._sink = self.get_total() if into is None else into
        try:
            loss.backward(retain_graph=retain_graph)
        finally:
            self._sink = None

    def backward_per_sample(self, log_prob_B: Tensor, rows: Tensor, *, retain_graph: bool = False) -> None:
        """Add d log_prob_B[b] / d parameters to rows[b], for all b. rows [B, N]."""
        if len(log_prob_B) == 1:
            self.backward(log_prob_B.sum(), into=rows[0], retain_graph=retain_graph)
            return
        assert self._capture is not None, "Gradients was built for one sample per backward"
        self._capture.batch = len(log_prob_B)
        self._capture.rows = {
            id(parameter): rows[:, piece].unflatten(1, parameter.shape)
            for parameter, piece in zip(self.parameters, self.slices, strict=True)
        }
        try:
            log_prob_B.sum().backward(retain_graph=retain_graph)
        finally:
            self._capture.rows = None

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

    def take_total(self) -> Tensor:
        """The finished gradient [N]; the accounting starts anew."""
        assert not self.numerators, "numerators wait for their divisor"
        total, self.total = self.get_total(), None
        return total

    def discard(self) -> None:
        """Forget what has been accumulated (after an error inside an update)."""
        self.total, self.numerators = None, {}
