"""When a selected step's backward runs: Native, Retain and Reweight, side by side.

All give the same gradient, -sum_i sum_t A_i grad log_prob_{i,t} over the normaliser, plus the KL term. The trainer
calls, in this order: `rollout` per forward batch, `rewards_known` when that batch has its rewards, `group_known` when
the prompt's group is complete, and `advantages_known` when the advantages of some groups are final (after each group,
or with a global std after the last one).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from leangrpo.engine.advantages import AdvantageRule, GroupStatistics
from leangrpo.engine.noise import Noise
from leangrpo.engine.policies.base import sample_trajectory
from leangrpo.engine.replay import Objective, ReplayStatistics, replay
from leangrpo.engine.types import DenoisingStep, Trajectory
from leangrpo.kernels.rescale_accumulate import rescale_accumulate_
from leangrpo.planners.types import Candidate


@dataclass
class Group:
    """The generations of one prompt on their way from rollout to advantages."""

    trajectories: list[Trajectory]
    statistics: GroupStatistics
    advantages_G: Tensor = field(default_factory=lambda: torch.empty(0))
    divisors_K: Tensor = field(default_factory=lambda: torch.empty(0))

    def local(self, values_G: Tensor, trajectory: Trajectory) -> Tensor:
        """The entries of `trajectory`'s samples, float32 on their device."""
        return values_G[list(trajectory.generations)].to(trajectory.samples.device, torch.float32)


class Schedule(ABC):
    """One way to obtain the gradient of an update; made anew for every update."""

    def __init__(self, objective: Objective, rule: AdvantageRule, group_size: int, samples_per_forward: int):
        self.objective, self.rule = objective, rule
        self.group_size, self.samples_per_forward = group_size, samples_per_forward
        self.statistics = ReplayStatistics()
        self.clamped_samples = 0

    @abstractmethod
    def rollout(self, prompt: str, noise: Noise, selected: frozenset[int]) -> Trajectory:
        """Sample the generations of `noise`."""

    def rewards_known(self, trajectory: Trajectory) -> None:  # noqa: B027 - most schedules have nothing to do here
        """The samples of one rollout have their rewards; other samples of the group may still be missing."""

    def group_known(self, group: Group) -> None:  # noqa: B027 - nor here
        """All rewards of a group are known; with a global std its divisors are not."""

    @abstractmethod
    def advantages_known(self, groups: Sequence[Group]) -> None:
        """Divisors and advantages of `groups` are final: bring their gradient into the total."""


class Native(Schedule):
    """Sample without graphs and run every selected forward again: the reference."""

    def rollout(self, prompt: str, noise: Noise, selected: frozenset[int]) -> Trajectory:
        with torch.no_grad():
            return sample_trajectory(
                self.objective.policy,
                prompt,
                noise,
                selected,
                unselected_stochastic=self.objective.unselected_stochastic,
            )

    def advantages_known(self, groups: Sequence[Group]) -> None:
        for group in groups:
            for trajectory in group.trajectories:
                replay(self.objective, trajectory, group.local(group.advantages_G, trajectory), self.statistics)


class Retain(Schedule):
    """Keep the graphs of the selected steps until the advantages are known. Bitwise equal to Native."""

    def rollout(self, prompt: str, noise: Noise, selected: frozenset[int]) -> Trajectory:
        return sample_trajectory(
            self.objective.policy,
            prompt,
            noise,
            selected,
            unselected_stochastic=self.objective.unselected_stochastic,
        )

    def advantages_known(self, groups: Sequence[Group]) -> None:
        for group in groups:
            for trajectory in group.trajectories:
                advantages_B = group.local(group.advantages_G, trajectory)
                for step in trajectory.selected:
                    self._backward(step, advantages_B)

    def _backward(self, step: DenoisingStep, advantages_B: Tensor) -> None:
        assert step.transition is not None
        loss = self.objective.loss(step, step.transition, step.log_prob_B, advantages_B, self.statistics)
        step.release()
        self.objective.gradients.backward(loss)


class Reweight(Schedule):
    """Backward with advantage 1 while sampling; the stored gradient gets its advantage when that is known.

    The KL term's coefficient is known at once, so its gradient goes straight into the total, by a second
    vector-Jacobian product through the same graph, and never meets an advantage.
    """

    def rollout(self, prompt: str, noise: Noise, selected: frozenset[int]) -> Trajectory:
        objective, gradients = self.objective, self.objective.gradients
        rows = self._rows(noise.generations)

        def backward_now(step: DenoisingStep) -> DenoisingStep:
            with_kl = objective.algorithm.beta > 0
            gradients.backward_per_sample(step.log_prob_B, rows, retain_graph=with_kl)
            if with_kl:
                assert step.transition is not None
                gradients.backward(objective.kl_loss(step, step.transition, self.statistics))
            step.release()
            return step

        return sample_trajectory(
            objective.policy,
            prompt,
            noise,
            selected,
            unselected_stochastic=objective.unselected_stochastic,
            on_step=backward_now,
        )

    @abstractmethod
    def _rows(self, generations: tuple[int, ...]) -> Tensor:
        """Zeroed buffers [B, N] for the gradients of the samples that are about to be drawn."""

    def _add_differences(self, groups: Sequence[Group], applied: Sequence[Tensor]) -> None:
        """Replay, policy term only, the samples whose advantage is not the one that was `applied` [G] (a clamp)."""
        for group, applied_G in zip(groups, applied, strict=True):
            difference_G = group.advantages_G - applied_G
            self.clamped_samples += int((difference_G != 0).sum())
            for trajectory in group.trajectories:
                difference_B = group.local(difference_G, trajectory)
                if difference_B.any():
                    replay(self.objective, trajectory, difference_B, self.statistics, kl=False)


class ReweightPerSample(Reweight):
    """One buffer per sample of the group: any advantage, memory grows with the group."""

    def __init__(self, objective: Objective, rule: AdvantageRule, group_size: int, samples_per_forward: int):
        super().__init__(objective, rule, group_size, samples_per_forward)
        self.pending = objective.gradients.new_buffer(group_size)

    def _rows(self, generations: tuple[int, ...]) -> Tensor:
        return self.pending[generations[0] : generations[-1] + 1]

    def group_known(self, group: Group) -> None:
        if self.rule.global_std:
            for term, numerators_G in enumerate(group.statistics.numerators_GK.unbind(dim=1)):
                self._fold(self.objective.gradients.get_numerator(term), numerators_G)
            self.pending.zero_()

    def advantages_known(self, groups: Sequence[Group]) -> None:
        if self.rule.global_std:
            divisors_K = groups[0].divisors_K
            self.objective.gradients.divide_numerators(self.rule.weights_K / divisors_K)
            self._add_differences(groups, [self.rule.affine(group.statistics, divisors_K) for group in groups])
            return
        for group in groups:
            self._fold(self.objective.gradients.get_total(), group.advantages_G)
            self.pending.zero_()

    def _fold(self, out: Tensor, weights_G: Tensor) -> None:
        rescale_accumulate_(out, self.pending, (-weights_G / self.objective.normaliser).tolist())


class ReweightStreaming(Reweight):
    """Running sums instead of one buffer per sample: memory does not depend on the size of the group.

    With r_q known when sample q is done and c the group's first finite reward, S0 = sum G_q and S1 = sum (r_q - c) G_q
    give sum (r_q - mean) G_q = S1 - (mean - c) S0. Centring at c keeps float32 as exact as one buffer per sample.
    """

    def __init__(self, objective: Objective, rule: AdvantageRule, group_size: int, samples_per_forward: int):
        super().__init__(objective, rule, group_size, samples_per_forward)
        gradients, terms = objective.gradients, len(rule.weights_K)
        self.pending = gradients.new_buffer(samples_per_forward)
        self.sum_0 = gradients.new_buffer()
        self.sum_1 = gradients.new_buffer(terms)
        self.centre_K: Tensor | None = None

    def _rows(self, generations: tuple[int, ...]) -> Tensor:
        return self.pending[: len(generations)]

    def rewards_known(self, trajectory: Trajectory) -> None:
        finite_B = trajectory.terms_BK.isfinite().all(dim=1)
        for index in finite_B.nonzero().flatten().tolist():
            terms_K, row = trajectory.terms_BK[index], self.pending[index : index + 1]
            if self.centre_K is None:
                self.centre_K = terms_K
            rescale_accumulate_(self.sum_0, row, [1.0])
            for sum_1, weight in zip(self.sum_1, (terms_K - self.centre_K).tolist(), strict=True):
                rescale_accumulate_(sum_1, row, [weight])
        self.pending.zero_()

    def group_known(self, group: Group) -> None:
        if self.rule.global_std:
            for term in range(len(self.rule.weights_K)):
                self._fold(self.objective.gradients.get_numerator(term), group.statistics, term, 1.0)
            self._clear()

    def advantages_known(self, groups: Sequence[Group]) -> None:
        divisors_K = groups[0].divisors_K
        scale_K = self.rule.weights_K / divisors_K
        if self.rule.global_std:
            self.objective.gradients.divide_numerators(scale_K)
        else:
            for term, scale in enumerate(scale_K.tolist()):
                self._fold(self.objective.gradients.get_total(), groups[0].statistics, term, scale)
            self._clear()
        self._add_differences(groups, [self.rule.affine(group.statistics, divisors_K) for group in groups])

    def _fold(self, out: Tensor, statistics: GroupStatistics, term: int, scale: float) -> None:
        if self.centre_K is None:  # no sample of the group had a finite reward
            return
        offset = float(statistics.mean_K[term] - self.centre_K[term])
        factor = -scale / self.objective.normaliser
        rescale_accumulate_(out, self.sum_1[term : term + 1], [factor])
        rescale_accumulate_(out, self.sum_0[None], [-offset * factor])

    def _clear(self) -> None:
        self.sum_0.zero_()
        self.sum_1.zero_()
        self.centre_K = None


SCHEDULES: dict[str, type[Schedule]] = {"native": Native, "retain": Retain}
REWEIGHT: dict[str, type[Schedule]] = {"per_sample": ReweightPerSample, "streaming": ReweightStreaming}


def schedule_type(candidate: Candidate) -> type[Schedule]:
    """The class that executes `candidate`; `buffers` matters under Reweight only."""
    return REWEIGHT[candidate.buffers] if candidate.schedule == "reweight" else SCHEDULES[candidate.schedule]
