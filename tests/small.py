"""A small random SD3 policy and engines around it, for tests that need real classes but no trained weights."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from leangrpo.configs.schema import (
    AdvantageConfig,
    AlgorithmConfig,
    Config,
    LoraConfig,
    OptimizerConfig,
    PolicyConfig,
    SamplerConfig,
)
from leangrpo.engine.distributed import World
from leangrpo.engine.policies.base import DTYPES
from leangrpo.engine.policies.digits import DigitsPolicy
from leangrpo.engine.policies.word_encoder import WordEncoder
from leangrpo.engine.rewards import RewardFunction, Rewards
from leangrpo.engine.schedules import Group
from leangrpo.engine.trainer import Engine
from leangrpo.tools.float64_reference import StoredStep, advantages_by_hand, float64_policy, reference_gradient

PROMPTS = ["one", "two", "three"]


def small_config(**changes: Any) -> Config:
    """3 prompts x 4 samples, 4 of 5 steps, every choice pinned.

    `changes` to top-level keys, or `section={...}` to a section's.
    """
    sections = {"algorithm", "sampler", "policy", "optimizer"}
    config = Config(
        out_dir="unused",
        prompts_per_update=3,
        group_size=4,
        schedule="reweight",
        buffers="streaming",
        buffer_dtype="float32",
        buffer_device="device",
        sync="every_update",
        checkpointing="none",
        residency="resident",
        samples_per_forward=2,
        sampler=SamplerConfig(denoising_steps=5),
        algorithm=AlgorithmConfig(selected_steps=4, advantage=AdvantageConfig()),
        policy=PolicyConfig(weights="full", lora=LoraConfig(rank=4, alpha=8)),
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )
    advantage = changes.pop("advantage", {})
    for name, value in changes.items():
        config = replace(config, **{name: replace(getattr(config, name), **value) if name in sections else value})
    algorithm = replace(config.algorithm, advantage=replace(config.algorithm.advantage, **advantage))
    return replace(config, algorithm=algorithm)


def small_policy(config: Config, seed: int = 0) -> DigitsPolicy:
    """8 px, 2 blocks, width 16, random weights that depend on `seed` alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=1,
            out_channels=1,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=8,
            caption_projection_dim=16,
            pooled_projection_dim=8,
            pos_embed_max_size=4,
        )
        encoder = WordEncoder(dim=8)
    return DigitsPolicy(
        module,
        encoder,
        config.policy,
        config.sampler,
        seed=seed,
        checkpointing=config.checkpointing,
        keep_base=config.algorithm.beta > 0,
    )


def brightness(images: Tensor, prompts: list[str]) -> Tensor:
    """A reward that differs from sample to sample."""
    return images.float().mean(dim=(1, 2, 3)) / 255


def small_engine(config: Config, *functions: RewardFunction, seed: int = 0, world: World | None = None) -> Engine:
    """An engine around `small_policy`; reward k has weight 1 + k."""
    terms = [(f"reward_{k}", function, 1.0 + k) for k, function in enumerate(functions or (brightness,))]
    engine = Engine(config, small_policy(config, seed), Rewards(terms), world)
    if config.policy.weights == "lora":  # lora_B starts at 0, where every gradient of lora_A is 0 as well
        move_adapter(engine)
    return engine


def move_adapter(engine: Engine) -> None:
    """Give lora_B values, as after some updates."""
    generator = torch.Generator().manual_seed(1)
    parameters = engine.backend.full_parameters()
    moved = {
        name: 0.1 * torch.randn(p.shape, generator=generator) if "lora_B" in name else p.clone()
        for name, p in sorted(parameters.items())
    }
    engine.backend.load_parameters(moved)


def hand_advantages(engine: Engine, rewards: np.ndarray) -> np.ndarray:
    """The reference's advantages [P, M] of reward terms [P, M, K]."""
    return advantages_by_hand(rewards, engine.config.algorithm.advantage, engine.rewards.weights)


def reference_of(engine: Engine, groups: list[Group], advantages: np.ndarray, *, off_policy: bool = False) -> Tensor:
    """The float64 reference at the engine's parameters and its stored steps, flat in the order of its parameters."""
    steps = [
        StoredStep(
            slot=slot,
            prompt=trajectory.prompt,
            generation=generation,
            sigma=step.timestep.sigma,
            sigma_next=step.timestep.sigma_next,
            latents=step.latents[row : row + 1],
            next_latents=step.next_latents[row : row + 1],
            old_log_prob=float(step.log_prob_B[row]),
        )
        for slot, group in enumerate(groups)
        for trajectory in group.trajectories
        for row, generation in enumerate(trajectory.generations)
        for step in trajectory.selected
    ]
    parameters = engine.backend.full_parameters()
    policy = float64_policy(small_policy(engine.config), parameters, DTYPES[engine.config.precision])
    gradients = reference_gradient(policy, engine.config, steps, advantages, off_policy=off_policy).gradients
    return torch.cat([gradients[name].flatten() for name in parameters])
