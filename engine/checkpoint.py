"""Checkpoints: everything that decides the future of a run, in files that load without running code.

CHECKPOINT/parameters.safetensors: the trainable parameters as float32 masters; optimizer.pt and generators.pt: loaded
with weights_only=True; state.json: the update index. Noise, selected steps and the order of the prompts are functions
of (seed, update), so the index is their state; the global generators are saved for rewards that use them.
"""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FORMAT = 1
PREFIX = "update_"


class CheckpointError(ValueError):
    """A checkpoint is missing, incomplete or of another run; the message names its folder."""


def save_checkpoint(
    directory: Path, update: int, parameters: dict[str, Tensor], optimizer_state: dict[str, Any], keep: int
) -> Path:
    """Write DIRECTORY/update_N under a temporary name, rename it, and remove all but the latest `keep`."""
    final = directory / f"{PREFIX}{update:06d}"
    temporary = directory / f".{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file({name: p.contiguous().cpu() for name, p in parameters.items()}, temporary / "parameters.safetensors")
    torch.save(optimizer_state, temporary / "optimizer.pt")
    torch.save(generator_states(), temporary / "generators.pt")
    (temporary / "state.json").write_text(json.dumps({"format": FORMAT, "update": update}))
    for path in temporary.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    shutil.rmtree(final, ignore_errors=True)
    temporary.replace(final)
    for old in list_checkpoints(directory)[:-keep]:
        shutil.rmtree(old)
    return final


def list_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in directory.glob(f"{PREFIX}*") if path.is_dir())


def read_update(checkpoint: Path) -> int:
    """The number of finished updates. CheckpointError if the folder is no checkpoint of this format."""
    try:
        state = json.loads((checkpoint / "state.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{checkpoint} is not a complete checkpoint: {error}") from None
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{checkpoint} has format {state.get('format')}, this version reads format {FORMAT}")
    return int(state["update"])


def load_parameters(checkpoint: Path) -> dict[str, Tensor]:
    """The trainable parameters."""
    try:
        return load_file(checkpoint / "parameters.safetensors")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint}/parameters.safetensors cannot be read: {error}") from None


def load_optimizer_state(checkpoint: Path) -> dict[str, Any]:
    """The optimizer's state dict, tensors on the CPU."""
    state: dict[str, Any] = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
    return state


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


def restore_generators(checkpoint: Path) -> None:
    """Set the global generators to what they were when `checkpoint` was written."""
    states = torch.load(checkpoint / "generators.pt", weights_only=True)
    torch.set_rng_state(states["torch"])
    name, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.device_count() == len(states["cuda"]):
        torch.cuda.set_rng_state_all(states["cuda"])
