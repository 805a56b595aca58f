"""The engine: one optimizer update, readable from top to bottom."""

from collections.abc import Sequence

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
        self.schedule = self._new_schedule()

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
            groups, rewards = self._on_policy_gradient(prompts, selected)
            grad_norm = self.backend.step(self.gradients.take_total())
            on_policy, off_policy = self.schedule.statistics, ReplayStatistics()
            for _ in range(self.config.updates_per_rollout - 1):
                self._off_policy_gradient(groups, off_policy)
                self.backend.step(self.gradients.take_total())
            metrics = self._metrics(groups, rewards, grad_norm, on_policy, off_policy)
        finally:
            self.gradients.discard()
            self.schedule = self._new_schedule()
        self.update += 1
        return metrics

    def _on_policy_gradient(self, prompts: Sequence[str], selected: frozenset[int]) -> tuple[list[Group], Tensor]:
        """Roll every prompt's group out and bring its gradient into the total; also all rewards [P * M, K]."""
        groups: list[Group] = []
        waiting: list[Group] = []
        rewards: list[Tensor] = []
        for slot, prompt in enumerate(prompts):
            group, rewards_GK = self._sample_group(slot, prompt, selected)
            self.schedule.group_known(group)
            groups.append(group)
            waiting.append(group)
            rewards.append(rewards_GK)
            if not self.rule.global_std or slot == len(prompts) - 1:
                self._conclude(waiting)
                self.schedule.advantages_known(waiting)
                waiting = []
        return groups, torch.cat(rewards)

    def _sample_group(self, slot: int, prompt: str, selected: frozenset[int]) -> tuple[Group, Tensor]:
        """The M generations of one prompt, `samples_per_forward` at a time, with their rewards."""
        trajectories, rewards = [], []
        batch = self.config.samples_per_forward
        for first in range(0, self.config.group_size, batch):
            noise = Noise(self.config.seed, self.update, slot, tuple(range(first, first + batch)))
            trajectory = self.schedule.rollout(prompt, noise, selected)
            rewards_BK = self.rewards(trajectory.samples, [prompt] * batch)
            trajectory.terms_BK = self.rule.terms(rewards_BK)
            self.schedule.rewards_known(trajectory)
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

    def _metrics(
        self,
        groups: Sequence[Group],
        rewards: Tensor,
        grad_norm: float,
        on_policy: ReplayStatistics,
        off_policy: ReplayStatistics,
    ) -> StepMetrics:
        total = rewards @ self.rule.reward_weights_K
        finite = total[total.isfinite()]
        return StepMetrics(
            reward_mean=finite.mean().item(),
            reward_std=finite.std(correction=0).item(),
            reward_terms={name: rewards[:, k].nanmean().item() for k, name in enumerate(self.rewards.names)},
            grad_norm=grad_norm,
            dropped_samples=sum(int((~group.statistics.finite_G).sum()) for group in groups),
            flat_groups=sum(not group.statistics.numerators_GK.any() for group in groups),
            clamped_samples=self.schedule.clamped_samples,
            ratio_deviation=on_policy.ratio_deviation,
            clip_fraction=off_policy.clipped / off_policy.ratios if off_policy.ratios else 0.0,
            kl=on_policy.kl_sum / on_policy.kl_terms if on_policy.kl_terms else 0.0,
            samples=len(rewards),
        )

    def _new_schedule(self) -> Schedule:
        config = self.config
        return schedule_type(self.candidate)(self.objective, self.rule, config.group_size, config.samples_per_forward)

    def _generator(self, purpose: str) -> torch.Generator:
        return generator_for(purpose, self.config.seed, self.update)


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. ConfigError if `cuda` is asked for and absent."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: torch sees no CUDA device; use device=cpu or device=auto")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)
