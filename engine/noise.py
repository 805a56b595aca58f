"""Random numbers as a pure function of where they are used: no generator state, so nothing to save or to synchronise.

The same (seed, update, prompt, generation, step) gives the same noise under every schedule, batch size and number of
ranks, and a resumed run draws what an uninterrupted one would have drawn.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

INITIAL_LATENTS = -1


def generator_for(*key: int | str) -> torch.Generator:
    """A CPU generator seeded by a hash of `key`."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@dataclass(frozen=True)
class Noise:
    """Noise of some generations of the `slot`-th prompt of an update; drawn on the CPU, the same for every device."""

    seed: int
    update: int
    slot: int
    generations: tuple[int, ...]

    def draw(self, step: int, shape: tuple[int, ...]) -> Tensor:
        """Standard normal float32 [B, *shape] of denoising step `step` (`INITIAL_LATENTS` for the start)."""
        return torch.stack(
            [
                torch.randn(
                    shape, generator=generator_for("noise", self.seed, self.update, self.slot, generation, step)
                )
                for generation in self.generations
            ]
        )
