"""Floating-point operations of the matrix products that torch executes.

torch's FlopCounterMode has no formula for the attention operator that CPU tensors use, and fake CPU tensors with them:
it counts none at all there. The formulas are the same as for the other fused attention operators.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def count_flops(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Of one call of an operator overload: two per multiply-add; 0 for what is no matrix product."""
    formula = FORMULAS.get(operator._overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula else 0
