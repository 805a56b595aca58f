"""The prompts of a run and the order in which updates see them."""

from pathlib import Path

import torch

from leangrpo.configs.checks import ConfigError
from leangrpo.engine.noise import generator_for

PACKAGED = Path(__file__).parent.parent / "configs" / "prompts"


def load_prompts(source: str) -> list[str]:
    """The lines of a packaged list or of a text file; blank lines are left out. ConfigError if there are none."""
    path = Path(source)
    if not path.is_file():
        path = PACKAGED / f"{source}.txt"
    if not path.is_file():
        packaged = ", ".join(sorted(p.stem for p in PACKAGED.glob("*.txt")))
        raise ConfigError(f"prompts={source}: neither a file nor a packaged list; the packaged ones: {packaged}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts={source}: cannot be read as UTF-8 text ({error}); convert the file") from None
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ConfigError(f"prompts={source}: the file has no prompt in it; write one on each line")
    return prompts


def prompts_of_update(prompts: list[str], seed: int, update: int, count: int) -> list[str]:
    """The `count` prompts of an update: an endless row of shuffled passes through the list, cut into pieces.

    A function of its arguments, so that a resumed run goes on where it was.
    """
    chosen = []
    for position in range(update * count, (update + 1) * count):
        epoch, index = divmod(position, len(prompts))
        order = torch.randperm(len(prompts), generator=generator_for("prompt order", seed, epoch))
        chosen.append(prompts[int(order[index])])
    return chosen
