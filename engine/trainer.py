"""The engine: one optimizer update, readable from top to bottom."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leangrpo.configs.checks import ConfigError, check_config
from leangrpo.configs.schema import Config
from leangrpo.engine.advantages import AdvantageRule
from leangrpo.engine.algorithms.flow_grpo import FlowGRPO
from leangrpo.engine.gradients import Gradients
from leangrpo.engine.noise import Noise, generator_for
from leangrpo.engine.policies.base import PolicyAdapter
from leangrpo.engine.policies.digits import DigitsPolicy
from leangrpo.engine.replay import Objective, ReplayStatistics, replay
from leangrpo.engine.rewards import Rewards
from leangrpo.engine.schedules import Group, Schedule, schedule_type
from leangrpo.engine.sharding.replicated import Replicated
from leangrpo.engine.types import StepMetrics
from leangrpo.planners.types import Candidate

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Rollout:
    """All groups of an update with their stored transitions, and what was counted on the way."""

    groups: list[Group]
    rewards: Tensor
    """[P * M, K], float64 on the CPU"""
    statistics: ReplayStatistics
    clamped_samples: int


class Engine:
    """Trains `policy` on one process. `update` counts finished updates; noise and steps are functions of it.

    Raises ConfigError where `config` is impossible, on this machine or with this policy.
    """

    def __init__(self, config: Config, policy: PolicyAdapter, rewards: Rewards):
        check_config(config)
        self.config, self.policy, self.rewards = config, policy, rewards
        self.candidate = Candidate.from_config(config)
        self.update = 0
        self.algorithm = FlowGRPO(config.algorithm)
        self.rule = AdvantageRule(config.algorithm.advantage, rewards.weights)
        dtype = DTYPES[config.precision]
        self.backend = Replicated(policy.module, config.optimizer, keep_masters=dtype != torch.float32)
        if dtype != torch.float32:
            policy.to(dtype=dtype)
        per_sample_batch = config.samples_per_forward if config.schedule == "reweight" else 1
        self.gradients = Gradients(
            policy.module,
            dtype=DTYPES[config.buffer_dtype],
            device=policy.device if config.buffer_device == "device" else torch.device("cpu"),
            per_sample_batch=per_sample_batch,
        )
        trained = config.algorithm.advantage.best_of_n or config.group_size
        self.objective = Objective(
            policy,
            self.algorithm,
            self.gradients,
            normaliser=config.algorithm.selected_steps * trained * config.prompts_per_update,
            unselected_stochastic=config.sampler.unselected == "sde",
        )

    @classmethod
    def from_config(cls, config: Config) -> "Engine":
        """The policy and rewards that `config` names, on its device."""
        check_config(config)
        device = choose_device(config.device)
        policy = DigitsPolicy.pretrained(
            config.policy,
            config.sampler,
            seed=config.seed,
            checkpointing=config.checkpointing,
            keep_base=config.algorithm.beta > 0,
        )
        policy.to(device=device)
        return cls(config, policy, Rewards.from_config(config.rewards))

    def train_step(self, prompts: Sequence[str]) -> StepMetrics:
        """One rollout of `prompts_per_update` prompts and its `updates_per_rollout` optimizer steps.

        An error leaves the parameters at the last finished optimizer step and the accounting empty.
        """
        if len(prompts) != self.config.prompts_per_update:
            raise ValueError(
                f"{len(prompts)} prompts given, but prompts_per_update is {self.config.prompts_per_update}"
            )
        try:
            selected = self.algorithm.select(len(self.policy.timesteps), self._generator("selected steps"))
            rollout = self._on_policy_gradient(prompts, selected)
            grad_norm = self.backend.step(self.gradients.take_total())
            off_policy = ReplayStatistics()
            for _ in range(self.config.updates_per_rollout - 1):
                self._off_policy_gradient(rollout.groups, off_policy)
                self.backend.step(self.gradients.take_total())
        finally:
            self.gradients.discard()
        self.update += 1
        return self._metrics(rollout, grad_norm, off_policy)

    def _on_policy_gradient(self, prompts: Sequence[str], selected: frozenset[int]) -> Rollout:
        """Roll every prompt's group out and bring its gradient into the total.

        The schedule lives as long as this call: its buffers are gone before the optimizer needs memory.
        """
        config = self.config
        schedule = schedule_type(self.candidate)(
            self.objective, self.rule, config.group_size, config.samples_per_forward
        )
        groups: list[Group] = []
        waiting: list[Group] = []
        rewards: list[Tensor] = []
        for slot, prompt in enumerate(prompts):
            group, rewards_GK = self._sample_group(schedule, slot, prompt, selected)
            schedule.group_known(group)
            groups.append(group)
            waiting.append(group)
            rewards.append(rewards_GK)
            if not self.rule.global_std or slot == len(prompts) - 1:
                self._conclude(waiting)
                schedule.advantages_known(waiting)
                waiting = []
        return Rollout(groups, torch.cat(rewards), schedule.statistics, schedule.clamped_samples)

    def _sample_group(
        self, schedule: Schedule, slot: int, prompt: str, selected: frozenset[int]
    ) -> tuple[Group, Tensor]:
        """The M generations of one prompt, `samples_per_forward` at a time, with their rewards."""
        trajectories, rewards = [], []
        batch = self.config.samples_per_forward
        for first in range(0, self.config.group_size, batch):
            noise = Noise(self.config.seed, self.update, slot, tuple(range(first, first + batch)))
            trajectory = schedule.rollout(prompt, noise, selected)
            rewards_BK = self.rewards(trajectory.samples, [prompt] * batch)
            trajectory.terms_BK = self.rule.terms(rewards_BK)
            schedule.rewards_known(trajectory)
            trajectories.append(trajectory)
            rewards.append(rewards_BK)
        terms_GK = torch.cat([trajectory.terms_BK for trajectory in trajectories])
        return Group(trajectories, self.rule.statistics(terms_GK)), torch.cat(rewards)

    def _conclude(self, groups: Sequence[Group]) -> None:
        """Divisors and advantages of groups that share a standard deviation."""
        divisors_K = self.rule.divisors([group.statistics for group in groups])
        for group in groups:
            group.divisors_K = divisors_K
            group.advantages_G = self.rule.advantages(group.statistics, divisors_K)

    def _off_policy_gradient(self, groups: Sequence[Group], statistics: ReplayStatistics) -> None:
        """The policy has moved since the rollout: recompute, with ratio and clip."""
        for group in groups:
            for trajectory in group.trajectories:
                replay(self.objective, trajectory, group.local(group.advantages_G, trajectory), statistics)

    def _metrics(self, rollout: Rollout, grad_norm: float, off_policy: ReplayStatistics) -> StepMetrics:
        groups, rewards, on_policy = rollout.groups, rollout.rewards, rollout.statistics
        total = rewards @ self.rule.reward_weights_K
        finite = total[total.isfinite()]
        return StepMetrics(
            reward_mean=finite.mean().item(),
            reward_std=finite.std(correction=0).item(),
            reward_terms={name: rewards[:, k].nanmean().item() for k, name in enumerate(self.rewards.names)},
            grad_norm=grad_norm,
            dropped_samples=sum(int((~group.statistics.finite_G).sum()) for group in groups),
            flat_groups=sum(not group.statistics.numerators_GK.any() for group in groups),
            clamped_samples=rollout.clamped_samples,
            ratio_deviation=on_policy.ratio_deviation,
            clip_fraction=off_policy.clipped / off_policy.ratios if off_policy.ratios else 0.0,
            kl=on_policy.kl_sum / on_policy.kl_terms if on_policy.kl_terms else 0.0,
            samples=len(rewards),
        )

    def _generator(self, purpose: str) -> torch.Generator:
        return generator_for(purpose, self.config.seed, self.update)


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. ConfigError if `cuda` is asked for and absent."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: torch sees no CUDA device; use device=cpu or device=auto")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)
