"""Do all schedules and backends compute the same gradient, and how far is each from float64?

    python tools/compare_schedules.py CONFIG [key=value ...] [--ranks N] [--json | --markdown]

The gradient of one update, reduced and before the clip, of {native, retain, reweight with its three kinds of buffers}
x {replicated, fsdp2, hsdp, zero1, zero2, zero3} x {lora, full} x {float32, bfloat16} on one trajectory with the same
latents and rewards, against an independent float64 gradient (tools/float64_reference.py). The tool starts the N ranks
itself, backend after backend. backend, policy.weights and precision narrow the table. Exit status 1 if a gradient is
outside of the limits (docs/exactness.md).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from leangrpo.configs.checks import ConfigError, check_trainable
from leangrpo.configs.loader import dump_config, load_config
from leangrpo.configs.schema import Config
from leangrpo.engine.distributed import World
from leangrpo.engine.policies.base import DTYPES
from leangrpo.engine.policies.digits import DigitsPolicy
from leangrpo.engine.run import refuse_unreadable
from leangrpo.engine.trainer import Engine
from leangrpo.tools.exactness_table import Comparison, as_json, as_markdown, as_text
from leangrpo.tools.fixed_trajectory import FixedTrajectory
from leangrpo.tools.float64_reference import Reference, advantages_by_hand, float64_policy, reference_gradient
from leangrpo.tools.gradient_cells import (
    AXES,
    CONFIG_FILE,
    RESULTS_FILE,
    Cell,
    config_of,
    make_cells,
    pin,
    prompts_of,
    reduced_gradients,
)
from leangrpo.tools.logs import log_to_stderr

NATIVE_LIMIT = 4.0
"""largest relative L2 error of Native, in units of the epsilon of its arithmetic times the gradient's condition"""
OTHERS_LIMIT = 2.0
"""largest relative L2 error of every other schedule, in units of the error of Native under the same backend"""


def record(config: Config, cell: Cell) -> tuple[FixedTrajectory, Reference]:
    """The trajectory of a Native rollout on one process, in the cell's precision, and its float64 gradient."""
    engine = Engine.from_config(config_of(config, replace(cell, backend="replicated", execution="native"), 1))
    prompts, trajectory = prompts_of(config), FixedTrajectory()
    refuse_unreadable(prompts, engine)
    trajectory.lead(engine)
    reduced_gradients(engine, prompts)
    steps, rewards = trajectory.stored_steps(engine, prompts)
    advantages = advantages_by_hand(rewards, config.algorithm.advantage, engine.rewards.weights)
    if not advantages.any():
        raise ConfigError(
            f"seed={config.seed}: the rewards of every group are equal, so there is no gradient to compare; use "
            "another seed, or a larger group_size"
        )
    fresh = DigitsPolicy.pretrained(
        engine.config.policy, config.sampler, seed=config.seed, keep_base=config.algorithm.beta > 0
    )
    policy = float64_policy(fresh, trajectory.parameters, DTYPES[cell.precision])
    return trajectory, reference_gradient(policy, config, steps, advantages)


def compare(
    config: Config,
    cell: Cell,
    gradients: dict[str, Tensor],
    reference: Reference,
    native: tuple[dict[str, Tensor], Comparison] | None = None,
) -> Comparison:
    """Errors of `gradients`, in float64. `native`: the same of Native under the same backend, None for itself."""
    exact = torch.cat([g.flatten() for g in reference.gradients.values()])
    own = torch.cat([gradients[name].flatten() for name in reference.gradients]).double()
    error = float((own - exact).norm() / exact.norm())
    # |a/|a| - b/|b||^2 / 2 instead of 1 - cos, which would lose all digits
    distance = float((own / own.norm() - exact / exact.norm()).square().sum()) / 2
    epsilon = max(torch.finfo(DTYPES[name]).eps for name in (cell.precision, config.buffer_dtype))
    units = error / (epsilon * reference.condition)
    times, equal = 1.0, True
    if native is not None:
        times = error / native[1].relative_l2
        equal = all(torch.equal(gradients[name], g) for name, g in native[0].items())
    is_exact = units <= NATIVE_LIMIT if native is None else times <= OTHERS_LIMIT
    if cell.execution == "retain":
        is_exact = is_exact and equal
    return Comparison(cell, "", distance, error, float((own - exact).abs().max()), units, times, equal, is_exact)


def launch(folder: Path, backend: str, ranks: int) -> None:
    """Measure the cells of a backend on new processes. RuntimeError with the end of their output if they fail."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"]
    command += ["--nproc-per-node", str(ranks), "-m", "leangrpo.tools.gradient_cells", str(folder), backend]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{done.stdout[-4000:]}\nerror: the ranks of backend={backend} failed (output above)")


def run(config: Config, cells: list[Cell], ranks: int) -> list[Comparison]:
    """Measure and compare `cells`; says on stderr where it is."""
    references: dict[str, Reference] = {}
    with tempfile.TemporaryDirectory(prefix="compare_schedules_") as name:
        folder = Path(name)
        (folder / CONFIG_FILE).write_text(dump_config(config))
        (folder / "cells.json").write_text(json.dumps([asdict(cell) for cell in cells]))
        for cell in cells:
            if cell.problem not in references:
                print(f"reference in float64: {cell.problem}", file=sys.stderr)
                trajectory, references[cell.problem] = record(config, cell)
                trajectory.save(folder / f"{cell.problem}.safetensors")
        refused: dict[str, str] = {}
        for backend in dict.fromkeys(cell.backend for cell in cells):
            print(f"gradients: {backend}, ranks: {ranks}", file=sys.stderr)
            launch(folder, backend, ranks)
            refused |= json.loads((folder / RESULTS_FILE.format(backend)).read_text())
        return compare_all(config, cells, references, refused, folder)


def compare_all(
    config: Config, cells: list[Cell], references: dict[str, Reference], refused: dict[str, str], folder: Path
) -> list[Comparison]:
    """What the ranks left in `folder` against the references."""
    results: list[Comparison] = []
    natives: dict[tuple[str, str], tuple[dict[str, Tensor], Comparison]] = {}
    for cell in cells:
        if cell.file in refused:
            results.append(Comparison(cell, refused[cell.file]))
            continue
        gradients, place = load_file(folder / cell.file), (cell.problem, cell.backend)
        one = compare(config, cell, gradients, references[cell.problem], natives.get(place))
        if cell.execution == "native":
            natives[place] = gradients, one
        results.append(one)
    return results


def parse(argv: Sequence[str] | None) -> tuple[Config, list[Cell], argparse.Namespace]:
    """The configuration, the cells that the command line leaves, and its arguments. ConfigError."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the update (default 1)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true")
    form.add_argument("--markdown", action="store_true", help="the table of docs/exactness.md")
    arguments = parser.parse_args(argv)
    log_to_stderr()
    pinned, others = {}, []
    for text in arguments.overrides:
        key, _, value = text.partition("=")
        if key in ("schedule", "buffers"):
            raise ConfigError(f"{text}: all schedules and buffers are compared; leave it out")
        if key in AXES and value not in AXES[key]:
            raise ConfigError(f"{text}: use {', '.join(AXES[key])}, or leave it out to compare all")
        if key in AXES:
            pinned[key] = value
        else:
            others.append(text)
    if arguments.ranks < 1:
        raise ConfigError(f"--ranks {arguments.ranks}: use 1 or more")
    if World.from_environment().size > 1:
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: the tool starts its ranks itself; use --ranks instead"
        )
    if any(text.startswith("shard_ranks=") for text in others):
        others.append("backend=hsdp")  # else it would be without effect
    config = pin(load_config(arguments.config, others))
    check_trainable(config)
    return config, make_cells(pinned), arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a gradient is outside of the limits or could not be had, 2 for a mistake of the user."""
    try:
        config, cells, arguments = parse(argv)
        results = run(config, cells, arguments.ranks)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    form = as_json if arguments.json else as_markdown if arguments.markdown else as_text
    print(form(results, arguments.ranks))
    wrong = [one for one in results if not one.is_exact]
    for one in wrong:
        print(f"outside of the limits: {', '.join(asdict(one.cell).values())}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
