"""Sigma schedules: the noise levels a sampler visits, from 1 (pure noise) down to 0 (image).

Every function returns a float64 tensor on the CPU that falls strictly from its first entry to
exactly 0: T + 1 entries for T denoising steps (MixGRPO-Flash: see there). Entry i and entry i + 1
are `sigma` and `sigma_next` of step i in engine/transitions.py. Where a schedule starts at pure
noise its first entry is exactly 1.0, which `flow_sde` tests for.

ValueError: an argument out of range.
"""

import math

import torch
from torch import Tensor

_TRAIN_STEPS = 1000  # length of the training table of SD3, FLUX and Wan


def _shift(u: Tensor, k: float) -> Tensor:
    """k u / (1 + (k - 1) u), the time shift of flow matching (SD3 paper, section 5.3.2)."""
    # Written with 1 - u so that u = 1 gives 1.0 for every k: 1 + (k - 1) may miss k by an ulp,
    # and flow_sde divides by 1 - sigma unless sigma is exactly 1.
    return k * u / (k * u + (1.0 - u))


def _linspace(start: float, end: float, points: int) -> Tensor:
    return torch.linspace(start, end, points, dtype=torch.float64)


def _with_zero(sigmas: Tensor) -> Tensor:
    return torch.cat([sigmas, sigmas.new_zeros(1)])


def _check(T: int, shift: float) -> None:
    if T < 1:
        raise ValueError(f"T={T}: a schedule needs at least one denoising step")
    if not (shift > 0 and math.isfinite(shift)):
        raise ValueError(f"shift={shift}: must be positive and finite; 1.0 leaves the grid uniform")


def sd3_sigmas(T: int, shift: float) -> Tensor:
    """SD3.5 as sampled by flow_grpo: diffusers' FlowMatchEulerDiscreteScheduler, static shift.

    The shift acts twice, as in diffusers: the smallest sigma is read off the shifted training
    table, then the grid between 1 and it is shifted again. Released weights use shift 3.
    """
    _check(T, shift)
    smallest = _shift(torch.tensor(1.0 / _TRAIN_STEPS, dtype=torch.float64), shift).item()
    return _with_zero(_shift(_linspace(1.0, smallest, T), shift))


def flux_sigmas(T: int, tokens: int) -> Tensor:
    """FLUX.1 (flow_grpo, diffusers' FluxPipeline): exponential shift that grows with the image.

    tokens: image tokens the transformer sees, 1024 at 512 px and 4096 at 1024 px.
    """
    _check(T, 1.0)
    if tokens < 1:
        raise ValueError(f"tokens={tokens}: an image has at least one token (1024 at 512 px)")
    mu = 0.5 + (tokens - 256) * (0.65 / 3840)
    return _with_zero(_shift(_linspace(1.0, 1.0 / T, T), math.exp(mu)))


def shifted_linear_sigmas(T: int, shift: float) -> Tensor:
    """DanceGRPO and MixGRPO (sd3_time_shift): a uniform grid from 1 to 0, shifted once."""
    _check(T, shift)
    return _shift(_linspace(1.0, 0.0, T + 1), shift)


def unipc_sigmas(T: int, shift: float) -> Tensor:
    """Wan in flow_grpo: flow sigmas of diffusers' UniPC as of that recipe; shift 3 at 480p.

    Starts a little below 1. diffusers 0.42 computes this grid in DPMSolverMultistepScheduler
    still; its UniPCMultistepScheduler has since moved to a grid that starts at 1 - 1e-6.
    """
    _check(T, shift)
    return _shift(_linspace(1.0 - 1.0 / _TRAIN_STEPS, 0.0, T + 1), shift)


def mixgrpo_flash_sigmas(T: int, last: int, ratio: float, shift: float) -> Tensor:
    """MixGRPO-Flash: the shifted linear schedule with a thinned tail after the last SDE step.

    last: index of the last SDE step, 0 <= last < T; ratio: share of the T - last remaining points
    that is kept, in (0, 1]; 1 returns the full schedule. Shape: [last + 1 + n] with
    n = int(max((T - last) ratio, 1)), hence last + n steps.

    A tail of one point (n = 1) is 0, so the SDE step `last` itself ends the trajectory. (MixGRPO's
    code leaves that point above 0, and the image is never fully denoised.)
    """
    _check(T, shift)
    if not 0 <= last < T:
        raise ValueError(f"last={last}: the last SDE step must be one of the {T} steps 0..{T - 1}")
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio={ratio}: must lie in (0, 1]; 1 keeps every step of the tail")
    grid = _linspace(1.0, 0.0, T + 1)
    points = int(max((T - last) * ratio, 1))
    start = grid[last + 1].item() if points > 1 else 0.0
    return _shift(torch.cat([grid[: last + 1], _linspace(start, 0.0, points)]), shift)
