"""Draw images from a finished or running run."""

from collections.abc import Sequence
from pathlib import Path

from leangrpo.configs.checks import ConfigError
from leangrpo.configs.loader import load_config
from leangrpo.engine import checkpoint as checkpoints
from leangrpo.engine.evaluation import EVALUATION, draw
from leangrpo.engine.images import replace_image, save_grid, to_pil
from leangrpo.engine.noise import Noise
from leangrpo.engine.trainer import Engine

ONE_PROCESS = (
    "backend=replicated",
    "shard_ranks=null",
    "ranks_per_prompt=null",
    "optimizer.name=adamw",
    "schedule=native",
    "buffers=per_sample",
    "buffer_dtype=float32",
    "buffer_device=device",
    "sync=every_update",
    "checkpointing=none",
    "residency=resident",
    "samples_per_forward=1",
)
"""drawing needs none of what a run is executed with"""


def sample_run(
    run: Path, prompts: Sequence[str], out: Path, *, number: int, steps: int | None, seed: int, base: bool
) -> Path:
    """PNG files of `number` images per prompt from the run's last checkpoint, or its base; returns the grid's path.

    ConfigError if `run` is no run, has no checkpoint, or a prompt or number cannot be used.
    """
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"RUN={run}: not the folder of a run (no config.yaml in it); give the out_dir of one")
    if number < 1:
        raise ConfigError(f"--number={number}: at least 1 image per prompt is needed")
    config = load_config(str(run / "config.yaml"), ONE_PROCESS)
    steps = config.evaluation.denoising_steps if steps is None else steps
    if steps < 1:
        raise ConfigError(f"--steps={steps}: at least 1 denoising step is needed")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"--seed={seed}: use 0 to 2^63 - 1")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out={out}: a file; give a folder")
    found = checkpoints.list_checkpoints(run / "checkpoints")
    if not found and not base:
        raise ConfigError(f"RUN={run}: no checkpoint yet; wait for the first, or use --base")
    engine = Engine.from_config(config)
    if not base:
        with checkpoints.readable(found[-1]):
            engine.backend.load_parameters(checkpoints.load_parameters(found[-1]))
    images = {}
    for slot, prompt in enumerate(dict.fromkeys(prompts)):
        try:
            images[prompt] = draw(engine.policy, prompt, Noise(seed, EVALUATION, slot, tuple(range(number))), steps)
        except ValueError as error:
            raise ConfigError(f"--prompt={prompt}: {error}") from None
    for prompt, prompt_images in images.items():
        for index, image in enumerate(prompt_images):
            replace_image(to_pil(image), out / f"{_file_name(prompt)}_{index:02d}.png")
    save_grid(images, out / "grid.png")
    return out / "grid.png"


def _file_name(prompt: str) -> str:
    """Letters, digits and underscores, at most 40 of them."""
    return "".join(c if c.isalnum() else "_" for c in prompt)[:40]
