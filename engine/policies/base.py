"""What the engine needs of a model family, and the one rollout that all families and schedules share."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leangrpo.configs.schema import SamplerConfig
from leangrpo.engine import transitions
from leangrpo.engine.noise import INITIAL_LATENTS, Noise
from leangrpo.engine.types import DenoisingStep, Gaussian, Timestep, Trajectory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class NonFiniteLogProbError(FloatingPointError):
    """A log-probability is NaN or infinite; the message names prompt, generation and denoising step."""


class PolicyAdapter(ABC):
    """A model family. `module` is what is trained; everything else about the family stays behind these methods."""

    module: nn.Module
    latent_shape: tuple[int, ...]
    timesteps: tuple[Timestep, ...]
    """of a training rollout"""
    device: torch.device
    dtype: torch.dtype
    """of the computation inside `module`; parameters may be stored in another"""
    blocks: list[nn.Module]
    """the repeated blocks of `module`, the units of sharding and of activation checkpointing"""
    base: nn.Module | None
    """frozen copy of `module` for the KL term, where the family needs one"""
    base_blocks: list[nn.Module]
    """the blocks of `base`"""

    @abstractmethod
    def to(self, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        """Move or cast the modules that `transition` runs, in place."""

    @abstractmethod
    def save(self, directory: Path, parameters: dict[str, Tensor]) -> None:
        """Export the whole trainable `parameters` (by name) in the family's own file format."""

    @abstractmethod
    def make_timesteps(self, denoising_steps: int) -> tuple[Timestep, ...]:
        """The family's schedule with that many steps, ending at sigma 0."""

    @abstractmethod
    def encode(self, prompt: str, batch: int) -> Any:
        """Conditioning of `batch` samples of one prompt; called without grad."""

    @abstractmethod
    def transition(self, latents: Tensor, timestep: Timestep, conditioning: Any, *, stochastic: bool) -> Gaussian:
        """The Gaussian of the next latents [B, *D], with the graph of the module where grad is enabled."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Images, uint8 [B, C, H, W]; called without grad."""

    @abstractmethod
    def reference(self) -> AbstractContextManager[None]:
        """Inside, `transition` is that of the frozen base policy (for the KL term)."""


class FlowMatchingPolicy(PolicyAdapter):
    """A policy that predicts the velocity eps - x0 at sigma; its Gaussian follows from the sampler's settings."""

    sampler: SamplerConfig

    @abstractmethod
    def velocity(self, latents: Tensor, sigma: float, conditioning: Any) -> Tensor:
        """Predicted velocity, float32 [B, *D]."""

    def transition(self, latents: Tensor, timestep: Timestep, conditioning: Any, *, stochastic: bool) -> Gaussian:
        sigma, sigma_next = timestep.sigma, timestep.sigma_next
        velocity = self.velocity(latents, sigma, conditioning)
        if not stochastic:
            return Gaussian(transitions.euler(latents, velocity, sigma, sigma_next), std=0.0, kl_std=0.0)
        eta = self.sampler.eta
        if self.sampler.transition == "cps":
            mean, std = transitions.cps(latents, velocity, sigma, sigma_next, eta=eta)
            return Gaussian(mean, float(std), kl_std=float(std), is_density=False)
        if self.sampler.transition == "dance_sde":
            mean, std = transitions.dance_sde(latents, velocity, sigma, sigma_next, eta=eta)
        else:
            mean, std = transitions.flow_sde(
                latents, velocity, sigma, sigma_next, eta=eta, sigma_at_one=self.timesteps[0].sigma_next
            )
        return Gaussian(mean, float(std), kl_std=float(std) / (sigma - sigma_next) ** 0.5)


def timesteps_of(sigmas: Tensor) -> tuple[Timestep, ...]:
    """The T intervals of `sigmas` [T + 1]."""
    pairs = itertools.pairwise(sigmas.tolist())
    return tuple(Timestep(index, *pair) for index, pair in enumerate(pairs))


def keep(step: DenoisingStep) -> DenoisingStep:
    """The default of `on_step`: store the step as it is."""
    return step


def sample_trajectory(
    policy: PolicyAdapter,
    prompt: str,
    noise: Noise,
    selected: frozenset[int],
    *,
    unselected_stochastic: bool = True,
    on_step: Callable[[DenoisingStep], DenoisingStep] = keep,
) -> Trajectory:
    """Denoise `len(noise.generations)` samples of `prompt` together.

    With grad enabled, the selected steps carry a graph, which `on_step` may use and release; the latents handed from
    step to step never do. Unselected steps are always without grad. Raises NonFiniteLogProbError.
    """
    with torch.no_grad():
        conditioning = policy.encode(prompt, len(noise.generations))
    latents = noise.draw(INITIAL_LATENTS, policy.latent_shape).to(policy.device)
    steps = []
    for timestep in policy.timesteps:
        is_selected = timestep.index in selected
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_selected):
            transition = policy.transition(
                latents, timestep, conditioning, stochastic=is_selected or unselected_stochastic
            )
            step_noise = noise.draw(timestep.index, policy.latent_shape).to(policy.device)
            next_latents = transition.sample(step_noise).detach()
            if is_selected:
                log_prob_B = transition.log_prob(next_latents)
                _refuse_non_finite(log_prob_B, prompt, noise.generations, timestep)
                step = DenoisingStep(conditioning, timestep, latents, next_latents, log_prob_B, transition)
                steps.append(on_step(step))
        latents = next_latents
    with torch.no_grad():
        samples = policy.decode(latents)
    return Trajectory(prompt, noise.generations, steps, samples)


def _refuse_non_finite(log_prob_B: Tensor, prompt: str, generations: tuple[int, ...], timestep: Timestep) -> None:
    finite_B = log_prob_B.detach().isfinite()
    if not finite_B.all():
        bad = generations[int(finite_B.logical_not().nonzero()[0])]
        raise NonFiniteLogProbError(
            f"log-probability of prompt {prompt!r}, generation {bad}, denoising step {timestep.index} "
            f"(sigma {timestep.sigma:.4g}) is not finite: the policy diverged; lower optimizer.learning_rate, or "
            "set precision=float32"
        )
