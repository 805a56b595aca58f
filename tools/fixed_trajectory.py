"""One trajectory for many engines: the first one records its latents and rewards, all others are led along them.

Noise is a function of (seed, update, prompt, generation, step) alone, so the noise of a transition names it, whatever
the schedule, the batch, the backend or the number of ranks.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from leangrpo.engine.noise import INITIAL_LATENTS, Noise, generator_for
from leangrpo.engine.trainer import Engine
from leangrpo.engine.types import Gaussian, Timestep
from leangrpo.tools.float64_reference import StoredStep

DISTANCE = 0.01
"""standard deviation of what is added to every trainable parameter: a new adapter's B is 0, and so is A's gradient"""


@dataclass(frozen=True)
class _Led(Gaussian):
    """A transition whose sample was decided when its noise was first used."""

    next_latents: dict[str, Tensor] = field(default_factory=dict)

    def sample(self, noise: Tensor) -> Tensor:
        own = super().sample(noise).detach()
        for one, latents in zip(noise, own, strict=True):
            self.next_latents.setdefault(_key(one), latents.cpu())
        return torch.stack([self.next_latents[_key(one)] for one in noise]).to(own.device)


@dataclass(frozen=True)
class FixedTrajectory:
    """Parameters, next latents by noise, reward terms [K] by prompt and image; all float32 or float64 on the CPU."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    next_latents: dict[str, Tensor] = field(default_factory=dict)
    rewards: dict[str, Tensor] = field(default_factory=dict)

    def lead(self, engine: Engine) -> None:
        """Make `engine` start from these parameters and follow; what is not there yet is taken from it. Collective."""
        if not self.parameters:
            for name, parameter in engine.backend.full_parameters().items():
                generator = generator_for("fixed trajectory", engine.config.seed, name)
                noise = torch.randn(parameter.shape, generator=generator)
                self.parameters[name] = parameter.cpu() + DISTANCE * noise
        engine.backend.load_parameters(self.parameters)
        policy, own_transition, own_rewards = engine.policy, engine.policy.transition, engine.rewards.or_nan

        def transition(latents: Tensor, timestep: Timestep, conditioning: object, *, stochastic: bool) -> Gaussian:
            g = own_transition(latents, timestep, conditioning, stochastic=stochastic)
            return _Led(g.mean, g.std, g.kl_std, g.is_density, self.next_latents)

        def rewards(images: Tensor, prompts: list[str]) -> Tensor:
            keys = [_key(image, prompt) for image, prompt in zip(images, prompts, strict=True)]
            for index, key in enumerate(keys):
                if key not in self.rewards:
                    self.rewards[key] = own_rewards(images[index : index + 1], prompts[index : index + 1])[0]
            return torch.stack([self.rewards[key] for key in keys])

        policy.transition = transition  # type: ignore[method-assign]
        engine.rewards.or_nan = rewards  # type: ignore[method-assign]

    def stored_steps(self, engine: Engine, prompts: Sequence[str]) -> tuple[list[StoredStep], np.ndarray]:
        """The selected steps of the first update, and its rewards [P, M, K]; `engine` says shapes and sigmas."""
        policy, config = engine.policy, engine.config
        timesteps = policy.timesteps
        selected = engine.algorithm.select(len(timesteps), generator_for("selected steps", config.seed, 0))
        steps, rewards = [], []
        for slot, prompt in enumerate(prompts):
            for generation in range(config.group_size):
                noise = Noise(config.seed, 0, slot, (generation,))
                latents = noise.draw(INITIAL_LATENTS, policy.latent_shape)
                for timestep in timesteps:
                    next_latents = self.next_latents[_key(noise.draw(timestep.index, policy.latent_shape)[0])][None]
                    if timestep.index in selected:
                        sigmas = timestep.sigma, timestep.sigma_next
                        steps.append(StoredStep(slot, prompt, generation, *sigmas, latents, next_latents))
                    latents = next_latents
                rewards.append(self.rewards[_key(policy.decode(latents)[0], prompt)].numpy())
        return steps, np.stack(rewards).reshape(len(prompts), config.group_size, -1)

    def save(self, path: Path) -> None:
        """One safetensors file."""
        save_file({f"{kind} {key}": value.contiguous() for kind, key, value in self._entries()}, path)

    @classmethod
    def load(cls, path: Path) -> "FixedTrajectory":
        """What `save` wrote."""
        loaded = cls()
        for name, value in load_file(path).items():
            kind, key = name.split(" ", 1)
            getattr(loaded, kind)[key] = value
        return loaded

    def _entries(self) -> Iterator[tuple[str, str, Tensor]]:
        for kind in ("parameters", "next_latents", "rewards"):
            yield from ((kind, key, value) for key, value in getattr(self, kind).items())


def _key(values: Tensor, prompt: str = "") -> str:
    """A digest of the bytes of `values`."""
    return hashlib.blake2b(prompt.encode() + values.cpu().numpy().tobytes(), digest_size=16).hexdigest()
