"""The gradient of one update, once more and independently: float64, one sample and one denoising step at a time.

What every schedule and backend is held to, by the tests and by tools/compare_schedules.py. From the engine it takes
data only (weights, stored latents, rewards) and the policy's forward; formulas are written out here again.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from leangrpo.configs.schema import AdvantageConfig, Config
from leangrpo.engine.policies.base import FlowMatchingPolicy


@dataclass(frozen=True)
class StoredStep:
    """A selected denoising step of one sample, as a rollout stored it."""

    slot: int
    """place of its prompt in the update"""
    prompt: str
    generation: int
    sigma: float
    sigma_next: float
    latents: Tensor
    """[1, *D], as `next_latents`"""
    next_latents: Tensor
    old_log_prob: float = 0.0
    """of the rollout; used off-policy only"""


@dataclass(frozen=True)
class Reference:
    """A gradient in float64, by parameter, and how much of its terms cancels."""

    gradients: dict[str, Tensor]
    condition: float
    """sum of the norms of its terms, one per sample and step, over the norm of their sum: what a relative rounding
    error of each term becomes, at worst, in the gradient"""


def float64_policy(
    policy: FlowMatchingPolicy, parameters: dict[str, Tensor], rounded_to: torch.dtype
) -> FlowMatchingPolicy:
    """A new float32 `policy` made the function that training differentiates, evaluated in float64.

    Trainable `parameters` (by name) and frozen weights are rounded as the training's forward sees them. Nothing else
    is: constants, inputs and activations are those of float64.
    """
    with torch.no_grad():
        own = dict(policy.module.named_parameters())
        for name, value in parameters.items():
            own[name].copy_(value)
        for root in (policy.module, policy.base):
            for parameter in root.parameters() if root is not None else ():
                parameter.copy_(parameter.to(rounded_to))
    policy.to(dtype=torch.float64)
    return policy


def advantages_by_hand(rewards: np.ndarray, rule: AdvantageConfig, weights: Iterable[float]) -> np.ndarray:
    """Advantages [P, M] of reward terms [P, M, K] with those weights; 0 for NaN rewards and what best-of-n leaves."""
    term_weights = np.array(list(weights))
    if rule.normalise == "sum":
        rewards, term_weights = (rewards @ term_weights)[:, :, None], np.ones(1)
    result = np.zeros(rewards.shape[:2])
    usable = np.isfinite(rewards).all(axis=2)
    for k, weight in enumerate(term_weights):
        everything = np.concatenate([rewards[p, usable[p], k] for p in range(len(rewards))])
        for p in range(len(rewards)):
            group = rewards[p, usable[p], k]
            if len(group) == 0 or group.max() == group.min():
                continue
            std = (everything if rule.std == "global" else group).std(ddof=rule.ddof)
            result[p, usable[p]] += weight * (group - group.mean()) / (std + rule.epsilon)
    if rule.best_of_n is not None:
        for p in range(len(rewards)):
            ranked = np.flatnonzero(usable[p])[np.argsort(rewards[p, usable[p]] @ term_weights, kind="stable")]
            half = rule.best_of_n // 2
            result[p, ranked[half : max(half, len(ranked) - half)]] = 0.0
    return np.clip(result, -rule.clamp, rule.clamp)


def reference_gradient(
    policy: FlowMatchingPolicy,
    config: Config,
    steps: Iterable[StoredStep],
    advantages: np.ndarray,
    *,
    off_policy: bool = False,
) -> Reference:
    """Gradient of the loss with `advantages` [P, M] over `steps`, of each trainable parameter, by name.

    `policy`: from `float64_policy`. On-policy the loss is -A log_prob; `off_policy`, max(-A rho, -A clip(rho)) against
    the stored log-probability.
    """
    samples = config.algorithm.advantage.best_of_n or config.group_size
    normaliser = config.algorithm.selected_steps * samples * config.prompts_per_update
    named = {name: p for name, p in policy.module.named_parameters() if p.requires_grad}
    total, norms = {name: torch.zeros_like(p) for name, p in named.items()}, 0.0
    for step in steps:
        loss = _loss(policy, config, step, float(advantages[step.slot, step.generation]), off_policy)
        if not loss.requires_grad:
            continue
        gradients = torch.autograd.grad(loss / normaliser, list(named.values()), allow_unused=True)
        term = {name: g for name, g in zip(named, gradients, strict=True) if g is not None}
        norms += _norm(term)
        for name, gradient in term.items():
            total[name] += gradient
    return Reference(total, norms / _norm(total) if norms else 1.0)


def _norm(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))


def _loss(policy: FlowMatchingPolicy, config: Config, step: StoredStep, advantage: float, off_policy: bool) -> Tensor:
    """Policy and KL loss of one step of one sample, before the normaliser."""
    x_next, beta = step.next_latents.double(), config.algorithm.beta
    mean, std = _gaussian(policy, step, config)
    if config.sampler.transition == "cps":
        log_prob = -(x_next - mean).square().mean()
    else:
        quadratic = (x_next - mean).square() / (2 * std**2)
        log_prob = (-quadratic - math.log(std) - 0.5 * math.log(2 * math.pi)).mean()
    loss = -advantage * log_prob
    if off_policy:
        ratio = torch.exp(log_prob - step.old_log_prob)
        epsilon = config.algorithm.clip_range
        rho = float(ratio.detach())
        clipped = min(max(rho, 1 - epsilon), 1 + epsilon)
        is_active = -advantage * rho < -advantage * clipped  # then the clip wins, which has no gradient
        loss = torch.zeros((), dtype=torch.float64) if is_active else -advantage * ratio
    if beta > 0:
        with torch.no_grad(), policy.reference():
            base_mean, _ = _gaussian(policy, step, config)
        divisor = std**2 if config.algorithm.kl_form == "exact" else std**2 / (step.sigma - step.sigma_next)
        loss = loss + beta * (mean - base_mean).square().mean() / (2 * divisor)
    return loss


def _gaussian(policy: FlowMatchingPolicy, step: StoredStep, config: Config) -> tuple[Tensor, float]:
    """Mean and std of the next latents, from the formulas of the papers."""
    x, sigma, sigma_next = step.latents.double(), step.sigma, step.sigma_next
    d, eta = sigma_next - sigma, config.sampler.eta
    v = policy.velocity(x, sigma, policy.encode(step.prompt, 1))
    x0, noise = x - sigma * v, x + (1 - sigma) * v
    if config.sampler.transition == "cps":
        std = sigma_next * math.sin(eta * math.pi / 2)
        return (1 - sigma_next) * x0 + math.sqrt(sigma_next**2 - std**2) * noise, std
    if config.sampler.transition == "dance_sde":
        score = -(x - (1 - sigma) * x0) / sigma**2
        return x + d * v - 0.5 * eta**2 * score * d, eta * math.sqrt(-d)
    first_sigma_next = policy.timesteps[0].sigma_next
    g2 = eta**2 * sigma / (1 - (first_sigma_next if sigma == 1 else sigma))
    mean = x * (1 + g2 * d / (2 * sigma)) + v * (1 + g2 * (1 - sigma) / (2 * sigma)) * d
    return mean, math.sqrt(g2 * -d)
