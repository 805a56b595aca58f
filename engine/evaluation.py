"""What a policy draws when it is not exploring: Euler steps without noise, scored by reward and by outsiders."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leangrpo.configs.schema import EvaluationConfig
from leangrpo.engine.noise import INITIAL_LATENTS, Noise
from leangrpo.engine.policies.base import PolicyAdapter
from leangrpo.engine.rewards import Rewards
from leangrpo.engine.rewards.digits import digits_classifier_accuracy, digits_judge_accuracy
from leangrpo.engine.rewards.jpeg import jpeg_bytes

EVALUATION = -1
"""the `update` of evaluation noise: training counts from 0, so it never sees these latents"""


@dataclass(frozen=True)
class Evaluation:
    """Scores of one evaluation, and the images they are about, prompt by prompt (uint8 [n, C, H, W])."""

    scores: dict[str, float]
    images: dict[str, Tensor]


def diversity(images: Tensor) -> float:
    """Standard deviation over the images of one prompt, mean over pixels, of values scaled to [-1, 1]; NaN for one."""
    if len(images) < 2:
        return float("nan")
    return float((images.float() / 127.5 - 1).std(dim=0, correction=0).mean())


def draw(policy: PolicyAdapter, prompt: str, noise: Noise, denoising_steps: int) -> Tensor:
    """Images uint8 [B, C, H, W] by Euler steps from the initial latents of `noise`."""
    with torch.no_grad():
        conditioning = policy.encode(prompt, len(noise.generations))
        latents = noise.draw(INITIAL_LATENTS, policy.latent_shape).to(policy.device)
        for timestep in policy.make_timesteps(denoising_steps):
            latents = policy.transition(latents, timestep, conditioning, stochastic=False).mean
        return policy.decode(latents)


def evaluate(
    policy: PolicyAdapter, rewards: Rewards, prompts: Sequence[str], config: EvaluationConfig, seed: int
) -> Evaluation:
    """Draw `config.samples` images, spread over `prompts` in order, and score them."""
    images: dict[str, Tensor] = {}
    totals: list[Tensor] = []
    metrics: dict[str, list[Tensor]] = {name: [] for name in config.metrics}
    for slot, prompt in enumerate(prompts):
        count = len(range(slot, config.samples, len(prompts)))
        if count == 0:
            break
        noise = Noise(seed, EVALUATION, slot, tuple(range(count)))
        images[prompt] = draw(policy, prompt, noise, config.denoising_steps)
        weights_K = torch.tensor(rewards.weights, dtype=torch.float64)
        totals.append(rewards(images[prompt], [prompt] * count) @ weights_K)
        for name in config.metrics:
            metrics[name].append(METRICS[name](images[prompt], [prompt] * count))
    scores = {"reward": torch.cat(totals).mean().item()}
    scores |= {name: torch.cat(values).mean().item() for name, values in metrics.items()}
    return Evaluation(scores, images)


def _diversity(images: Tensor, prompts: list[str]) -> Tensor:
    return torch.full((len(images),), diversity(images))


METRICS: dict[str, Callable[[Tensor, list[str]], Tensor]] = {
    "accuracy": digits_classifier_accuracy,
    "judge_accuracy": digits_judge_accuracy,
    "diversity": _diversity,
    "jpeg_bytes": lambda images, prompts: jpeg_bytes(images),
}
"""per image of one prompt; the mean over all images is reported"""
