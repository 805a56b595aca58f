"""Checkpoints: everything that decides the future of a run, in files that load without running code.

CHECKPOINT/parameters.safetensors: the trainable parameters as float32 masters, and optimizer.pt; or dcp/ with both,
where they are sharded; generators_RANK.pt; state.json: the update index. Noise, selected steps and the order of the
prompts are functions of (seed, update), so the index is their state; the global generators are saved for rewards that
use them.
"""

import json
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

from leangrpo.configs.checks import ConfigError
from leangrpo.engine.distributed import World

FORMAT = 1
PREFIX = "update_"


class CheckpointError(ConfigError):
    """A checkpoint is missing, incomplete or of another run; the message names its folder."""


def save_checkpoint(directory: Path, update: int, write_state: Callable[[Path], None], world: World, keep: int) -> None:
    """Write DIRECTORY/update_N under a temporary name, rename it, and remove all but the latest `keep`. Collective.

    `write_state` writes parameters and optimizer state into the temporary folder; every rank calls it.
    """
    final = directory / f"{PREFIX}{update:06d}"
    temporary = directory / f".{final.name}.tmp"
    if world.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    world.barrier()
    write_state(temporary)
    torch.save(generator_states(), temporary / f"generators_{world.rank}.pt")
    world.barrier()
    if world.is_main:
        (temporary / "state.json").write_text(json.dumps({"format": FORMAT, "update": update}))
        for path in temporary.rglob("*"):
            if path.is_file():
                _sync_to_disk(path)
        shutil.rmtree(final, ignore_errors=True)
        temporary.replace(final)
        for old in list_checkpoints(directory)[:-keep]:
            shutil.rmtree(old)
    world.barrier()


def _sync_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def list_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in directory.glob(f"{PREFIX}*") if path.is_dir())


def read_update(checkpoint: Path) -> int:
    """The number of finished updates. CheckpointError if the folder is no checkpoint of this format."""
    try:
        state = json.loads((checkpoint / "state.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{checkpoint}: not a complete checkpoint ({error}); remove this folder to go on from the one before it"
        ) from None
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{checkpoint} has format {state.get('format')}, this version reads format {FORMAT}")
    return int(state["update"])


@contextmanager
def readable(checkpoint: Path) -> Iterator[None]:
    """Turns what loading damaged files raises into a CheckpointError with the way out."""
    try:
        yield
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{checkpoint}: cannot be used ({reason}); remove this folder to go on from the checkpoint before it"
        ) from error


def load_parameters(checkpoint: Path) -> dict[str, Tensor]:
    """The whole trainable parameters, whichever backend wrote them."""
    if (checkpoint / "dcp").is_dir():
        return _load_sharded(checkpoint / "dcp")
    return load_file(checkpoint / "parameters.safetensors")


def _load_sharded(directory: Path) -> dict[str, Tensor]:
    """All model tensors of a distributed checkpoint, on one process."""
    metadata = FileSystemReader(directory).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        key: torch.empty(value.size)
        for key, value in metadata.items()
        if key.startswith("model.") and isinstance(value, TensorStorageMetadata)
    }
    with warnings.catch_warnings(action="ignore"):  # it warns that one process loads, which is meant
        load_distributed(state, checkpoint_id=directory, no_dist=True)
    return {key.removeprefix("model."): value for key, value in state.items()}


def generator_states() -> dict[str, Any]:
    """States of the global generators of torch, numpy and Python."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_generators(checkpoint: Path, rank: int) -> None:
    """Set the global generators to what they were when `checkpoint` was written; a rank that is new keeps its own."""
    path = checkpoint / f"generators_{rank}.pt"
    if not path.exists():
        return
    states = torch.load(path, weights_only=True)
    torch.set_rng_state(states["torch"])
    name, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.device_count() == len(states["cuda"]):
        torch.cuda.set_rng_state_all(states["cuda"])
