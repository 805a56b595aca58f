"""Measure this machine: forward and backward of a policy, copies, collectives. What is measured replaces the presets.

The result is stored per machine and number of ranks, and used by `detect_hardware` from then on. A run that has its
plan keeps it.
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from leangrpo.planners.costs import STREAM
from leangrpo.planners.hardware import MEASURED, calibration_file
from leangrpo.planners.trace import shardable_blocks, trace_module
from leangrpo.planners.types import HardwareSpec

COPIED = 64 * 2**20  # bytes of a measured copy or collective: beyond the caches
BATCHES = (1, 2, 4, 8)
REPEATS = 15


Inputs = Callable[[int], Mapping[str, Tensor]]
"""the keyword arguments of a forward of that many samples"""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Of one pass of a policy, forward or backward."""

    flops: float
    """per second"""
    operator_seconds: float
    operator_bandwidth: float | None = None
    """bytes per second; None: not told apart"""
    graph_operator_seconds: float = 0.0
    """per operator of the forward that a backward belongs to"""


def calibrate(
    spec: HardwareSpec, modules: Sequence[nn.Module], inputs: Inputs, *, dtype: Literal["float32", "bfloat16"]
) -> HardwareSpec:
    """`spec` with what this machine measures; every rank of an initialised process group must call it.

    `modules`: a policy, or some blocks of one, with weights of `dtype` on the device to be measured; on a CPU better in
    several widths. Takes some tens of forwards of each. `efficiency` becomes 1: the rates of `dtype` are what was
    sustained; those of the other precision are scaled alike.
    """
    device = next(modules[0].parameters()).device
    measure = measure_hidden if spec.asynchronous else measure_added
    forward, backward, checkpointing = measure(modules, inputs, dtype=dtype)
    memory = measure_copy(device)
    scale = forward.flops / (spec.flops if dtype == "bfloat16" else spec.float32_flops)
    measured: dict[str, Any] = {
        "flops": spec.flops * scale,
        "float32_flops": spec.float32_flops * scale,
        "efficiency": 1.0,
        "backward_efficiency": backward.flops / forward.flops,
        "operator_seconds": forward.operator_seconds,
        "backward_operator_seconds": backward.operator_seconds,
        "operator_bandwidth": forward.operator_bandwidth,
        "backward_operator_bandwidth": backward.operator_bandwidth,
        "graph_operator_seconds": backward.graph_operator_seconds,
        "checkpoint_block_seconds": checkpointing[0],
        "checkpoint_operator_seconds": checkpointing[1],
        "memory_bandwidth": memory / STREAM,
    }
    if device.type == "cuda":
        measured["host_bandwidth"] = measure_host_copy(device)
    else:
        measured |= {"host_bandwidth": memory, "host_memory_bandwidth": memory}
    if dist.is_initialized() and dist.get_world_size() > 1:
        gather, reduce, latency = measure_collectives(device)
        measured |= {
            "all_gather_bandwidth": gather,
            "reduce_scatter_bandwidth": reduce,
            "collective_latency": latency,
        }
    return dataclasses.replace(spec, **measured, source=f"{spec.source.removesuffix('; calibrated')}; calibrated")


Measured = tuple[Rates, Rates, tuple[float, float]]
"""of forward and backward; what checkpointing costs beside recomputation, per block and per operator"""


def measure_hidden(
    modules: Sequence[nn.Module], inputs: Inputs, *, dtype: Literal["float32", "bfloat16"], batch: int = 4
) -> Measured:
    """Of a GPU: what grows with the samples is compute, what does not is issuing operators.

    Where one sample already keeps the device busy, issuing hides and counts as nothing. The first module is measured.
    """
    assert batch > 1
    trace = trace_module(modules[0], inputs(1), dtype=dtype)
    first, more = seconds_of_passes(modules[0], inputs(1))[0], seconds_of_passes(modules[0], inputs(batch))
    per_sample = (more[0] - first) / (batch - 1)
    if per_sample <= 0:  # too small to tell: all of it is issuing
        per_sample = more[0] / batch
    operator = max(0.0, first - per_sample) / trace.forward_operators
    backward = max(more[1] - operator * trace.backward_operators, 0.1 * more[1])
    forward_rates = Rates(trace.forward_flops / per_sample, operator)
    return forward_rates, Rates(batch * trace.backward_flops / backward, operator), (0.0, 0.0)


def measure_added(modules: Sequence[nn.Module], inputs: Inputs, *, dtype: Literal["float32", "bfloat16"]) -> Measured:
    """Of a CPU: seconds = operators x issue + FLOPs / rate + bytes / bandwidth, and nothing hides behind anything.

    Least squares of the relative errors over BATCHES and all `modules`. The graph counts to the backward.
    """
    terms: tuple[list[list[float]], list[list[float]]] = ([], [])
    seconds: tuple[list[float], list[float]] = ([], [])
    hooks: list[tuple[list[float], float]] = []
    for module in modules:
        trace = trace_module(module, inputs(1), dtype=dtype)
        for batch in BATCHES:
            alone, more = seconds_of_passes(module, inputs(batch))
            traffic = [fixed + batch * each for fixed, each in (trace.forward_traffic, trace.backward_traffic)]
            operators = [float(trace.forward_operators), float(trace.backward_operators)]
            terms[0].append([operators[0], batch * trace.forward_flops, traffic[0]])
            terms[1].append([operators[1], batch * trace.backward_flops, traffic[1], operators[0]])
            seconds[0].append(alone)
            seconds[1].append(more)
            extra = seconds_of_checkpointing(module, inputs(batch)) - alone - more - alone
            hooks.append(([len(trace.blocks), operators[0]], extra))
    forward, backward = (fit(*one) for one in zip(terms, seconds, strict=True))
    # of differences between long times, which would lose their weight in relative errors of the smallest
    per_block, per_operator = fit(*zip(*hooks, strict=True), relative=False)
    # a term that measures as nothing is a rate so high that it does not show
    return (
        Rates(1 / max(forward[1], 1e-15), forward[0], 1 / max(forward[2], 1e-15)),
        Rates(1 / max(backward[1], 1e-15), backward[0], 1 / max(backward[2], 1e-15), backward[3]),
        (per_block, per_operator),
    )


def fit(terms: Sequence[Sequence[float]], seconds: Sequence[float], *, relative: bool = True) -> list[float]:
    """Costs >= 0 per unit of every term, by least squares of errors, relative ones by default."""
    a, y = torch.tensor(terms, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64)[:, None]
    a, y = (a / y, y / y) if relative else (a, y)
    scale = a.norm(dim=0)
    kept = [index for index, size in enumerate(scale.tolist()) if size > 0]
    costs = [0.0] * a.shape[1]
    while kept:
        found = torch.linalg.lstsq(a[:, kept] / scale[kept], y).solution[:, 0]
        if not (found < 0).any():
            for index, value in zip(kept, (found / scale[kept]).tolist(), strict=True):
                costs[index] = value
            break
        del kept[int(found.argmin())]  # a negative cost stands for nothing
    return costs


def seconds_of_passes(module: nn.Module, arguments: Mapping[str, Tensor]) -> tuple[float, float]:
    """Of a forward without grad, and of what a backward adds to it: the graph as well."""
    device = next(module.parameters()).device

    def forward() -> None:
        with torch.no_grad():
            module(**arguments)

    alone = seconds_of(forward, device)
    return alone, seconds_of(lambda: forward_and_backward(module, arguments), device) - alone


def seconds_of_checkpointing(module: nn.Module, arguments: Mapping[str, Tensor]) -> float:
    """Of a forward and backward with every block checkpointed."""
    device, blocks = next(module.parameters()).device, [block for _, block in shardable_blocks(module)]
    plain = [block.forward for block in blocks]
    for block, forward in zip(blocks, plain, strict=True):
        block.forward = partial(checkpoint, forward, use_reentrant=False)
    try:
        return seconds_of(lambda: forward_and_backward(module, arguments), device)
    finally:
        for block, forward in zip(blocks, plain, strict=True):
            block.forward = forward


def forward_and_backward(module: nn.Module, arguments: Mapping[str, Tensor]) -> None:
    """With the gradients dropped afterwards."""
    result = module(**arguments)
    prediction = result if isinstance(result, Tensor) else result[0]
    prediction.float().pow(2).mean().backward()
    for parameter in module.parameters():
        parameter.grad = None


def measure_copy(device: torch.device) -> float:
    """Bytes per second that adding one buffer to another reads and writes."""
    total, addend = (torch.ones(COPIED // 4, device=device) for _ in range(2))
    return 3 * COPIED / seconds_of(lambda: total.add_(addend), device)


def measure_host_copy(device: torch.device) -> float:
    """Bytes per second from pinned host memory to the device."""
    source, target = torch.ones(COPIED // 4).pin_memory(), torch.ones(COPIED // 4, device=device)
    return COPIED / seconds_of(lambda: target.copy_(source, non_blocking=True), device)


def measure_collectives(device: torch.device) -> tuple[float, float, float]:
    """Bus bandwidths of all-gather and reduce-scatter, and seconds of the smallest collective.

    The same on all ranks: of the slowest.
    """
    ranks = dist.get_world_size()
    whole = torch.ones(COPIED // 4 // ranks * ranks, device=device)
    shard = torch.ones(whole.numel() // ranks, device=device)
    moved = COPIED * (ranks - 1) / ranks
    seconds = torch.tensor(
        [
            seconds_of(lambda: dist.all_gather_into_tensor(whole, shard), device),
            seconds_of(lambda: dist.reduce_scatter_tensor(shard, whole), device),
            seconds_of(lambda: dist.all_gather_into_tensor(whole[:ranks], shard[:1]), device),
        ],
        device=device,
    )
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    gather, reduce, latency = seconds.tolist()
    return moved / gather, moved / reduce, latency


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """The shortest of some calls, after one that is not counted: whatever else is running only adds."""
    times = []
    for _ in range(REPEATS + 1):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def store(spec: HardwareSpec) -> Path:
    """Keep a calibration for this machine; returns the file."""
    path = calibration_file(spec)
    path.parent.mkdir(parents=True, exist_ok=True)
    measured = {name: getattr(spec, name) for name in MEASURED}
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(measured, indent=1), encoding="utf-8")
    temporary.replace(path)
    return path
