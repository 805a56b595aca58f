"""Per-sample weight gradients of a batched forward: one backward, one gradient row per sample.

Under Reweight every sample's gradient is kept apart until its advantage is known. Running the samples one by one does
that for any model; batching them is faster, and then the weight gradient of each layer has to be formed sample by
sample. Linear and patch convolutions are replaced in place by functions that do so; activations' gradients are
untouched.

Contract with the module: the leading dim of every such layer's input is a whole number of repetitions of the batch
(classifier-free guidance stacks [uncond, cond], for example), samples in the same order in each.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input, conv2d_weight

from leangrpo.configs.checks import ConfigError

Rows = dict[int, Tensor]
"""id(parameter) -> [B, *parameter.shape], where its per-sample gradients are added"""


class PerSampleCapture:
    """Owns the replaced layers of `module`. While `rows` is set, their weight gradients go there, sample by sample.

    Raises ConfigError when a trainable parameter belongs to another kind of layer.
    """

    def __init__(self, module: nn.Module):
        self.rows: Rows | None = None
        self.batch = 0
        owned: set[int] = set()
        for layer in module.modules():
            trainable = [p for p in layer.parameters(recurse=False) if p.requires_grad]
            if not trainable:
                continue
            if type(layer) is not nn.Linear and not (type(layer) is nn.Conv2d and _is_plain(layer)):
                continue
            _replace_forward(self, layer)
            owned.update(id(p) for p in trainable)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in owned:
                raise ConfigError(
                    f"samples_per_forward > 1 with schedule=reweight: {name} is not a weight of a Linear or Conv2d "
                    "layer, so its per-sample gradient is not known here; set samples_per_forward=1"
                )

    def add(self, layer: nn.Linear | nn.Conv2d, x: Tensor, grad_out: Tensor) -> None:
        """Add the gradients of `layer`'s weight, as [O, I], and bias [O] from x [b, t, I] and grad_out [b, t, O]."""
        assert self.rows is not None
        if x.shape[0] % self.batch:
            raise ConfigError(
                f"samples_per_forward={self.batch}: a layer sees a leading dim of {x.shape[0]}, which is no multiple "
                "of it, so its samples cannot be told apart; set samples_per_forward=1"
            )
        if x.shape[0] != self.batch:
            x, grad_out = _by_sample(x, self.batch), _by_sample(grad_out, self.batch)
        weight, bias = layer.weight, layer.bias
        if weight.requires_grad:
            rows = self.rows[id(weight)]
            _add_product(rows if rows.dim() == 3 else rows.flatten(2), grad_out.transpose(1, 2), x)
        if bias is not None and bias.requires_grad:
            rows = self.rows[id(bias)]
            rows.add_(grad_out.sum(1).to(rows.device))


def _is_plain(layer: nn.Conv2d) -> bool:
    return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _by_sample(x: Tensor, batch: int) -> Tensor:
    """[k * batch, t, C] -> [batch, k * t, C]"""
    by_sample: Tensor = x.unflatten(0, (-1, batch)).transpose(0, 1).flatten(1, 2)
    return by_sample


def _add_product(rows: Tensor, a: Tensor, b: Tensor) -> None:
    if rows.dtype == a.dtype and rows.device == a.device:
        rows.baddbmm_(a, b)
    else:
        rows.add_(torch.bmm(a, b).to(rows.device))


def _tokens(x: Tensor) -> Tensor:
    """[b, ..., C] -> [b, t, C]"""
    if x.dim() == 3:
        return x
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)


class _Linear(torch.autograd.Function):
    # The weight is taken from the layer in the backward, not saved: a sharding backend frees it in between, and under
    # activation checkpointing a saved one comes back as another object.
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear, capture: PerSampleCapture, *parameters: Tensor) -> Tensor:
        ctx.layer, ctx.capture = layer, capture
        ctx.save_for_backward(x)
        return F.linear(x, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        grad_x = grad_out @ ctx.layer.weight if ctx.needs_input_grad[0] else None
        if ctx.capture.rows is not None:
            ctx.capture.add(ctx.layer, _tokens(x), _tokens(grad_out))
            return grad_x, None, None, *(None for _ in ctx.needs_input_grad[3:])
        flat = grad_out.flatten(0, -2)
        grads = [flat.t() @ x.flatten(0, -2)] + ([flat.sum(0)] if ctx.layer.bias is not None else [])
        return grad_x, None, None, *grads


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Conv2d, capture: PerSampleCapture, *parameters: Tensor) -> Tensor:
        ctx.layer, ctx.capture = layer, capture
        ctx.save_for_backward(x)
        return F.conv2d(x, layer.weight, layer.bias, layer.stride, layer.padding, layer.dilation)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        layer, weight = ctx.layer, ctx.layer.weight
        geometry = (ctx.layer.stride, ctx.layer.padding, ctx.layer.dilation)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = conv2d_input(x.shape, weight, grad_out, *geometry)
        if ctx.capture.rows is not None:
            patches = F.unfold(x, weight.shape[2:], layer.dilation, layer.padding, layer.stride).transpose(1, 2)
            ctx.capture.add(layer, patches, grad_out.flatten(2).transpose(1, 2))
            return grad_x, None, None, *(None for _ in ctx.needs_input_grad[3:])
        grads = [conv2d_weight(x, weight.shape, grad_out, *geometry)]
        if layer.bias is not None:
            grads.append(grad_out.sum((0, 2, 3)))
        return grad_x, None, None, *grads


def _replace_forward(capture: PerSampleCapture, layer: nn.Linear | nn.Conv2d) -> None:
    function = _Linear if isinstance(layer, nn.Linear) else _Conv2d
    without_graph = layer.forward

    def forward(x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # most steps of a rollout: nothing will be asked for
            return without_graph(x)
        parameters = (layer.weight,) if layer.bias is None else (layer.weight, layer.bias)
        result: Tensor = function.apply(x, layer, capture, *parameters)  # type: ignore[no-untyped-call]
        return result

    layer.forward = forward  # type: ignore[method-assign, assignment]
