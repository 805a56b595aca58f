"""total += sum_q weight_q * pending_q: how stored gradients meet their advantages."""

from collections.abc import Sequence

from torch import Tensor


def rescale_accumulate_(total: Tensor, pending: Tensor, weights: Sequence[float]) -> Tensor:
    """Add `pending` [Q, N] (BF16 or FP32), row q times `weights[q]`, to `total` [N] (BF16 or FP32), in place.

    Products and sums are formed in float32. Rows of weight 0 are not read, so that a row with NaN can be left out.
    """
    for row, weight in zip(pending, weights, strict=True):
        if weight != 0.0:
            total.add_(row, alpha=weight)
    return total
