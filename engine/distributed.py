"""The processes of a run: who is who, how they are joined, and the few collectives outside of gradients.

Rewards and statistics travel as float64 on the CPU (gloo) also where gradients use NCCL.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from leangrpo.engine.rendezvous import fresh_store

Broadcast = TypeVar("Broadcast")


@dataclass(frozen=True)
class World:
    """This process among all of them. One process needs no process group."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_main(self) -> bool:
        """Rank 0 writes what is written once."""
        return self.rank == 0

    @classmethod
    def from_environment(cls) -> "World":
        """As torchrun and the deepspeed launcher describe it in the environment."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        rank, size, local_rank, local_size = (
            int(os.environ.get(name, default)) for name, default in zip(names, ("0", "1", "0", "0"), strict=True)
        )
        local_size = local_size or int(os.environ.get("LOCAL_SIZE", "0"))  # as the deepspeed launcher calls it
        return cls(rank, size, local_rank, local_size or size)

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any process. Collective."""
        return bool(self.maximum(torch.tensor([float(flag)]))[0])

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over all processes. Collective."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def maximum(self, values: Tensor) -> Tensor:
        """Elementwise maximum over all processes. Collective."""
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def broadcast(self, value: Broadcast) -> Broadcast:
        """The `value` of rank 0, which must be picklable. Collective."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def barrier(self) -> None:
        """Wait for all processes. Collective."""
        self.any(False)

    def _all_reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size == 1:
            return values
        result = values.to("cpu", torch.float64, copy=True)
        dist.all_reduce(result, op=operation)
        return result.to(values.dtype)


def all_gather(local: Tensor, group: dist.ProcessGroup | None, size: int) -> list[Tensor]:
    """`local` (same shape everywhere, on the CPU) of every rank of `group`. Collective."""
    if size == 1:
        return [local]
    gathered = [torch.empty_like(local) for _ in range(size)]
    dist.all_gather(gathered, local.contiguous(), group=group)
    return gathered


def reduce_scatter_sum(output: Tensor, packed: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start summing `packed` [size * L] over `group`; `output` [L] gets this rank's part."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
    work: dist.Work = scatter(output, packed, op=dist.ReduceOp.SUM, group=group, async_op=True)
    return work


@contextmanager
def joined(world: World, device: torch.device, *, always: bool, timeout_seconds: float) -> Iterator[None]:
    """Join the processes of `world` for the duration of a run; `always`: even a single one (FSDP2 and ZeRO need it)."""
    if world.size == 1 and not always:
        yield
        return
    timeout = timedelta(seconds=timeout_seconds)
    if world.size == 1:
        defaults = {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        for name, value in defaults.items():
            os.environ.setdefault(name, value)
        store = dist.HashStore()  # type: ignore[attr-defined]
    else:
        store = fresh_store(world.rank, world.size, timeout)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    try:
        yield
        world.barrier()
    finally:
        dist.destroy_process_group()
