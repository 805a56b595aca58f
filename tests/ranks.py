"""Start functions on several gloo ranks and get their results back."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from leangrpo.engine.distributed import World, joined


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def run_ranks(size: int, function: Callable[..., Any], *args: Any, folder: Path) -> list[Any]:
    """`function(world, *args)` on ranks 0 to size - 1; their return values in order. A rank's error is raised here."""
    mp.spawn(_rank, (size, free_port(), function, args, folder), nprocs=size)
    return [torch.load(folder / f"result_{rank}.pt", weights_only=False) for rank in range(size)]


def _rank(rank: int, size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...], folder: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    torch.set_num_threads(1)
    world = World(rank, size, rank, size)
    with joined(world, torch.device("cpu"), always=True, timeout_seconds=120):
        torch.save(function(world, *args), folder / f"result_{rank}.pt")
    os._exit(0)  # as tools/train.py does: gloo's threads may outlive the group, and abort the interpreter's end
