"""The engine: one optimizer update, readable from top to bottom; the same on one process and on many."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leangrpo.configs.checks import ConfigError, check_config
from leangrpo.configs.ranks import check_world_size
from leangrpo.configs.schema import Config
from leangrpo.engine.advantages import AdvantageRule, GroupStatistics
from leangrpo.engine.algorithms.flow_grpo import FlowGRPO
from leangrpo.engine.distributed import World
from leangrpo.engine.gradients import Gradients
from leangrpo.engine.noise import Noise, generator_for
from leangrpo.engine.policies.base import DTYPES, PolicyAdapter
from leangrpo.engine.policies.digits import DigitsPolicy
from leangrpo.engine.prompt_group import PromptGroup
from leangrpo.engine.replay import Objective, ReplayStatistics, replay
from leangrpo.engine.rewards import RewardError, Rewards
from leangrpo.engine.reweight import schedule_type
from leangrpo.engine.schedules import Group, Schedule
from leangrpo.engine.sharding import make_backend
from leangrpo.engine.types import StepMetrics
from leangrpo.planners.types import Candidate


@dataclass(frozen=True)
class Rollout:
    """This rank's groups with their stored transitions, all ranks' rewards, and what was counted on the way."""

    groups: list[Group]
    terms_PGK: Tensor
    """reward terms of all prompts of the update"""
    rewards_PGK: Tensor
    """the rewards behind them, unweighted; both float64 on the CPU"""
    statistics: ReplayStatistics
    clamped_samples: int


class Engine:
    """Trains `policy`. `update` counts finished updates; noise and steps are functions of it.

    With several processes, every one of them makes an engine and calls the same methods. Raises ConfigError where
    `config` is impossible: on this machine, with this policy, or with this number of processes; and where a choice is
    still auto, as engine/planning.py leaves none.
    """

    def __init__(self, config: Config, policy: PolicyAdapter, rewards: Rewards, world: World | None = None):
        self.config, self.policy, self.rewards = config, policy, rewards
        self.world = world or World()
        check_config(config)
        check_world_size(config, self.world.size, self.world.local_size)
        self.candidate = choice = Candidate.from_config(config)
        self.update = 0
        self.group = PromptGroup(
            self.world,
            config.group_size,
            config.prompts_per_update,
            choice.samples_per_forward,
            config.ranks_per_prompt,
        )
        self.algorithm = FlowGRPO(config.algorithm)
        self.rule = AdvantageRule(config.algorithm.advantage, rewards.weights)
        self.backend = make_backend(policy, config, self.world)
        self.gradients = Gradients(
            policy.module,
            self.backend,
            sync=choice.sync,
            dtype=DTYPES[choice.buffer_dtype],
            device=policy.device if choice.buffer_device == "device" else torch.device("cpu"),
            per_sample_batch=choice.samples_per_forward if choice.schedule == "reweight" else 1,
            sums_are_reduced=choice.schedule == "reweight" and choice.buffers == "streaming_sharded",
        )
        trained = config.algorithm.advantage.best_of_n or config.group_size
        self.objective = Objective(
            policy,
            self.algorithm,
            self.gradients,
            normaliser=config.algorithm.selected_steps * trained * config.prompts_per_update,
            unselected_stochastic=config.sampler.unselected == "sde",
            world=self.world,
        )

    @classmethod
    def from_config(cls, config: Config, world: World | None = None) -> "Engine":
        """The policy and rewards that `config` names, on its device."""
        check_config(config)
        policy = DigitsPolicy.pretrained(
            config.policy,
            config.sampler,
            seed=config.seed,
            checkpointing=Candidate.from_config(config).checkpointing,
            keep_base=config.algorithm.beta > 0,
        )
        policy.to(device=choose_device(config.device, world or World()))
        return cls(config, policy, Rewards.from_config(config.rewards), world)

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
            self.backend.begin_update()
            rollout = self._on_policy_gradient(prompts, selected)
            if not rollout.terms_PGK.isfinite().any():
                raise RewardError(
                    f"none of the {rollout.terms_PGK.shape[:2].numel()} samples has a finite reward "
                    f"({', '.join(self.rewards.names)}); an error of a reward function stands in the log"
                )
            self.gradients.update_done()
            grad_norm = self.backend.step()
            off_policy = ReplayStatistics()
            for _ in range(self.config.updates_per_rollout - 1):
                self.backend.begin_update()
                self._off_policy_gradient(rollout.groups, off_policy)
                self.gradients.update_done()
                self.backend.step()
        finally:
            self.gradients.discard()
        self.update += 1
        return self._metrics(rollout, grad_norm, off_policy)

    def _on_policy_gradient(self, prompts: Sequence[str], selected: frozenset[int]) -> Rollout:
        """Roll out this rank's share of every prompt and bring its gradient into the total.

        The schedule lives as long as this call: its buffers are gone before the optimizer needs memory.
        """
        schedule = schedule_type(self.candidate)(
            self.objective, self.rule, self.group.generations, self.candidate.samples_per_forward
        )
        groups: list[Group] = []
        rewards: list[Tensor] = []
        for slot in self.group.slots:
            group, rewards_GK = self._sample_group(schedule, slot, prompts[slot], selected)
            schedule.group_known(group)
            groups.append(group)
            rewards.append(rewards_GK)
            if not self.rule.global_std:
                self._conclude([group], [group.statistics])
                schedule.advantages_known([group])
        rewards_PGK = self.group.all_gather_prompts(torch.stack(rewards))
        terms_PGK = self.group.all_gather_prompts(torch.stack([group.statistics.rewards_GK for group in groups]))
        if self.rule.global_std:
            self._conclude(groups, [self.rule.statistics(terms_GK) for terms_GK in terms_PGK])
            schedule.advantages_known(groups)
        return Rollout(groups, terms_PGK, rewards_PGK, schedule.statistics, schedule.clamped_samples)

    def _sample_group(
        self, schedule: Schedule, slot: int, prompt: str, selected: frozenset[int]
    ) -> tuple[Group, Tensor]:
        """This rank's generations of one prompt, `samples_per_forward` at a time, and the whole group's rewards."""
        trajectories, rewards = [], []
        batch = self.candidate.samples_per_forward
        for first in range(0, len(self.group.generations), batch):
            noise = Noise(self.config.seed, self.update, slot, self.group.generations[first : first + batch])
            trajectory = schedule.rollout(prompt, noise, selected)
            rewards_BK = self.rewards.or_nan(trajectory.samples, [prompt] * batch)
            trajectory.terms_BK = self.rule.terms(rewards_BK)
            schedule.rewards_known(trajectory)
            trajectories.append(trajectory)
            rewards.append(rewards_BK)
        rewards_GK = self.group.all_gather(torch.cat(rewards))
        return Group(trajectories, self.rule.statistics(self.rule.terms(rewards_GK))), rewards_GK

    def _conclude(self, groups: Sequence[Group], sharing: Sequence[GroupStatistics]) -> None:
        """Divisors, from all groups that share a standard deviation, and advantages of this rank's `groups`."""
        divisors_K = self.rule.divisors(sharing)
        for group in groups:
            group.divisors_K = divisors_K
            group.advantages_G = self.rule.advantages(group.statistics, divisors_K)

    def _off_policy_gradient(self, groups: Sequence[Group], statistics: ReplayStatistics) -> None:
        """The policy has moved since the rollout: recompute, with ratio and clip."""
        for group in groups:
            for trajectory in group.trajectories:
                replay(self.objective, trajectory, group.local(group.advantages_G, trajectory), statistics)
            self.gradients.group_done()

    def _metrics(self, rollout: Rollout, grad_norm: float, off_policy: ReplayStatistics) -> StepMetrics:
        everyone = [self.rule.statistics(terms_GK) for terms_GK in rollout.terms_PGK]
        rewards = rollout.rewards_PGK.flatten(0, 1)
        total = rewards @ self.rule.reward_weights_K
        finite = total[total.isfinite()]
        on_policy = rollout.statistics.over(self.world)
        off_policy = off_policy.over(self.world)
        clamped = self.world.sum(torch.tensor([float(rollout.clamped_samples)]))
        return StepMetrics(
            reward_mean=finite.mean().item(),
            reward_std=finite.std(correction=0).item(),
            reward_terms={name: rewards[:, k].nanmean().item() for k, name in enumerate(self.rewards.names)},
            grad_norm=grad_norm,
            dropped_samples=sum(int((~group.finite_G).sum()) for group in everyone),
            flat_groups=sum(not group.numerators_GK.any() for group in everyone),
            clamped_samples=int(clamped),
            ratio_deviation=on_policy.ratio_deviation,
            clip_fraction=off_policy.clipped / off_policy.ratios if off_policy.ratios else 0.0,
            kl=on_policy.kl_sum / on_policy.kl_terms if on_policy.kl_terms else 0.0,
            samples=len(rewards),
        )

    def _generator(self, purpose: str) -> torch.Generator:
        return generator_for(purpose, self.config.seed, self.update)


def choose_device(name: str, world: World) -> torch.device:
    """`auto` is CUDA where there is one: this process's. ConfigError if `cuda` is asked for and absent."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: torch sees no CUDA device; use device=cpu or device=auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return device
