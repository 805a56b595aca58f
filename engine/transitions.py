"""One denoising step of each sampler as a pure function, and the log-probability of such a step.

Conventions. sigma in [0, 1]; x = (1 - sigma) x0 + sigma noise; the network predicts the velocity
v = noise - x0 (DDIM: the noise eps); sigma_next < sigma. Latents are [B, ...]. A stochastic step
returns (mean, std) of the Gaussian that the next latent is drawn from: mean + std * z.

- Sigmas (alpha_bars) are Python floats, 0-d tensors, or [B] tensors, one value per sample. Floats
  are checked for order; tensors are not, since reading one would wait for the device.
- mean is float64 if an input latent is float64, else float32, whatever the sigmas are.
- std is a Python float if all sigmas are; otherwise a tensor of mean's dtype, 0-d or [B, 1, ...].
- Gradients flow through v (eps) only: x is detached, so no graph crosses a step.

The sigma schedules live in engine/sigmas.py and are exported from here too.
"""

import math
from typing import TypeAlias

import torch
from torch import Tensor

from leangrpo.engine.sigmas import (
    flux_sigmas,
    mixgrpo_flash_sigmas,
    sd3_sigmas,
    shifted_linear_sigmas,
    unipc_sigmas,
)

__all__ = [
    "Sigma", "cps", "cps_log_prob", "dance_sde", "ddim", "dpmpp_2m", "euler", "flow_sde",
    "flux_sigmas", "gaussian_log_prob", "mixgrpo_flash_sigmas", "sd3_sigmas",
    "shifted_linear_sigmas", "unipc_sigmas", "wan_sde",
]  # fmt: skip

Sigma: TypeAlias = float | Tensor

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


# ---- stochastic steps: (mean, std) ------------------------------------------------------------


def flow_sde(
    x: Tensor, v: Tensor, sigma: Sigma, sigma_next: Sigma, *, eta: float, sigma_at_one: Sigma
) -> tuple[Tensor, Sigma]:
    """Flow-GRPO's SDE step (flow_grpo: sde_step_with_logprob, sde_type "sde").

    g = eta sqrt(sigma / (1 - sigma)); where sigma is exactly 1, sigma_at_one (the schedule's
    second entry) stands in the denominator, which makes std there eta.
    """
    _check_eta(eta)
    x, v = _widen(x, v)
    sigma, sigma_next, at_one = _align(x, sigma, sigma_next, sigma_at_one)
    _check_falling("sigma_next < sigma", sigma, sigma_next)
    if isinstance(sigma, Tensor):
        finite: Sigma = torch.where(sigma == 1, at_one, sigma)
    else:
        finite = at_one if sigma == 1 else sigma
    return _sde_step(x, v, sigma, sigma_next, eta * _sqrt(sigma / (1 - finite)))


def dance_sde(x: Tensor, v: Tensor, sigma: Sigma, sigma_next: Sigma, *, eta: float) -> tuple[Tensor, Sigma]:
    """DanceGRPO's SDE step (DanceGRPO: flux_step): noise of constant rate, g = eta.

    Its score form, x + d v - eta^2 d score / 2, is the mean of `flow_sde` for that g.
    """
    _check_eta(eta)
    x, v = _widen(x, v)
    sigma, sigma_next = _align(x, sigma, sigma_next)
    _check_falling("sigma_next < sigma", sigma, sigma_next)
    return _sde_step(x, v, sigma, sigma_next, eta)


def wan_sde(x: Tensor, v: Tensor, sigma: Sigma, sigma_next: Sigma, *, sigma_scale: Sigma) -> tuple[Tensor, Sigma]:
    """Wan's SDE step in flow_grpo: g = sigma_scale * sigma, sigma_scale the schedule's second."""
    x, v = _widen(x, v)
    sigma, sigma_next, scale = _align(x, sigma, sigma_next, sigma_scale)
    _check_falling("sigma_next < sigma", sigma, sigma_next)
    return _sde_step(x, v, sigma, sigma_next, scale * sigma)


def cps(x: Tensor, v: Tensor, sigma: Sigma, sigma_next: Sigma, *, eta: float) -> tuple[Tensor, Sigma]:
    """Coefficients-preserving step (flow_grpo, sde_type "cps"): x keeps its noise level exactly.

    std = sigma_next sin(eta pi / 2), 0 <= eta <= 1; the predicted noise keeps the rest of
    sigma_next^2. eta = 0 is Euler. std is 0 on the final step. Scored by `cps_log_prob`.
    """
    _check_eta(eta, upper=1.0)
    x, v = _widen(x, v)
    sigma, sigma_next = _align(x, sigma, sigma_next)
    _check_falling("sigma_next < sigma", sigma, sigma_next)
    # sqrt(sigma_next^2 - std^2) without the cancellation under the root.
    kept = sigma_next * math.cos(eta * math.pi / 2)
    std = sigma_next * math.sin(eta * math.pi / 2)
    image = x - _like(sigma, x) * v
    noise = x + _like(1 - sigma, x) * v
    return _like(1 - sigma_next, x) * image + _like(kept, x) * noise, _like(std, x)


def ddim(x: Tensor, eps: Tensor, alpha_bar: Sigma, alpha_bar_next: Sigma, *, eta: float) -> tuple[Tensor, Sigma]:
    """DDIM step with noise (DDIM paper, eq. 12 and 16; ddpo-pytorch), 0 <= eta <= 1.

    alpha_bar, alpha_bar_next: cumulative alphas at this timestep and the next, less noisy one
    (0 < alpha_bar < alpha_bar_next <= 1; DDPO ends at the table's first entry, not at 1).
    """
    _check_eta(eta, upper=1.0)
    x, eps = _widen(x, eps)
    a, a_next = _align(x, alpha_bar, alpha_bar_next)
    _check_falling("alpha_bar < alpha_bar_next", a_next, a)
    std = eta * _sqrt((1 - a_next) / (1 - a) * (1 - a / a_next))
    # sqrt(1 - a_next - std^2) as a sum of non-negative terms: rounding cannot make it negative.
    share = (1 - eta**2) + eta**2 * a * (1 - a_next) / (a_next * (1 - a))
    image = (x - _like(_sqrt(1 - a), x) * eps) / _like(_sqrt(a), x)
    mean = _like(_sqrt(a_next), x) * image + _like(_sqrt((1 - a_next) * share), x) * eps
    return mean, _like(std, x)


# ---- deterministic steps: x_next ---------------------------------------------------------------


def euler(x: Tensor, v: Tensor, sigma: Sigma, sigma_next: Sigma) -> Tensor:
    """Euler step of the probability-flow ODE: x + (sigma_next - sigma) v."""
    x, v = _widen(x, v)
    sigma, sigma_next = _align(x, sigma, sigma_next)
    return x + _like(sigma_next - sigma, x) * v


def dpmpp_2m(
    x: Tensor,
    m0: Tensor,
    m1: Tensor | None,
    sigma_prev: Sigma | None,
    sigma: Sigma,
    sigma_next: Sigma,
) -> Tensor:
    """DPM-Solver++(2M) step (algorithm 2 of that paper, midpoint form; MixGRPO-Flash's tail).

    m0, m1: predictions of x0 at sigma and at the step before it, sigma_prev (SDE steps count).
    First order, which is Euler, without m1, and wherever lambda = ln((1 - sigma) / sigma) is
    infinite: on the final step (sigma_next = 0) and after sigma_prev = 1.
    """
    x, m0 = _widen(x, m0)
    now, then = _align(x, sigma, sigma_next)
    _check_falling("sigma_next < sigma", now, then)
    kept = then / now  # and -(1 - then)(exp(-h) - 1) is 1 - kept: no logarithm that may diverge
    if m1 is not None and sigma_prev is not None:
        m0 = m0 + _like(_extrapolation(x, sigma_prev, sigma, sigma_next), x) * (m0 - m1)
    return _like(kept, x) * x + _like(1 - kept, x) * m0


def _extrapolation(x: Tensor, sigma_prev: Sigma, sigma: Sigma, sigma_next: Sigma) -> Tensor:
    """h / (2 h0), the weight of m0 - m1 in the second-order step; 0 where it has no limit."""
    _check_falling("sigma < sigma_prev", sigma_prev, sigma)
    prev, now, then = (_to_tensor(value, x) for value in (sigma_prev, sigma, sigma_next))
    lambda_prev, lambda_now, lambda_then = (torch.log((1 - s) / s) for s in (prev, now, then))
    weight = (lambda_then - lambda_now) / (2 * (lambda_now - lambda_prev))
    return torch.where(then == 0, 0.0, weight)


# ---- log-probabilities --------------------------------------------------------------------------


def gaussian_log_prob(x_next: Tensor, mean: Tensor, std: Sigma) -> Tensor:
    """Log-density of x_next under N(mean, std), averaged over all but the batch dimension: [B].

    x_next must be the latent as stored for the next step, after any rounding. It is a sample, not
    a function of the parameters, and is detached here; the gradient flows through mean.

    ValueError: std is not positive. Costs no wait for the device when std is a Python float.
    """
    x_next, mean = _widen(x_next, mean)
    (std,) = _align(mean, std)
    has_noise = bool((std > 0).all()) if isinstance(std, Tensor) else std > 0
    if not has_noise:
        raise ValueError(
            f"std={std}: a step without noise has no log-probability; leave it out of the "
            "selected steps or give it noise (eta > 0)"
        )
    std = _like(std, mean)
    log_std = torch.log(std) if isinstance(std, Tensor) else math.log(std)
    return _mean_per_sample(-(((x_next - mean) / std) ** 2) / 2 - log_std - _HALF_LOG_2PI)


def cps_log_prob(x_next: Tensor, mean: Tensor) -> Tensor:
    """flow_grpo's score of a CPS step: -(x_next - mean)^2, averaged as above: [B].

    Not a density: the scale 1 / (2 std^2) and the normaliser are left out, so it exists at
    std = 0 as well (where it is 0, with no gradient). x_next is detached.
    """
    x_next, mean = _widen(x_next, mean)
    return _mean_per_sample(-((x_next - mean) ** 2))


# ---- shared pieces ------------------------------------------------------------------------------


def _sde_step(x: Tensor, v: Tensor, sigma: Sigma, sigma_next: Sigma, g: Sigma) -> tuple[Tensor, Sigma]:
    """Euler-Maruyama on dx = [v + g^2 (x + (1 - sigma) v) / (2 sigma)] dt + g dw: (mean, std)."""
    d = sigma_next - sigma
    drift = g * g * d / (2 * sigma)
    mean = _like(1 + drift, x) * x + _like(d + drift * (1 - sigma), x) * v
    return mean, _like(g * _sqrt(-d), x)


def _widen(sample: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
    """Both in their common dtype, float32 at least; sample without its graph."""
    assert sample.shape == predicted.shape, (sample.shape, predicted.shape)
    common = torch.promote_types(sample.dtype, predicted.dtype)
    dtype = torch.promote_types(common, torch.float32)
    return sample.detach().to(dtype), predicted.to(dtype)


def _align(x: Tensor, *values: Sigma) -> tuple[Sigma, ...]:
    """All floats, or (if one is a tensor) all tensors that broadcast against x."""
    if any(isinstance(value, Tensor) for value in values):
        return tuple(_to_tensor(value, x) for value in values)
    return values


def _to_tensor(value: Sigma, x: Tensor) -> Tensor:
    # Its own precision, not x's: 1 - sigma loses four digits in float32 near sigma = 1.
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float64)
    value = value.to(torch.promote_types(value.dtype, torch.float32))
    if value.ndim == 0:
        return value  # stays where it is: a 0-d CPU tensor combines with any device
    if value.shape[0] not in (1, x.shape[0]) or value.numel() != value.shape[0]:
        raise ValueError(
            f"sigma (or std) of shape {tuple(value.shape)} for latents of shape {tuple(x.shape)}: "
            f"pass one value, or one per sample ([{x.shape[0]}])"
        )
    return value.to(x.device).reshape(-1, *[1] * (x.ndim - 1))


def _like(value: Sigma, x: Tensor) -> Sigma:
    return value.to(x.dtype) if isinstance(value, Tensor) else value


def _sqrt(value: Sigma) -> Sigma:
    return torch.sqrt(value) if isinstance(value, Tensor) else math.sqrt(value)


def _mean_per_sample(values: Tensor) -> Tensor:
    return values.reshape(values.shape[0], -1).mean(dim=1)


def _check_eta(eta: float, upper: float = math.inf) -> None:
    if not 0 <= eta <= upper:
        raise ValueError(f"eta={eta}: must lie in [0, {upper}]; 0 is the step without noise")


def _check_falling(rule: str, high: Sigma, low: Sigma) -> None:
    """0 <= low < high <= 1, for floats only."""
    if isinstance(high, Tensor) or isinstance(low, Tensor):
        return
    if not 0 <= low < high <= 1:
        raise ValueError(f"{low} and {high}: {rule} within [0, 1] is needed; is the order right?")
