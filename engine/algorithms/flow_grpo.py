"""Flow-GRPO (arXiv 2505.05470, flow_grpo at 9745241): step selection, loss and KL."""

import torch
from torch import Tensor

from leangrpo.configs.schema import AlgorithmConfig
from leangrpo.engine.types import Gaussian


class FlowGRPO:
    """The objective of one selected denoising step, per sample; the caller owns the normaliser."""

    def __init__(self, config: AlgorithmConfig):
        self.config = config
        self.beta = config.beta

    def select(self, denoising_steps: int, generator: torch.Generator) -> frozenset[int]:
        """The S trained steps of an update, drawn before the rollout and the same for all its samples."""
        count, candidates = self.config.selected_steps, denoising_steps - 1
        if self.config.selection == "first":
            return frozenset(range(count))
        if self.config.selection == "random":
            return frozenset(torch.randperm(candidates, generator=generator)[:count].tolist())
        start = int(torch.randint(candidates - count + 1, (1,), generator=generator))
        return frozenset(range(start, start + count))

    def policy_loss(self, log_prob_B: Tensor, old_log_prob_B: Tensor, advantages_B: Tensor) -> Tensor:
        """max(-A rho, -A clip(rho)), rho = exp(log_prob - old_log_prob), per sample [B]."""
        ratio_B = torch.exp(log_prob_B - old_log_prob_B)
        clipped_B = ratio_B.clamp(1 - self.config.clip_range, 1 + self.config.clip_range)
        return torch.maximum(-advantages_B * ratio_B, -advantages_B * clipped_B)

    def kl(self, transition: Gaussian, reference_mean: Tensor) -> Tensor:
        """mean((mu - mu_ref)^2) / (2 std^2) per sample [B]; the "flow_grpo" form takes the std without dt."""
        std = transition.std if self.config.kl_form == "exact" else transition.kl_std
        squared = (transition.mean - reference_mean).square().flatten(1).mean(dim=1)
        return squared / (2 * std**2)
