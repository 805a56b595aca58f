"""Cells of the table of tools/compare_schedules.py, and the process that measures those of one backend.

    torchrun --nproc-per-node N -m leangrpo.tools.gradient_cells FOLDER BACKEND

is what that tool starts, once per backend: DeepSpeed's stage 3 replaces torch.nn.functional.linear for the rest of its
process, so backends do not share one.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from leangrpo.configs.checks import ConfigError, find_problems
from leangrpo.configs.loader import load_config
from leangrpo.configs.schema import Backend, Config, PolicyConfig, Residency
from leangrpo.engine.distributed import World, joined
from leangrpo.engine.prompts import load_prompts, prompts_of_update
from leangrpo.engine.trainer import Engine, choose_device
from leangrpo.tools.fixed_trajectory import FixedTrajectory
from leangrpo.tools.logs import log_to_stderr

EXECUTIONS: dict[str, dict[str, Any]] = {
    "native": {"schedule": "native"},
    "retain": {"schedule": "retain"},
    "per_sample": {"schedule": "reweight", "buffers": "per_sample"},
    "streaming": {"schedule": "reweight", "buffers": "streaming"},
    "streaming_sharded": {"schedule": "reweight", "buffers": "streaming_sharded"},
}
AXES: dict[str, tuple[str, ...]] = {
    "policy.weights": ("lora", "full"),
    "precision": ("float32", "bfloat16"),
    "backend": get_args(Backend),
}
PLAIN: dict[str, Any] = {
    "schedule": "native",
    "buffers": "per_sample",
    "buffer_dtype": "float32",
    "buffer_device": "device",
    "sync": "every_update",
    "checkpointing": "none",
    "residency": "resident",
    "samples_per_forward": 1,
}
"""what is auto in a configuration: a comparison asks for the same everywhere, not for the fastest"""
CONFIG_FILE, RESULTS_FILE = "config.yaml", "{}.json"


@dataclass(frozen=True)
class Cell:
    """One way to compute the gradient; `execution`: a schedule, of Reweight its buffers."""

    weights: str
    precision: str
    backend: str
    execution: str

    @property
    def problem(self) -> str:
        """What has a float64 reference of its own: weights and precision."""
        return f"{self.weights}, {self.precision}"

    @property
    def file(self) -> str:
        """Of its gradient."""
        return f"{self.weights} {self.precision} {self.backend} {self.execution}.safetensors"


def pin(config: Config) -> Config:
    """`config` with its plain value for every choice that is auto."""
    return replace(config, **{name: value for name, value in PLAIN.items() if getattr(config, name) == "auto"})


def make_cells(pinned: dict[str, str]) -> list[Cell]:
    """All cells, or those with the `pinned` values of `AXES`; Native before the others of its backend."""
    values = [(pinned[axis],) if axis in pinned else choices for axis, choices in AXES.items()]
    return [Cell(*one) for one in product(*values, EXECUTIONS)]


def config_of(config: Config, cell: Cell, ranks: int) -> Config:
    """`config` with what the cell says. Of two residencies the configuration's, where the backend has a choice."""
    policy: PolicyConfig = replace(config.policy, weights=cell.weights)  # type: ignore[arg-type]
    copies = 2  # HSDP with one copy would be FSDP2
    shard_ranks = max(1, ranks // copies) if cell.backend == "hsdp" else None
    changes: dict[str, Any] = {
        "backend": cell.backend,
        "precision": cell.precision,
        "policy": policy,
        "shard_ranks": (config.shard_ranks or shard_ranks) if cell.backend == "hsdp" else None,
        "updates_per_rollout": 1,
    }
    result = replace(config, **changes, **EXECUTIONS[cell.execution])
    if any(problem.key == "residency" for problem in find_problems(result)):
        (other,) = {*get_args(Residency)} - {result.residency}
        result = replace(result, residency=other)
    return result


def prompts_of(config: Config) -> list[str]:
    """Of the first update."""
    return prompts_of_update(load_prompts(config.prompts), config.seed, 0, config.prompts_per_update)


def reduced_gradients(engine: Engine, prompts: Sequence[str]) -> dict[str, Tensor]:
    """What one `train_step` hands to its optimizer step, before the clip, float32 on the CPU. Collective."""
    taken: dict[str, Tensor] = {}
    step = engine.backend.step

    def look_and_step() -> float:
        for name, gradient in engine.backend.full_gradients().items():
            taken[name] = gradient.to("cpu", torch.float32, copy=True)
        return step()

    engine.backend.step = look_and_step  # type: ignore[method-assign]
    try:
        engine.train_step(prompts)
    finally:
        del engine.backend.step
    return taken


def measure(config: Config, cell: Cell, trajectory: FixedTrajectory, world: World) -> dict[str, Tensor]:
    """The cell's gradient on `trajectory`. ConfigError where the engine refuses the cell. Collective."""
    engine = Engine.from_config(config_of(config, cell, world.size), world)
    trajectory.lead(engine)
    transitions = len(trajectory.next_latents)
    gradients = reduced_gradients(engine, prompts_of(config))
    assert len(trajectory.next_latents) == transitions, "the rollout left the trajectory"
    return gradients


def main(arguments: Sequence[str]) -> int:
    """Measure the cells of a backend; rank 0 writes gradients, and the refused cells with their reasons."""
    folder, backend = Path(arguments[0]), arguments[1]
    log_to_stderr()
    config = load_config(str(folder / CONFIG_FILE))
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    world = World.from_environment()
    refused: dict[str, str] = {}
    cells = [Cell(**one) for one in json.loads((folder / "cells.json").read_text()) if one["backend"] == backend]
    with joined(world, choose_device(config.device, world), always=True, timeout_seconds=config.timeout):
        for cell in cells:
            trajectory = FixedTrajectory.load(folder / f"{cell.problem}.safetensors")
            try:
                gradients = measure(config, cell, trajectory, world)
            except ConfigError as error:
                refused[cell.file] = str(error)
                continue
            if world.is_main:
                save_file({name: g.contiguous() for name, g in gradients.items()}, folder / cell.file)
        if world.is_main:
            (folder / RESULTS_FILE.format(backend)).write_text(json.dumps(refused))
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as tools/train.py does
