"""The `leangrpo` command: train, plan, calibrate, sample, plot.

A mistake of the user ends with one line on stderr, status 2.
"""

import argparse
import gc
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from leangrpo.configs.checks import ConfigError, check_trainable
from leangrpo.configs.help import describe_keys
from leangrpo.configs.loader import load_config
from leangrpo.configs.ranks import check_world_size
from leangrpo.tools.logs import log_to_stderr

MISTAKE, FAILED, INTERRUPTED = 2, 1, 130


def build_parser() -> argparse.ArgumentParser:
    """Sub-commands and their arguments."""
    parser = argparse.ArgumentParser(prog="leangrpo", description="Memory-aware training for diffusion RL.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train a policy",
        description="Train a policy. CONFIG: a YAML file or the name of a packaged one (digits_flowgrpo_lora).",
        epilog="keys:\n" + describe_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("config", metavar="CONFIG")
    train.add_argument(
        "overrides", nargs="*", metavar="key=value", help="change a key, e.g. optimizer.learning_rate=1e-3"
    )
    plan = commands.add_parser(
        "plan",
        help="predict memory and time, and choose how to execute an update",
        description="Plan a configuration: no weights, no GPU. hardware=8xA6000-48GB plans for other machines.",
    )
    plan.add_argument("config", metavar="CONFIG")
    plan.add_argument("overrides", nargs="*", metavar="key=value")
    plan.add_argument("--json", action="store_true", help="print the choice and all candidates as JSON")
    plan.add_argument("--all", action="store_true", help="list every candidate and every rejection")
    calibrate = commands.add_parser(
        "calibrate", help="measure this machine for better plans", description="Measure this machine; keep the result."
    )
    calibrate.add_argument("config", metavar="CONFIG", nargs="?", default="digits_flowgrpo_lora")
    calibrate.add_argument("--ranks", type=int, help="processes at once (default: one per GPU, one on a CPU)")
    sample = commands.add_parser("sample", help="draw images from a trained run", description="Draw images from a run.")
    sample.add_argument("run", metavar="RUN", type=Path, help="folder of a run (its out_dir)")
    sample.add_argument("--prompt", action="append", required=True, help="may be given several times")
    sample.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the PNG files go")
    sample.add_argument("--number", type=int, default=8, help="images per prompt (default 8)")
    sample.add_argument("--steps", type=int, help="denoising steps (default: as in the run's evaluation)")
    sample.add_argument("--seed", type=int, default=0, help="of the initial latents (default 0)")
    sample.add_argument("--base", action="store_true", help="draw from the base policy, before training")
    plot = commands.add_parser("plot", help="reward curves of one or more runs in one PNG", description="Plot runs.")
    plot.add_argument("runs", metavar="RUN", type=Path, nargs="+")
    plot.add_argument("--out", type=Path, required=True, metavar="PNG")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0, 1 when training failed, 2 for a mistake of the user, 130 after Ctrl-C."""
    arguments = build_parser().parse_args(argv)
    log_to_stderr()
    try:
        return COMMANDS[arguments.command](arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def train(arguments: argparse.Namespace) -> int:
    """Train and say where the results are."""
    config = load_config(arguments.config, arguments.overrides)
    check_trainable(config)
    # torch and diffusers take seconds to import: wrong input is reported before
    from leangrpo.engine.distributed import World, joined
    from leangrpo.engine.rewards import RewardError
    from leangrpo.engine.run import Run
    from leangrpo.engine.trainer import choose_device

    world = World.from_environment()
    check_world_size(config, world.size, world.local_size)
    if not world.is_main:
        logging.getLogger("leangrpo").setLevel(logging.WARNING)
    device = choose_device(config.device, world)
    with joined(world, device, always=config.backend != "replicated", timeout_seconds=config.timeout):
        run = Run(config, world)
        try:
            directory = run.train()
        except KeyboardInterrupt:
            print(
                f"interrupted after update {run.engine.update}; the same command with resume=true goes on from the "
                "last checkpoint, or starts again where there is none yet",
                file=sys.stderr,
            )
            return INTERRUPTED
        except (FloatingPointError, RewardError) as error:  # not finite, or never scored; the message says what
            print(f"error: update {run.engine.update + 1}: {error}", file=sys.stderr)
            return FAILED
    if world.is_main:
        print(f"images: {directory / 'images' / 'before.png'}, {directory / 'images' / 'after.png'}")
        print(f"curve:  {directory / 'reward_curve.png'}")
    return 0


def plan(arguments: argparse.Namespace) -> int:
    """Print the plan of a configuration."""
    from leangrpo.tools.plan import plan_command

    try:
        return plan_command(arguments.config, arguments.overrides, as_json=arguments.json, show_all=arguments.all)
    finally:
        gc.freeze()  # or the process spends a second of its end on looking through what torch and diffusers made


def calibrate(arguments: argparse.Namespace) -> int:
    """Measure this machine."""
    from leangrpo.tools.calibrate import calibrate_command

    return calibrate_command(arguments.config, ranks=arguments.ranks)


def sample(arguments: argparse.Namespace) -> int:
    """Write PROMPT_00.png, ... and grid.png to --out."""
    from leangrpo.tools.sample import sample_run

    grid = sample_run(
        arguments.run,
        arguments.prompt,
        arguments.out,
        number=arguments.number,
        steps=arguments.steps,
        seed=arguments.seed,
        base=arguments.base,
    )
    print(f"images: {grid}")
    return 0


def plot(arguments: argparse.Namespace) -> int:
    """Draw the curves of several runs."""
    from leangrpo.tools.plot_runs import plot_runs

    plot_runs(arguments.runs, arguments.out)
    print(f"curves: {arguments.out}")
    return 0


COMMANDS = {"train": train, "plan": plan, "calibrate": calibrate, "sample": sample, "plot": plot}


if __name__ == "__main__":
    sys.exit(main())
