"""ZeRO-3's memory of the order in which modules run, recorded once from a whole forward and backward.

DeepSpeed gathers ahead of use when it knows what comes next: it compares every pass with a recorded one. A forward
without a backward is a beginning of a recorded forward and backward and keeps the record; the other way round the
record is thrown away, and from then on every module of every backward is gathered by itself. A rollout begins with a
forward alone, so the record is made before it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

PASSES = 2
"""DeepSpeed records one pass after it has been told, by the beginning of it, that the last one is over"""


def record_before_first_forward(module: nn.Module, parameters: Sequence[nn.Parameter], release: Any) -> None:
    """Let the first call of `module` be preceded by `PASSES` forward and backward passes with the same arguments.

    `release()` is called after each backward. What they compute is dropped.
    """

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()
        dropping = [p.register_hook(drop) for p in parameters]
        with torch.enable_grad():
            for _ in range(PASSES):
                outputs = module(*args, **kwargs)
                output = outputs if isinstance(outputs, Tensor) else outputs[0]
                torch.autograd.grad(output.sum(), parameters, allow_unused=True)
                release()
        for one in dropping:
            one.remove()

    handle = module.register_forward_pre_hook(record, prepend=True, with_kwargs=True)


def drop(gradient: Tensor) -> Tensor:
    """Zeros of the same shape that take no memory."""
    return gradient.new_zeros(()).expand(gradient.shape)
