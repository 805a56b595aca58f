"""Read this first: what flows through one optimizer update, in the order in which it appears.

Shape suffixes: B samples of one forward, G the generations of one prompt (the group), K reward terms, D latent dims.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from leangrpo.engine import transitions


@dataclass(frozen=True)
class Timestep:
    """One interval of the sigma schedule, from `sigma` (more noise) to `sigma_next`."""

    index: int
    sigma: float
    sigma_next: float


@dataclass(frozen=True)
class Gaussian:
    """The policy's distribution over the next latents, N(mean_theta, std).

    `mean` [B, *D] carries the graph. `kl_std` is what the "flow_grpo" form of the KL divides by (std without dt).
    With `std` 0 the step is deterministic and has no log-probability.
    """

    mean: Tensor
    std: float
    kl_std: float
    is_density: bool = True

    def sample(self, noise: Tensor) -> Tensor:
        """Next latents [B, *D] for standard normal `noise` of that shape."""
        return self.mean + self.std * noise if self.std > 0 else self.mean

    def log_prob(self, next_latents: Tensor) -> Tensor:
        """log_prob_B of `next_latents`, the mean over the latent dims. CPS uses its own, unnormalised score."""
        if self.is_density:
            return transitions.gaussian_log_prob(next_latents, self.mean, self.std)
        return transitions.cps_log_prob(next_latents, self.mean)


@dataclass
class DenoisingStep:
    """A selected step of a trajectory. `transition` holds the graph while a schedule still needs it."""

    conditioning: object
    timestep: Timestep
    latents: Tensor
    next_latents: Tensor
    log_prob_B: Tensor
    transition: Gaussian | None
    reference_mean: Tensor | None = None

    def release(self) -> None:
        """Let go of the graph; latents and the value of log_prob_B stay."""
        self.log_prob_B, self.transition = self.log_prob_B.detach(), None


@dataclass
class Trajectory:
    """`B` generations of one prompt that were sampled together, with their selected steps."""

    prompt: str
    generations: tuple[int, ...]
    selected: list[DenoisingStep]
    samples: Tensor
    """uint8 [B, C, H, W]: what a PNG of it holds and what the reward sees"""
    terms_BK: Tensor = field(default_factory=lambda: torch.empty(0))
    """reward terms that are normalised separately, float64 on the CPU; filled in when they are known"""


@dataclass(frozen=True)
class StepMetrics:
    """What one `Engine.train_step` reports. Rewards are the weighted sum of the reward terms."""

    reward_mean: float
    reward_std: float
    reward_terms: dict[str, float]
    """mean of each reward term, unweighted"""
    grad_norm: float
    """before clipping, of the first optimizer step"""
    dropped_samples: int
    """samples whose reward was not finite"""
    flat_groups: int
    """groups whose rewards are all equal: no gradient"""
    clamped_samples: int
    ratio_deviation: float
    """max |ratio - 1| of recomputed log-probabilities; 0 by construction where the rollout is the update"""
    clip_fraction: float
    """of the off-policy updates (updates_per_rollout > 1)"""
    kl: float
    samples: int
