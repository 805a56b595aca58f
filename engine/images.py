"""Pictures of a run: grids of samples, one column per prompt, and the curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

MAX_ROWS, MAX_COLUMNS = 8, 12
MIN_TILE = 64
"""pixels; smaller images are enlarged without smoothing"""
GAP, HEADER, BACKGROUND, INK = 4, 18, (255, 255, 255), (40, 40, 40)


def to_pil(image: Tensor) -> Image.Image:
    """uint8 [C, H, W], C 1 or 3."""
    array = image.permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def save_grid(images: Mapping[str, Tensor], path: Path) -> None:
    """One column per prompt with the prompt above it, at most 8 of its images [n, C, H, W] below."""
    columns = list(images.items())[:MAX_COLUMNS]
    rows = min(MAX_ROWS, max(len(column) for _, column in columns))
    height, width = columns[0][1].shape[-2:]
    scale = max(1, -(-MIN_TILE // width))
    cell_width, cell_height = width * scale + GAP, height * scale + GAP
    canvas = Image.new("RGB", (GAP + cell_width * len(columns), HEADER + cell_height * rows), BACKGROUND)
    pen = ImageDraw.Draw(canvas)
    for column, (prompt, column_images) in enumerate(columns):
        left = GAP + column * cell_width
        pen.text((left, 3), _fit(pen, prompt, width * scale), fill=INK)
        for row, image in enumerate(column_images[:rows]):
            tile = to_pil(image).resize((width * scale, height * scale), Image.Resampling.NEAREST)
            canvas.paste(tile, (left, HEADER + row * cell_height))
    replace_image(canvas, path)


def _fit(pen: ImageDraw.ImageDraw, text: str, width: int) -> str:
    """`text`, cut to `width` pixels."""
    while pen.textlength(text) > width and len(text) > 1:
        text = text[:-2] + "…"
    return text


def replace_image(image: Image.Image, path: Path) -> None:
    """Write under a temporary name, then rename: a killed run leaves no half picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    image.save(temporary, format="PNG")
    temporary.replace(path)


Series = Mapping[str, Sequence[Mapping[str, Any]]]
"""name of a run -> its lines of metrics.jsonl or evaluations.jsonl"""


STYLES = {"accuracy": "-", "judge_accuracy": "--", "diversity": ":"}


def save_curves(updates: Series, evaluations: Series, path: Path, title: str) -> None:
    """Reward of every update on the left, what the evaluations say on the right.

    Several runs share the axes; earlier ones are drawn wider, so that curves which coincide are still seen.
    """
    import matplotlib  # slow to import; the backend must be set before pyplot

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    widths = [1.3 + 2.5 * behind for behind in reversed(range(len(updates)))]
    for (name, lines), width in zip(updates.items(), widths, strict=True):
        rewards = np.array([np.nan if line["reward_mean"] is None else line["reward_mean"] for line in lines])
        left.plot([line["update"] for line in lines], rewards, label=name, linewidth=width)
    left.set(xlabel="update", ylabel="mean reward of the rollouts", title="training")
    for index, (lines, width) in enumerate(zip(evaluations.values(), widths, strict=True)):
        for metric in STYLES.keys() & (lines[0].keys() if lines else set()):
            x, y = [line["update"] for line in lines], [line[metric] for line in lines]
            right.plot(x, y, STYLES[metric], color=f"C{index}", linewidth=width)
    for metric, style in STYLES.items():
        right.plot([], [], style, color="0.3", label=metric)
    right.set(xlabel="update", title="evaluation (no noise, latents never trained on)", ylim=(0, 1.02))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="png", dpi=110)
    plt.close(figure)
    temporary.replace(path)
