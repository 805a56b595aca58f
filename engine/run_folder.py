"""The folder of a run: one process at a time writes it, and a run is never mixed with another.

config.yaml holds the choices that the run executes, whoever made them; plan.json says which of them were pinned, what
they were planned for, and what was predicted.
"""

import fcntl
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from leangrpo.configs.checks import ConfigError, resume_differences
from leangrpo.configs.loader import dump_config, load_config
from leangrpo.configs.schema import Config
from leangrpo.engine import checkpoint as checkpoints
from leangrpo.planners.plan import Plan
from leangrpo.planners.types import HardwareSpec
from leangrpo.planners.workloads import pins_of

CONFIG, PLAN, PROMPTS, LOCK = "config.yaml", "plan.json", "prompts.txt", ".lock"
TRACES = ("metrics.jsonl", "evaluations.jsonl", "checkpoints")


def find_checkpoint(config: Config, prompts: list[str]) -> Path | None:
    """The checkpoint to start from, None for a new run.

    ConfigError if `out_dir` holds a run that must not be overwritten, or one that was begun otherwise.
    """
    directory = Path(config.out_dir)
    if not (directory / CONFIG).exists():
        left = [name for name in TRACES if (directory / name).exists()]
        if left:
            raise ConfigError(
                f"out_dir={config.out_dir}: it has {left[0]} of a run but no {CONFIG}; choose another out_dir, or "
                "empty this one"
            )
        return None
    found = checkpoints.list_checkpoints(directory / "checkpoints")
    done = checkpoints.read_update(found[-1]) if found else 0
    if not config.resume:
        at = f"at update {done}" if found else "without a checkpoint yet"
        raise ConfigError(
            f"out_dir={config.out_dir}: there is a run {at}; continue it with resume=true, or choose another out_dir"
        )
    _refuse_differences(config, directory, prompts)
    if done > config.updates:
        raise ConfigError(
            f"updates={config.updates}: the run in {config.out_dir} is at {done} already; use {done} or more"
        )
    return found[-1] if found else None


def _refuse_differences(config: Config, directory: Path, prompts: list[str]) -> None:
    for key, before, now in resume_differences(load_config(str(directory / CONFIG)), config):
        raise ConfigError(
            f"{key}={now}: the run in {config.out_dir} was begun with {before}, and a resumed run keeps it; "
            f"set {key}={before}, or choose another out_dir"
        )
    begun_with = directory / PROMPTS
    if begun_with.exists() and begun_with.read_text(encoding="utf-8").splitlines() != prompts:
        raise ConfigError(
            f"prompts={config.prompts}: its lines have changed since the run in {config.out_dir} was begun; restore "
            f"them from {begun_with}, or choose another out_dir"
        )


@dataclass(frozen=True)
class Begun:
    """How a run that is resumed was begun."""

    choices: dict[str, Any]
    """what it executes, from config.yaml"""
    planned_for: HardwareSpec | None = None
    """None: plan.json cannot be used, `fault` says why"""
    pinned: dict[str, Any] = field(default_factory=dict)
    fault: str = ""

    def keeps_plan(self, ranks: int) -> bool:
        """Whether plan.json still says what the run does on that many ranks."""
        return self.planned_for is not None and self.planned_for.ranks == ranks


def read_begun(directory: Path) -> Begun | None:
    """None if no run was begun there."""
    if not (directory / CONFIG).exists():
        return None
    choices, path = pins_of(load_config(str(directory / CONFIG))), directory / PLAN
    if not path.exists():
        return Begun(choices, fault=f"{path} is missing")
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["choice"] != choices:
            return Begun(choices, fault=f"{path} holds other choices than {CONFIG}")
        return Begun(choices, HardwareSpec(**stored["hardware"]), dict(stored["pinned"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Begun(choices, fault=f"{path} is damaged ({error})")


def take(config: Config, prompts: list[str], plan: Plan | None) -> IO[str]:
    """Make the folder, lock it, and write down what the run is; the lock lasts as long as the returned file is open.

    `plan`: None leaves plan.json as it is. ConfigError if it cannot be made or another process trains there.
    """
    directory = Path(config.out_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / LOCK).open("w")
    except OSError as error:
        raise ConfigError(f"out_dir={config.out_dir}: cannot be written ({error.strerror}); choose another") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ConfigError(
            f"out_dir={config.out_dir}: another process is training there; wait for it, or choose another out_dir"
        ) from None
    _replace(directory / PROMPTS, "\n".join(prompts) + "\n")
    if plan is not None:
        _replace(directory / PLAN, json.dumps(plan.to_dict(), indent=1) + "\n")
    _replace(directory / CONFIG, dump_config(config))
    return lock


def note_measured(directory: Path, measured: Mapping[str, Any]) -> None:
    """Put what was measured beside the predictions of plan.json."""
    stored = json.loads((directory / PLAN).read_text(encoding="utf-8"))
    _replace(directory / PLAN, json.dumps(stored | {"measured": dict(measured)}, indent=1) + "\n")


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
