"""Reward functions, by the name that a configuration gives them."""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from leangrpo.configs.schema import RewardConfig
from leangrpo.engine.rewards.digits import digits_classifier
from leangrpo.engine.rewards.jpeg import JpegCompressibility

log = logging.getLogger("leangrpo")

RewardFunction = Callable[[Tensor, list[str]], Tensor]
"""(images uint8 [B, C, H, W], B prompts) -> rewards [B]; NaN marks a sample that could not be scored"""

REWARDS: dict[str, RewardFunction] = {
    "digits_classifier": digits_classifier,
    "jpeg_compressibility": JpegCompressibility(),
}


class RewardError(RuntimeError):
    """Not a single sample of an update has a finite reward; the parameters were left as they are."""


class Rewards:
    """K reward terms as one function, with their weights."""

    def __init__(self, terms: Sequence[tuple[str, RewardFunction, float]]):
        self.names = [name for name, _, _ in terms]
        self.functions = [function for _, function, _ in terms]
        self.weights = [weight for _, _, weight in terms]

    @classmethod
    def from_config(cls, configs: Sequence[RewardConfig]) -> "Rewards":
        """The packaged functions that `configs` name."""
        return cls([(config.name, REWARDS[config.name], config.weight) for config in configs])

    def or_nan(self, images: Tensor, prompts: list[str]) -> Tensor:
        """As a call, but where a function fails NaN: the samples are dropped, and no rank waits for this one."""
        try:
            return self(images, prompts)
        except Exception:
            log.exception("a reward failed; its %d samples of %r are dropped", len(images), prompts[0])
            return torch.full((len(images), len(self.names)), torch.nan, dtype=torch.float64)

    def __call__(self, images: Tensor, prompts: list[str]) -> Tensor:
        """rewards_BK, float64 on the CPU. ValueError if a function does not return one number per image."""
        columns = []
        for name, function in zip(self.names, self.functions, strict=True):
            rewards_B = torch.as_tensor(function(images, prompts))
            if rewards_B.shape != (len(images),):
                raise ValueError(
                    f"reward {name!r} returned shape {list(rewards_B.shape)} for {len(images)} images; "
                    f"it must return one number per image, [{len(images)}]"
                )
            columns.append(rewards_B.detach().to("cpu", torch.float64))
        return torch.stack(columns, dim=1)
