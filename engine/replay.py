"""The native backward: run the policy again on stored transitions.

Serves Native itself, the off-policy updates of every schedule, and Reweight's clamp differences.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from leangrpo.engine.algorithms.flow_grpo import FlowGRPO
from leangrpo.engine.distributed import World
from leangrpo.engine.gradients import Gradients
from leangrpo.engine.policies.base import PolicyAdapter
from leangrpo.engine.types import DenoisingStep, Gaussian, Trajectory


@dataclass
class ReplayStatistics:
    """Of the recomputed ratios; the same fields for every schedule, 0 where nothing was recomputed."""

    ratio_deviation: float = 0.0
    clipped: int = 0
    ratios: int = 0
    kl_sum: float = 0.0
    kl_terms: int = 0

    def over(self, world: World) -> "ReplayStatistics":
        """The same for all processes together. Collective."""
        sums = world.sum(torch.tensor([self.clipped, self.ratios, self.kl_sum, self.kl_terms], dtype=torch.float64))
        deviation = float(world.maximum(torch.tensor([self.ratio_deviation], dtype=torch.float64)))
        clipped, ratios, kl_sum, kl_terms = sums.tolist()
        return ReplayStatistics(deviation, int(clipped), int(ratios), kl_sum, int(kl_terms))

    def add_ratio(self, ratio_B: Tensor, clip_range: float) -> None:
        """Count one step's ratios [B]."""
        deviation_B = (ratio_B - 1).abs()
        self.ratio_deviation = max(self.ratio_deviation, float(deviation_B.max()))
        self.clipped += int((deviation_B > clip_range).sum())
        self.ratios += len(ratio_B)

    def add_kl(self, kl_B: Tensor) -> None:
        """Count one step's KL values [B]."""
        self.kl_sum += float(kl_B.sum())
        self.kl_terms += len(kl_B)


@dataclass(frozen=True)
class Objective:
    """What every schedule needs: the policy, the algorithm, where gradients go, and the loss normaliser."""

    policy: PolicyAdapter
    algorithm: FlowGRPO
    gradients: Gradients
    normaliser: float
    """selected steps x trained samples per group x prompts per update; the same under every schedule"""
    unselected_stochastic: bool
    world: World

    def reference_mean(self, step: DenoisingStep) -> Tensor:
        """Mean of the frozen base policy at a stored step."""
        with torch.no_grad(), self.policy.reference():
            return self.policy.transition(step.latents, step.timestep, step.conditioning, stochastic=True).mean

    def policy_loss(self, step: DenoisingStep, log_prob_B: Tensor, advantages_B: Tensor) -> Tensor:
        """Policy loss of one step over the normaliser, a scalar."""
        loss_B = self.algorithm.policy_loss(log_prob_B, step.log_prob_B.detach(), advantages_B)
        return loss_B.sum() / self.normaliser

    def loss(
        self,
        step: DenoisingStep,
        transition: Gaussian,
        log_prob_B: Tensor,
        advantages_B: Tensor,
        statistics: ReplayStatistics,
    ) -> Tensor:
        """Policy and KL loss of one step, a scalar."""
        loss = self.policy_loss(step, log_prob_B, advantages_B)
        if self.algorithm.beta > 0:
            loss = loss + self.kl_loss(step, transition, statistics)
        return loss

    def kl_loss(self, step: DenoisingStep, transition: Gaussian, statistics: ReplayStatistics) -> Tensor:
        """beta x KL of one step over the normaliser, a scalar. The reference is computed once per stored step."""
        if step.reference_mean is None:
            step.reference_mean = self.reference_mean(step)
        kl_B = self.algorithm.kl(transition, step.reference_mean)
        statistics.add_kl(kl_B.detach())
        return self.algorithm.beta * kl_B.sum() / self.normaliser


def replay(
    objective: Objective, trajectory: Trajectory, advantages_B: Tensor, statistics: ReplayStatistics, *, kl: bool = True
) -> None:
    """Forward and backward of every selected step of `trajectory` into the total gradient, with ratio and clip."""
    policy = objective.policy
    for step in trajectory.selected:
        transition = policy.transition(step.latents, step.timestep, step.conditioning, stochastic=True)
        log_prob_B = transition.log_prob(step.next_latents)
        ratio_B = torch.exp(log_prob_B.detach() - step.log_prob_B)
        statistics.add_ratio(ratio_B, objective.algorithm.config.clip_range)
        if kl:
            loss = objective.loss(step, transition, log_prob_B, advantages_B, statistics)
        else:
            loss = objective.policy_loss(step, log_prob_B, advantages_B)
        objective.gradients.backward(loss)
