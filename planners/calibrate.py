"""Measure this machine: forward and backward of a policy, copies, collectives. What is measured replaces the presets.

The result is stored per machine and number of ranks, and used by `detect_hardware` from then on. A run that has its
plan keeps it.
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from leangrpo.planners.costs import STREAM
from leangrpo.planners.hardware import MEASURED, calibration_file
from leangrpo.planners.trace import trace_module
from leangrpo.planners.types import HardwareSpec

COPIED = 64 * 2**20  # bytes of a measured copy or collective: beyond the caches
REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Rates:
    """Sustained by a policy: FLOPs per second of forward and backward, and seconds to issue an operator."""

    forward: float
    backward: float
    operator_seconds: float


def calibrate(
    spec: HardwareSpec,
    module: nn.Module,
    inputs: Callable[[int], Mapping[str, Tensor]],
    *,
    dtype: Literal["float32", "bfloat16"],
    batch: int = 4,
) -> HardwareSpec:
    """`spec` with what this machine measures; every rank of an initialised process group must call it.

    `module`: a policy, or some blocks of one, with weights of `dtype` on the device to be measured. `inputs(b)`: the
    keyword arguments of a forward of b samples. Takes some tens of forwards. `efficiency` becomes 1: the rates of
    `dtype` are what was sustained; those of the other precision are scaled alike.
    """
    device = next(module.parameters()).device
    rates = measure_policy(module, inputs, dtype=dtype, batch=batch)
    memory = measure_copy(device)
    peak = spec.flops if dtype == "bfloat16" else spec.float32_flops
    scale = rates.forward / peak
    measured: dict[str, Any] = {
        "flops": spec.flops * scale,
        "float32_flops": spec.float32_flops * scale,
        "efficiency": 1.0,
        "backward_efficiency": rates.backward / rates.forward,
        "operator_seconds": rates.operator_seconds,
        "memory_bandwidth": memory / STREAM,
    }
    if device.type == "cuda":
        measured["host_bandwidth"] = measure_host_copy(device)
    else:
        measured |= {"host_bandwidth": memory, "host_memory_bandwidth": memory}
    if dist.is_initialized() and dist.get_world_size() > 1:
        gather, reduce = measure_collectives(device)
        measured |= {"all_gather_bandwidth": gather, "reduce_scatter_bandwidth": reduce}
    return dataclasses.replace(spec, **measured, source=f"{spec.source}; calibrated")


def measure_policy(
    module: nn.Module,
    inputs: Callable[[int], Mapping[str, Tensor]],
    *,
    dtype: Literal["float32", "bfloat16"],
    batch: int,
) -> Rates:
    """From 1 and `batch` samples: what grows with the samples is compute, what does not is issuing operators.

    Where one sample already keeps the device busy, issuing hides and counts as nothing.
    """
    assert batch > 1
    one, many = inputs(1), inputs(batch)
    trace = trace_module(module, one, dtype=dtype)

    def forward(arguments: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            module(**arguments)

    def both(arguments: Mapping[str, Tensor]) -> None:
        result = module(**arguments)
        prediction = result if isinstance(result, Tensor) else result[0]
        prediction.float().pow(2).mean().backward()
        for parameter in module.parameters():
            parameter.grad = None

    device = next(module.parameters()).device
    first, more = seconds_of(lambda: forward(one), device), seconds_of(lambda: forward(many), device)
    per_sample = (more - first) / (batch - 1)
    if per_sample <= 0:  # too small to tell: all of it is issuing
        per_sample = more / batch
    issue = max(0.0, first - per_sample)
    operator = issue / trace.forward_operators
    backward = seconds_of(lambda: both(many), device) - more
    backward = max(backward - operator * trace.backward_operators, 0.1 * backward)
    return Rates(
        forward=trace.forward_flops / per_sample,
        backward=batch * trace.backward_flops / backward,
        operator_seconds=operator,
    )


def measure_copy(device: torch.device) -> float:
    """Bytes per second that adding one buffer to another reads and writes."""
    total, addend = (torch.ones(COPIED // 4, device=device) for _ in range(2))
    return 3 * COPIED / seconds_of(lambda: total.add_(addend), device)


def measure_host_copy(device: torch.device) -> float:
    """Bytes per second from pinned host memory to the device."""
    source, target = torch.ones(COPIED // 4).pin_memory(), torch.ones(COPIED // 4, device=device)
    return COPIED / seconds_of(lambda: target.copy_(source, non_blocking=True), device)


def measure_collectives(device: torch.device) -> tuple[float, float]:
    """Bus bandwidths of all-gather and reduce-scatter, the same on all ranks: of the slowest."""
    ranks = dist.get_world_size()
    whole = torch.ones(COPIED // 4 // ranks * ranks, device=device)
    shard = torch.ones(whole.numel() // ranks, device=device)
    moved = COPIED * (ranks - 1) / ranks
    seconds = torch.tensor(
        [
            seconds_of(lambda: dist.all_gather_into_tensor(whole, shard), device),
            seconds_of(lambda: dist.reduce_scatter_tensor(shard, whole), device),
        ],
        device=device,
    )
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    gather, reduce = seconds.tolist()
    return moved / gather, moved / reduce


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """The median of some calls, after one that is not counted."""
    times = []
    for _ in range(REPEATS + 1):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[REPEATS // 2]


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
