"""From rewards to advantages, in float64.

A_q = clamp(sum_k w_k (r_qk - mean_k) / divisor_k): the means belong to the group and are known when it is complete, the
divisors to the group or, with a global std, to the whole update. Apart from clamp and best-of-n an advantage is affine
in its rewards, which is what the streaming buffers rely on. Conventions: shared between flow_grpo (ddof 0, 1e-4) and
DanceGRPO (ddof 1, 1e-8), so both are explicit settings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leangrpo.configs.schema import AdvantageConfig


@dataclass(frozen=True)
class GroupStatistics:
    """What a complete group's rewards say. float64 on the CPU; K reward terms that are normalised separately."""

    rewards_GK: Tensor
    finite_G: Tensor
    """samples with a usable reward"""
    trained_G: Tensor
    """of these, the ones that best-of-n keeps"""
    mean_K: Tensor
    numerators_GK: Tensor
    """reward - mean; exactly 0 where a sample is not trained or all rewards of the group are equal"""


class AdvantageRule:
    """Statistics, divisors and advantages under one `AdvantageConfig`."""

    def __init__(self, config: AdvantageConfig, weights: Sequence[float]):
        self.config = config
        self.reward_weights_K = torch.tensor(weights, dtype=torch.float64)
        per_reward = config.normalise == "per_reward"
        self.weights_K = self.reward_weights_K if per_reward else torch.ones(1, dtype=torch.float64)
        self.global_std = config.std == "global"

    def terms(self, rewards_BK: Tensor) -> Tensor:
        """The reward terms that are normalised: all K of them, or their weighted sum [B, 1]."""
        if self.config.normalise == "per_reward":
            return rewards_BK
        return (rewards_BK @ self.reward_weights_K)[:, None]

    def statistics(self, terms_GK: Tensor) -> GroupStatistics:
        """Of one complete group; samples with a non-finite term are left out."""
        finite_G = terms_GK.isfinite().all(dim=1)
        numerators_GK = torch.zeros_like(terms_GK)
        mean_K = torch.zeros(terms_GK.shape[1], dtype=torch.float64)
        trained_G = finite_G & self._best_of_n(terms_GK, finite_G)
        if finite_G.any():
            kept = terms_GK[finite_G]
            low_K, high_K = kept.amin(dim=0), kept.amax(dim=0)
            # a mean of equal numbers can miss them by an ulp, which a tiny epsilon would blow up: state it exactly
            mean_K = torch.where(low_K == high_K, low_K, kept.mean(dim=0))
            numerators_GK[trained_G] = terms_GK[trained_G] - mean_K
        return GroupStatistics(terms_GK, finite_G, trained_G, mean_K, numerators_GK)

    def _best_of_n(self, terms_GK: Tensor, finite_G: Tensor) -> Tensor:
        """The best and the worst n/2 by weighted reward, ties by generation number."""
        number = self.config.best_of_n
        if number is None or int(finite_G.sum()) <= number:
            return finite_G
        score_G = (terms_GK @ self.weights_K).masked_fill(~finite_G, torch.inf)
        order = score_G.argsort(stable=True)[: int(finite_G.sum())]
        chosen_G = torch.zeros_like(finite_G)
        chosen_G[torch.cat([order[: number // 2], order[-(number // 2) :]])] = True
        return chosen_G

    def divisors(self, groups: Sequence[GroupStatistics]) -> Tensor:
        """std + epsilon per reward term [K], over all finite rewards of `groups` (one group, or all of the update)."""
        kept = torch.cat([group.rewards_GK[group.finite_G] for group in groups])
        count, terms = kept.shape
        if count <= self.config.ddof:
            return torch.ones(terms, dtype=torch.float64)
        std_K = kept.std(dim=0, correction=self.config.ddof)
        divisors_K = std_K.masked_fill(kept.amin(dim=0) == kept.amax(dim=0), 0.0) + self.config.epsilon
        return divisors_K.masked_fill(divisors_K == 0, 1.0)  # only where every numerator is 0 as well

    def affine(self, group: GroupStatistics, divisors_K: Tensor) -> Tensor:
        """The advantages [G] before the clamp."""
        return group.numerators_GK @ (self.weights_K / divisors_K)

    def advantages(self, group: GroupStatistics, divisors_K: Tensor) -> Tensor:
        """The advantages [G]; 0 for samples that are not trained."""
        return self.affine(group, divisors_K).clamp(-self.config.clamp, self.config.clamp)
