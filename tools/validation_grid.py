"""The configurations on which tools/validate_planner.py compares predictions with real updates, and the candidates
that are measured in each of them."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from diffusers import SD3Transformer2DModel

from leangrpo.configs.schema import (
    AdvantageConfig,
    AlgorithmConfig,
    Backend,
    Config,
    LoraConfig,
    OptimizerConfig,
    PolicyConfig,
    SamplerConfig,
)
from leangrpo.engine.distributed import World
from leangrpo.engine.planning import trace_policy
from leangrpo.engine.policies.digits import DigitsPolicy
from leangrpo.engine.policies.word_encoder import WordEncoder
from leangrpo.engine.rewards import Rewards
from leangrpo.engine.trainer import Engine
from leangrpo.planners.plan import Plan
from leangrpo.planners.types import Candidate, Estimate, PolicyTrace

PROMPTS = ("zero", "one", "two", "three", "four", "five", "six", "seven")
TEXT_WIDTH, HEAD = 32, 16
MOST_CANDIDATES = 9
LINEAR_LAYERS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
MLP_LAYERS = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration: a digits policy with random weights, and what an update of it has to do."""

    name: str
    width: int = 64
    depth: int = 4
    patch: int = 4
    """pixels; 16 x 16 pixels are (16 / patch)^2 tokens"""
    weights: Literal["lora", "full"] = "lora"
    lora_rank: int = 8
    mlp: bool = True
    """adapters on the MLP as well"""
    group_size: int = 8
    prompts: int = 1
    steps: int = 6
    selected: int = 3
    beta: float = 0.0
    std: Literal["group", "global"] = "group"
    ranks: int = 1
    backend: Backend = "replicated"
    budget: float | None = None
    """device memory, as a part of the predicted peak of the plan without a limit; None: no limit"""

    def config(self, candidate: Candidate | None = None) -> Config:
        """As a file would say it; the choices are `candidate`'s."""
        config = Config(
            out_dir="unused",
            device="cpu",
            threads=1,
            backend=self.backend,
            prompts_per_update=self.prompts,
            group_size=self.group_size,
            policy=PolicyConfig(
                weights=self.weights,
                lora=LoraConfig(rank=self.lora_rank, target_modules=LINEAR_LAYERS + MLP_LAYERS * self.mlp),
            ),
            sampler=SamplerConfig(denoising_steps=self.steps),
            algorithm=AlgorithmConfig(
                selected_steps=self.selected, beta=self.beta, advantage=AdvantageConfig(std=self.std)
            ),
            optimizer=OptimizerConfig(learning_rate=1e-6),  # what is timed must not change with the weights
        )
        return candidate.resolve(config) if candidate else config

    def policy(self, config: Config) -> DigitsPolicy:
        """Random weights, the same for every candidate and rank."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = SD3Transformer2DModel(
                sample_size=16,
                patch_size=self.patch,
                in_channels=1,
                out_channels=1,
                num_layers=self.depth,
                attention_head_dim=HEAD,
                num_attention_heads=self.width // HEAD,
                joint_attention_dim=TEXT_WIDTH,
                caption_projection_dim=self.width,
                pooled_projection_dim=TEXT_WIDTH,
                pos_embed_max_size=16 // self.patch,
            )
            encoder = WordEncoder(dim=TEXT_WIDTH)
        return DigitsPolicy(
            module,
            encoder,
            config.policy,
            config.sampler,
            seed=0,
            checkpointing=config.checkpointing,
            keep_base=config.algorithm.beta > 0,
        )

    def trace(self) -> PolicyTrace:
        """Of the module that `policy` makes."""
        return trace_policy(self.policy(dataclasses.replace(self.config(), checkpointing="none")), "one", "float32")

    def engine(self, candidate: Candidate, world: World) -> Engine:
        """The real one, as `candidate` says."""
        config = self.config(candidate)
        return Engine(config, self.policy(config), Rewards.from_config(config.rewards), world)


def measured_candidates(plan: Plan) -> list[Estimate]:
    """The chosen one, then what the planner thinks best of every kind, fastest first; at most MOST_CANDIDATES."""
    ranked = [one for one in plan.candidates if one.feasible]
    picked = [plan.chosen, *ranked[:3]]
    for kind in _kinds(ranked):
        picked += kind[:1]
    unique = {one.candidate: one for one in picked}
    unique |= {one.candidate: one for one in ranked if one.candidate not in unique and len(unique) < 6}
    return list(unique.values())[:MOST_CANDIDATES]


def _kinds(ranked: list[Estimate]) -> Iterator[list[Estimate]]:
    """Those that share a schedule and its buffers, a batch size, a way to synchronise."""
    for name in ("schedule", "buffers", "residency", "sync", "samples_per_forward"):
        for value in dict.fromkeys(getattr(one.candidate, name) for one in ranked):
            yield [one for one in ranked if getattr(one.candidate, name) == value]


def _pairs() -> Iterator[Case]:
    yield from ()


GRID: tuple[Case, ...] = (*_pairs(),)
QUICK: tuple[Case, ...] = ()
