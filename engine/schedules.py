"""When a selected step's backward runs: Native, Retain and Reweight, side by side.

All give the same gradient, -sum_i sum_t A_i grad log_prob_{i,t} over the normaliser, plus the KL term. The trainer
calls, in this order: `rollout` per forward batch, `rewards_known` when that batch has its rewards, `group_known` when
the prompt's group is complete, and `advantages_known` when the advantages of some groups are final (after each group,
or with a global std after the last one).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from leangrpo.engine.advantages import AdvantageRule, GroupStatistics
from leangrpo.engine.noise import Noise
from leangrpo.engine.policies.base import keep, sample_trajectory
from leangrpo.engine.replay import Objective, ReplayStatistics, replay
from leangrpo.engine.types import DenoisingStep, Trajectory


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

    def __init__(
        self, objective: Objective, rule: AdvantageRule, generations: tuple[int, ...], samples_per_forward: int
    ):
        self.objective, self.rule = objective, rule
        self.generations, self.samples_per_forward = generations, samples_per_forward
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

    def _sample(
        self,
        prompt: str,
        noise: Noise,
        selected: frozenset[int],
        on_step: Callable[[DenoisingStep], DenoisingStep] = keep,
    ) -> Trajectory:
        objective = self.objective
        return sample_trajectory(
            objective.policy,
            prompt,
            noise,
            selected,
            unselected_stochastic=objective.unselected_stochastic,
            on_step=on_step,
        )


class Native(Schedule):
    """Sample without graphs and run every selected forward again: the reference."""

    def rollout(self, prompt: str, noise: Noise, selected: frozenset[int]) -> Trajectory:
        with torch.no_grad():
            return self._sample(prompt, noise, selected)

    def advantages_known(self, groups: Sequence[Group]) -> None:
        for group in groups:
            for trajectory in group.trajectories:
                replay(self.objective, trajectory, group.local(group.advantages_G, trajectory), self.statistics)
            self.objective.gradients.group_done()


class Retain(Schedule):
    """Keep the graphs of the selected steps until the advantages are known. Bitwise equal to Native."""

    def rollout(self, prompt: str, noise: Noise, selected: frozenset[int]) -> Trajectory:
        return self._sample(prompt, noise, selected)

    def advantages_known(self, groups: Sequence[Group]) -> None:
        for group in groups:
            for trajectory in group.trajectories:
                advantages_B = group.local(group.advantages_G, trajectory)
                for step in trajectory.selected:
                    self._backward(step, advantages_B)
            self.objective.gradients.group_done()

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

        return self._sample(prompt, noise, selected, on_step=backward_now)

    @abstractmethod
    def _rows(self, generations: tuple[int, ...]) -> Tensor:
        """Zeroed buffers [B, N] for the gradients of the samples that are about to be drawn."""

    def _add_differences(self, groups: Sequence[Group], applied: Sequence[Tensor]) -> None:
        """Replay, policy term only, the samples whose advantage is not the one that was `applied` [G] (a clamp)."""
        differences = [group.advantages_G - applied_G for group, applied_G in zip(groups, applied, strict=True)]
        # a forward may be collective: all ranks run it, or none
        if not self.objective.world.any(any(bool(difference_G.any()) for difference_G in differences)):
            return
        for group, difference_G in zip(groups, differences, strict=True):
            for trajectory in group.trajectories:
                difference_B = group.local(difference_G, trajectory)
                self.clamped_samples += int(difference_B.count_nonzero())
                if self.objective.world.any(bool(difference_B.any())):
                    replay(self.objective, trajectory, difference_B, self.statistics, kl=False)
