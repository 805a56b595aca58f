"""Where a run's numbers go: JSON lines always, TensorBoard and Weights & Biases if asked."""

import importlib.util
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leangrpo.configs.checks import ConfigError
from leangrpo.configs.schema import LoggingConfig

METRICS_FILE, EVALUATIONS_FILE = "metrics.jsonl", "evaluations.jsonl"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSON-lines file; a last line cut short by a kill is left out."""
    if not path.exists():
        return []
    complete = path.read_text().split("\n")[:-1]
    try:
        return [json.loads(line) for line in complete]
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: a line is no JSON ({error}); remove that line") from None


class MetricsLog:
    """Appends one object per update to metrics.jsonl and one per evaluation to evaluations.jsonl.

    `start` is the number of updates that are already done: later lines of an interrupted run are cut away, since those
    updates are made again.
    """

    def __init__(self, directory: Path, config: LoggingConfig, run_config: Mapping[str, Any], start: int):
        self.directory = directory
        for name in (METRICS_FILE, EVALUATIONS_FILE):
            self._cut(directory / name, start)
        self.tensorboard: Any = None
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            self.tensorboard = SummaryWriter(str(directory / "tensorboard"), purge_step=start + 1)
        self.wandb: Any = _start_wandb(directory, config.wandb_project, run_config)

    def update(self, values: Mapping[str, Any]) -> None:
        """One finished update; `values` has the key `update`."""
        self._append(METRICS_FILE, values, prefix="train")

    def evaluation(self, values: Mapping[str, Any]) -> None:
        """One evaluation; `values` has the key `update`."""
        self._append(EVALUATIONS_FILE, values, prefix="evaluation")

    def close(self) -> None:
        """Flush what the libraries still hold."""
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish()

    def _append(self, name: str, values: Mapping[str, Any], prefix: str) -> None:
        clean = {key: _json_number(value) for key, value in values.items()}
        with (self.directory / name).open("a") as file:
            file.write(json.dumps(clean) + "\n")
            file.flush()
            os.fsync(file.fileno())
        scalars = {f"{prefix}/{key}": value for key, value in clean.items() if isinstance(value, int | float)}
        if self.tensorboard is not None:
            for key, value in scalars.items():
                self.tensorboard.add_scalar(key, value, values["update"])
        if self.wandb is not None:
            self.wandb.log(scalars)

    def _cut(self, path: Path, start: int) -> None:
        if not path.exists():
            return
        kept = [line for line in read_lines(path) if line["update"] <= start]
        temporary = path.with_name(f".{path.name}")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        temporary.replace(path)


def _json_number(value: Any) -> Any:
    """JSON has no NaN: null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def refuse_missing_wandb(config: LoggingConfig) -> None:
    """ConfigError if Weights & Biases is asked for and not installed."""
    if config.wandb_project is not None and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"logging.wandb_project={config.wandb_project}: Weights & Biases is not installed; "
            "pip install 'leangrpo[wandb]', or leave the key out"
        )


def _start_wandb(directory: Path, project: str | None, run_config: Mapping[str, Any]) -> Any:
    if project is None:
        return None
    import wandb

    return wandb.init(
        project=project,
        name=directory.name,
        id=directory.name,
        resume="allow",
        dir=str(directory),
        config=dict(run_config),
    )
