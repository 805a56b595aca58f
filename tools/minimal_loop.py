"""The method in one function, without batching, buffers or options: what `Engine.train_step` does, as a page to read.

The rollout is differentiable. Every selected step goes backward at once, with advantage 1, and its graph is freed; when
the group's rewards are known, each sample's stored gradient is multiplied by its advantage. No forward runs twice.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from leangrpo.engine.noise import INITIAL_LATENTS, Noise
from leangrpo.engine.policies.base import PolicyAdapter


def lean_update(
    policy: PolicyAdapter,
    prompts: Sequence[str],
    reward_fn: Callable[[Tensor, list[str]], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    group_size: int,
    selected: frozenset[int],
    seed: int,
    update: int,
) -> None:
    """One on-policy Flow-GRPO update (group mean and std, no KL) of the parameters that `optimizer` holds."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    total = [torch.zeros_like(p) for p in parameters]
    for slot, prompt in enumerate(prompts):
        gradients_G, rewards_G = [], []
        for generation in range(group_size):
            noise = Noise(seed, update, slot, (generation,))
            conditioning = policy.encode(prompt, 1)
            latents = noise.draw(INITIAL_LATENTS, policy.latent_shape)
            gradient = [torch.zeros_like(p) for p in parameters]
            for step in policy.timesteps:
                with torch.set_grad_enabled(step.index in selected):
                    transition = policy.transition(latents, step, conditioning, stochastic=True)
                    next_latents = transition.sample(noise.draw(step.index, policy.latent_shape)).detach()
                    if step.index in selected:  # backward now, with advantage 1; the graph is gone after this line
                        log_prob = transition.log_prob(next_latents).sum()
                        for g, new in zip(gradient, torch.autograd.grad(log_prob, parameters), strict=True):
                            g.add_(new)
                latents = next_latents
            gradients_G.append(gradient)
            rewards_G.append(float(reward_fn(policy.decode(latents), [prompt])))
        rewards = torch.tensor(rewards_G, dtype=torch.float64)
        advantages_G = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)
        for gradient, advantage in zip(gradients_G, advantages_G.tolist(), strict=True):  # now the advantages are known
            for sum_, g in zip(total, gradient, strict=True):
                sum_.add_(g, alpha=-advantage)
    for p, sum_ in zip(parameters, total, strict=True):
        p.grad = sum_ / (len(prompts) * group_size * len(selected))
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
