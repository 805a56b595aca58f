"""The gradient of one update, once more and independently: float64, one sample at a time, one backward at the end.

Takes from the engine only what is data (stored latents, rewards, weights); formulas are written out here again.
"""

import math

import numpy as np
import torch
from small import small_policy
from torch import Tensor

from leangrpo.engine.schedules import Group
from leangrpo.engine.trainer import Engine


def advantages_by_hand(rewards: np.ndarray, engine: Engine) -> np.ndarray:
    """Advantages [P, M] of reward terms [P, M, K], NaN rewards giving 0."""
    rule = engine.config.algorithm.advantage
    weights = np.array(engine.rewards.weights)
    if rule.normalise == "sum":
        rewards, weights = (rewards @ weights)[:, :, None], np.ones(1)
    result = np.zeros(rewards.shape[:2])
    usable = np.isfinite(rewards).all(axis=2)
    for k, weight in enumerate(weights):
        everything = np.concatenate([rewards[p, usable[p], k] for p in range(len(rewards))])
        for p in range(len(rewards)):
            group = rewards[p, usable[p], k]
            if len(group) == 0 or group.max() == group.min():
                continue
            std = (everything if rule.std == "global" else group).std(ddof=rule.ddof)
            result[p, usable[p]] += weight * (group - group.mean()) / (std + rule.epsilon)
    return np.clip(result, -rule.clamp, rule.clamp)


def reference_gradient(
    engine: Engine, groups: list[Group], advantages: np.ndarray, *, off_policy: bool = False
) -> Tensor:
    """Flat float64 gradient of the loss with `advantages` [P, M], trainable parameters in their order.

    On-policy it is that of -A log_prob; `off_policy`, of max(-A rho, -A clip(rho)) against the stored log_prob.
    """
    config = engine.config
    policy = small_policy(config)
    policy.module.load_state_dict(engine.policy.module.state_dict())
    policy.text_encoder.load_state_dict(engine.policy.text_encoder.state_dict())  # type: ignore[attr-defined]
    if policy.base is not None:
        policy.base.load_state_dict(engine.policy.base.state_dict())  # type: ignore[attr-defined]
    policy.to(dtype=torch.float64)
    parameters = [p for p in policy.module.parameters() if p.requires_grad]
    loss = torch.zeros((), dtype=torch.float64)
    for p, group in enumerate(groups):
        for trajectory in group.trajectories:
            for row, generation in enumerate(trajectory.generations):
                for step in trajectory.selected:
                    tokens, pooled = policy.encode(trajectory.prompt, 1)
                    x, x_next = step.latents[row : row + 1].double(), step.next_latents[row : row + 1].double()
                    sigma, d = step.timestep.sigma, step.timestep.sigma_next - step.timestep.sigma
                    mean, std = gaussian(policy, x, sigma, d, (tokens, pooled), config)
                    if config.sampler.transition == "cps":
                        log_prob = -(x_next - mean).square().mean()
                    else:
                        quadratic = (x_next - mean).square() / (2 * std**2)
                        log_prob = (-quadratic - math.log(std) - 0.5 * math.log(2 * math.pi)).mean()
                    advantage = float(advantages[p, generation])
                    if off_policy:
                        ratio = torch.exp(log_prob - step.log_prob_B[row].double())
                        epsilon = config.algorithm.clip_range
                        rho = float(ratio.detach())
                        clipped = min(max(rho, 1 - epsilon), 1 + epsilon)
                        if -advantage * rho >= -advantage * clipped:  # else the clip is active: no gradient
                            loss = loss - advantage * ratio
                    else:
                        loss = loss - advantage * log_prob
                    if config.algorithm.beta > 0:
                        with torch.no_grad(), policy.reference():
                            base_mean, _ = gaussian(policy, x, sigma, d, (tokens, pooled), config)
                        variance = std**2 if config.algorithm.kl_form == "exact" else std**2 / -d
                        loss = loss + config.algorithm.beta * (mean - base_mean).square().mean() / (2 * variance)
    samples = config.algorithm.advantage.best_of_n or config.group_size
    normaliser = config.algorithm.selected_steps * samples * config.prompts_per_update
    gradients = torch.autograd.grad(loss / normaliser, parameters, allow_unused=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, gradients, strict=True)]
    )


def gaussian(policy, x, sigma, d, conditioning, config):  # type: ignore[no-untyped-def]
    """Mean and std of the next latents, from the formulas of the papers."""
    v, eta, sigma_next = policy.velocity(x, sigma, conditioning), config.sampler.eta, sigma + d
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
