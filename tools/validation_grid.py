"""The configurations on which tools/validate_planner.py compares predictions with real updates, and the candidates
that are measured in each of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from diffusers import SD3Transformer2DModel

from leangrpo.configs.checks import ConfigError
from leangrpo.configs.schema import (
    AdvantageConfig,
    AlgorithmConfig,
    Backend,
    Checkpointing,
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
from leangrpo.planners.search import search
from leangrpo.planners.types import Candidate, Estimate, PolicyTrace

Weights = Literal["lora", "full"]
PROMPTS = ("zero", "one", "two", "three", "four", "five", "six", "seven")
TEXT_WIDTH, HEAD = 32, 16
FEWEST_CANDIDATES, MOST_CANDIDATES = 6, 9
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
    weights: Weights = "lora"
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
            checkpointing="none" if config.checkpointing == "auto" else config.checkpointing,
            keep_base=config.algorithm.beta > 0,
        )

    def trace(self) -> PolicyTrace:
        """Of the module that `policy` makes."""
        return trace_policy(self.policy(self.config()), "one", "float32")

    def engine(self, candidate: Candidate, world: World) -> Engine:
        """The real one, as `candidate` says."""
        config = self.config(candidate)
        return Engine(config, self.policy(config), Rewards.from_config(config.rewards), world)


def measured_candidates(plan: Plan) -> list[Estimate]:
    """The chosen one, then what the planner thinks best of every kind, fastest first; at most MOST_CANDIDATES.

    Kinds share a schedule, buffers, a residency, a way to synchronise, a batch size, or what is checkpointed.
    """
    own = [one for one in plan.candidates if one.feasible]
    ranked = own + [one for choice in ("all", max(1, len(plan.trace.blocks) // 2)) for one in _pinned(plan, choice)]
    ranked.sort(key=lambda one: one.time.total)
    picked = [plan.chosen, *ranked[:3]]
    for name in ("schedule", "buffers", "checkpointing", "residency", "sync", "samples_per_forward"):
        for value in dict.fromkeys(getattr(one.candidate, name) for one in ranked):
            picked += [one for one in ranked if getattr(one.candidate, name) == value][:1]
    unique = {one.candidate: one for one in picked}
    for one in ranked:
        if len(unique) < FEWEST_CANDIDATES:
            unique.setdefault(one.candidate, one)
    return list(unique.values())[:MOST_CANDIDATES]


def _pinned(plan: Plan, checkpointing: Checkpointing) -> list[Estimate]:
    """What fits with that choice; the planner itself only looks at the fewest blocks that have to be checkpointed."""
    try:
        found = search(plan.trace, plan.workload, plan.hardware, {"checkpointing": checkpointing})
    except ConfigError:
        return []
    return [one for one in found.candidates if one.feasible]


def _one_rank() -> Iterator[Case]:
    """Sizes, tokens and shares of trained steps without a limit; then less and less memory."""
    sizes: tuple[tuple[int, Weights], ...] = ((64, "lora"), (128, "full"), (256, "lora"), (256, "full"))
    for width, weights in sizes:
        yield Case(name=f"{weights} {width}", width=width, weights=weights)
    yield Case(name="lora 64 deep", depth=8)
    yield Case(name="full 64 tokens", patch=2, weights="full", group_size=4)
    yield Case(name="lora 128 every step", width=128, steps=4, selected=4)
    yield Case(name="full 128 two prompts", width=128, weights="full", prompts=2, group_size=4)
    yield Case(name="lora 128 KL", width=128, beta=0.04)
    yield Case(name="lora 64 global std", prompts=2, group_size=4, std="global")
    limited: tuple[tuple[int, int, Weights, int, float], ...] = (
        (64, 4, "lora", 4, 0.95),
        (64, 4, "lora", 6, 0.5),
        (128, 4, "lora", 3, 0.7),
        (128, 2, "lora", 4, 0.35),
        (128, 2, "lora", 2, 0.6),
        (64, 2, "lora", 3, 0.2),
        (256, 4, "lora", 5, 0.55),
        (128, 4, "full", 3, 0.8),
        (64, 2, "full", 4, 0.5),
        (128, 2, "full", 3, 0.4),
    )
    for width, patch, weights, selected, budget in limited:
        name = f"{weights} {width}/{patch} S{selected} {budget:.2f}"
        yield Case(name=name, width=width, patch=patch, weights=weights, selected=selected, budget=budget)
    yield Case(name="lora 128 KL 0.60", width=128, beta=0.04, budget=0.6)
    yield Case(name="lora 64 global 0.40", prompts=2, std="global", budget=0.4)


def _two_ranks() -> Iterator[Case]:
    for budget in (None, 0.75):
        text = f" {budget:.2f}" if budget else ""
        yield Case(name=f"2x replicated{text}", ranks=2, width=128, prompts=2, budget=budget)
        yield Case(name=f"2x fsdp2 lora{text}", ranks=2, width=256, backend="fsdp2", budget=budget)
    for budget in (None, 0.85):
        text = f" {budget:.2f}" if budget else ""
        yield Case(name=f"2x fsdp2 full{text}", ranks=2, width=256, weights="full", backend="fsdp2", budget=budget)
    yield Case(name="2x fsdp2 full 128", ranks=2, width=128, weights="full", prompts=2, backend="fsdp2", budget=0.8)
    yield Case(name="2x replicated full", ranks=2, width=128, weights="full", group_size=4)


GRID: tuple[Case, ...] = (*_one_rank(), *_two_ranks())
QUICK: tuple[Case, ...] = (
    Case(name="quick lora", width=32, depth=2, group_size=4, steps=3, selected=2),
    Case(name="quick budget", width=32, depth=2, group_size=4, steps=3, selected=2, budget=0.8),
)
