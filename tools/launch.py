"""Start functions on several processes of this machine, joined by gloo or NCCL, and get their results back."""

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

from leangrpo.engine.distributed import World, joined
from leangrpo.tools.logs import log_to_stderr

TIMEOUT = 600
"""seconds without an answer from another rank"""


def on_ranks(size: int, function: Callable[..., Any], *args: Any, device: str = "cpu") -> list[Any]:
    """`function(world, *args)` on ranks 0 to size - 1, one thread each; what they return, in order.

    Function and arguments must be picklable. A rank's error is raised here, as torch.multiprocessing's.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (size, _free_port(), function, args, device, Path(folder)), nprocs=size)
        return [torch.load(_result(Path(folder), rank), weights_only=False) for rank in range(size)]


def _rank(
    rank: int, size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...], device: str, folder: Path
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    log_to_stderr()
    torch.set_num_threads(1)
    world = World(rank, size, rank, size)
    with joined(world, torch.device(device), always=True, timeout_seconds=TIMEOUT):
        torch.save(function(world, *args), _result(folder, rank))
    os._exit(0)  # as tools/train.py does: gloo's threads may outlive the group, and abort the interpreter's end


def _result(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.pt"


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
