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


def save_curves(updates: Series, evaluations: Series, path: Path, title: str) -> None:
    """Reward of every update on the left, what the evaluations say on the right. Several runs share the axes."""
    import matplotlib  # slow to import; the backend must be set before pyplot

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, lines in updates.items():
        rewards = np.array([np.nan if line["reward_mean"] is None else line["reward_mean"] for line in lines])
        left.plot([line["update"] for line in lines], rewards, label=name, linewidth=1.3)
    left.set(xlabel="update", ylabel="mean reward of the rollouts", title="training")
    styles = {"accuracy": "-", "judge_accuracy": "--", "diversity": ":"}
    for index, (name, lines) in enumerate(evaluations.items()):
        for metric, style in styles.items():
            if lines and metric in lines[0]:
                label = f"{name} {metric}" if len(evaluations) > 1 else metric
                x, y = [line["update"] for line in lines], [line[metric] for line in lines]
                right.plot(x, y, style, color=f"C{index}", label=label, marker=".", linewidth=1.3)
    right.set(xlabel="update", title="evaluation (no noise, latents never trained on)", ylim=(0, 1.02))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="png", dpi=110)
    plt.close(figure)
    temporary.replace(path)
