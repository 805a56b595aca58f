"""Curves of several runs in one picture, e.g. the same job under three schedules."""

from collections.abc import Sequence
from pathlib import Path

from leangrpo.configs.checks import ConfigError
from leangrpo.engine.images import save_curves
from leangrpo.engine.metrics import EVALUATIONS_FILE, METRICS_FILE, read_lines


def plot_runs(runs: Sequence[Path], out: Path) -> None:
    """Write a PNG with training rewards and evaluations of `runs`. ConfigError for a folder without metrics."""
    updates, evaluations = {}, {}
    for run in runs:
        lines = read_lines(run / METRICS_FILE)
        if not lines:
            raise ConfigError(f"RUN={run}: no finished update in {METRICS_FILE}; give the out_dir of a run")
        name = (
            str(run) if [other.resolve().name for other in runs].count(run.resolve().name) > 1 else run.resolve().name
        )
        updates[name] = lines
        evaluations[name] = read_lines(run / EVALUATIONS_FILE)
    try:
        save_curves(updates, evaluations, out, title="")
    except OSError as error:
        raise ConfigError(f"--out={out}: cannot be written ({error.strerror}); give the name of a PNG file") from None
