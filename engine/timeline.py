"""The picture of a memory profile: bytes by component over the time of an update, and its phases."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from leangrpo.engine.phases import PHASES

Sample = tuple[float, str, tuple[int, ...]]
"""seconds since the start, phase, bytes by component"""
PNG = "memory.png"
COLOURS = ("#4878a8", "#9db8d6", "#d1495b", "#edae49", "#66a182", "#b39ddb", "#8d8d8d", "#d9cbb6")
PHASE_COLOURS = ("#30638e", "#a8d5e2", "#c9c9c9", "#d1495b", "#f4a6b0", "#edae49", "#7b5ea7", "#2e933c")


def thin(timeline: Sequence[Sample], slices: int) -> list[Sample]:
    """The moment with most bytes of each of `slices` equal parts of the time: peaks stay."""
    end = timeline[-1][0] or 1.0
    kept: dict[int, Sample] = {}
    for sample in timeline:
        place = min(int(sample[0] / end * slices), slices - 1)
        if place not in kept or sum(sample[2]) > sum(kept[place][2]):
            kept[place] = sample
    return list(kept.values())


def save_timeline(
    samples: Sequence[Sample], components: Sequence[str], predicted: int, path: Path, *, title: str
) -> None:
    """Components stacked, the measured peak marked and the predicted one drawn; phases as a strip below."""
    import matplotlib  # slow to import; the backend must be set before pyplot

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    seconds = np.array([at for at, _, _ in samples])
    held = np.array([of for _, _, of in samples]) / 1e6
    figure, (upper, strip) = plt.subplots(
        2, 1, figsize=(11, 5.5), sharex=True, height_ratios=[12, 1], layout="constrained"
    )
    used = [index for index in range(len(components)) if held[:, index].any()]
    upper.stackplot(
        seconds,
        held[:, used].T,
        labels=[components[index].replace("_", " ") for index in used],
        colors=[COLOURS[index] for index in used],
        step="post",
        linewidth=0,
    )
    totals = held.sum(axis=1)
    peak = int(totals.argmax())
    upper.plot(seconds[peak], totals[peak], "kv", label=f"measured peak, {totals[peak]:,.2f} MB")
    upper.axhline(predicted / 1e6, color="k", linestyle="--", label=f"predicted peak, {predicted / 1e6:,.2f} MB")
    upper.set(ylabel="MB", ylim=(0, 1.12 * max(totals[peak], predicted / 1e6)), title=title)
    upper.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True)
    phases = np.array([[PHASES.index(phase) for _, phase, _ in samples[:-1]]])
    strip.pcolormesh(seconds, [0, 1], phases, cmap=ListedColormap(PHASE_COLOURS), vmin=-0.5, vmax=len(PHASES) - 0.5)
    strip.set(xlabel="seconds (stretched by counting)", yticks=[], xlim=(0, seconds[-1]))
    strip.set_ylabel("phase", rotation=0, horizontalalignment="right", verticalalignment="center")
    seen = [Patch(color=PHASE_COLOURS[i], label=PHASES[i]) for i in sorted(set(phases[0].tolist()))]
    figure.legend(handles=seen, loc="outside lower center", ncols=len(seen))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="png", dpi=110)
    plt.close(figure)
    temporary.replace(path)
