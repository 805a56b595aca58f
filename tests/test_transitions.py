"""Transitions and sigma schedules: golden values, exact properties, and independent references.

Golden values are printed with eight decimals, so float64 is held to 1e-7; float32 to 2e-5.
"""

import functools
import math
from collections.abc import Callable

import pytest
import torch
from diffusers.schedulers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from torch import Tensor

from leangrpo.engine import transitions as tr

Step = Callable[[Tensor, Tensor], tuple[Tensor, tr.Sigma]]
PRECISIONS = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-7), (torch.float32, 2e-5)], ids=["f64", "f32"]
)

SD3 = tr.sd3_sigmas(10, 3.0).tolist()
FLUX = tr.flux_sigmas(6, 1024).tolist()
DANCE = tr.shifted_linear_sigmas(16, 3.0).tolist()
MIX = tr.shifted_linear_sigmas(25, 3.0).tolist()
ALPHA_BAR = torch.cumprod(
    1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2, dim=0
).tolist()  # Stable Diffusion, scaled-linear


def _flow(sigmas: list[float], i: int, eta: float) -> Step:
    return lambda x, v: tr.flow_sde(x, v, sigmas[i], sigmas[i + 1], eta=eta, sigma_at_one=sigmas[1])


def _dance(i: int) -> Step:
    return lambda x, v: tr.dance_sde(x, v, DANCE[i], DANCE[i + 1], eta=0.3)


def _ddim(t: int) -> Step:
    return lambda x, eps: tr.ddim(x, eps, ALPHA_BAR[t], ALPHA_BAR[t - 20], eta=1.0)


def _cps(x: Tensor, v: Tensor) -> tuple[Tensor, tr.Sigma]:
    return tr.cps(x, v, FLUX[0], FLUX[1], eta=0.8)


# name: step, then mean, std, next latent and log-probability at x = .5, v (eps) = -.3, z = .7
GOLDEN: dict[str, tuple[Step, float, float, float, float]] = {
    "flow_sd3_0": (_flow(SD3, 0, 0.7), 0.38946121, 0.7, 0.87946121, -0.80726359),
    "flow_sd3_4": (_flow(SD3, 4, 0.7), 0.48247984, 0.39179430, 0.75673585, -0.22692021),
    "flow_flux_0": (_flow(FLUX, 0, 0.9), 0.32637933, 0.9, 0.95637933, -1.05857802),
    "cps_flux_0": (_cps, 0.21664637, 0.85950360, 0.81829889, -0.36198576),
    "dance_0": (_dance(0), 0.50603261, 0.04423259, 0.53699542, 1.95435497),
    "dance_8": (_dance(8), 0.51372500, 0.06708204, 0.56068243, 1.53790041),
    "mixgrpo_10": (_flow(MIX, 10, 0.7), 0.49227487, 0.23818568, 0.65900485, 0.27076620),
    "ddim_981": (_ddim(981), 0.63130658, 0.45446327, 0.94943087, -0.37530036),
    "ddim_501": (_ddim(501), 0.55758454, 0.29478454, 0.76393372, 0.05757203),
}


def _latents(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@PRECISIONS
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_step(name: str, dtype: torch.dtype, tolerance: float) -> None:
    step, *expected = GOLDEN[name]
    mean, std = step(torch.full((1, 2), 0.5, dtype=dtype), torch.full((1, 2), -0.3, dtype=dtype))
    x_next = mean + std * 0.7
    is_cps = name.startswith("cps")
    log_prob = tr.cps_log_prob(x_next, mean) if is_cps else tr.gaussian_log_prob(x_next, mean, std)
    got = [mean[0, 1], torch.as_tensor(std), x_next[0, 1], log_prob[0]]
    assert mean.dtype == log_prob.dtype == dtype
    assert [value.item() for value in got] == pytest.approx(expected, rel=0, abs=tolerance)


def test_golden_noise_rates_follow_from_std() -> None:
    """std = g sqrt(sigma - sigma_next), so the printed g of each Flow-SDE row can be read back."""
    x = torch.zeros(1, 1, dtype=torch.float64)
    rows = [(SD3, 0, 0.7, 3.50567108), (SD3, 4, 0.7, 1.35920287), (FLUX, 0, 0.9, 2.90074522)]
    for sigmas, i, eta, g in [*rows, (MIX, 10, 0.7, 1.48492424)]:
        _, std = _flow(sigmas, i, eta)(x, x)
        assert std / math.sqrt(sigmas[i] - sigmas[i + 1]) == pytest.approx(g, abs=1e-7)


@PRECISIONS
def test_golden_dpmpp(dtype: torch.dtype, tolerance: float) -> None:
    x, m0, m1 = (torch.full((1, 2), value, dtype=dtype) for value in (0.5, 0.59, 0.61))
    sigmas = tr.mixgrpo_flash_sigmas(25, 3, 0.4, 3.0).tolist()[4:7]
    first = tr.dpmpp_2m(x, m0, None, None, sigmas[1], sigmas[2])
    assert first.dtype == dtype
    assert first[0, 0].item() == pytest.approx(0.50681818, abs=tolerance)
    # Second order from the printed h0 and h, in the form with exponentials.
    h0, h = 0.71376647, 0.53899650
    d = 0.59 + (0.59 - 0.61) * h / h0 / 2
    expected = sigmas[2] / sigmas[1] * 0.5 - (1 - sigmas[2]) * (math.exp(-h) - 1) * d
    second = tr.dpmpp_2m(x, m0, m1, *sigmas)
    assert second[0, 0].item() == pytest.approx(expected, abs=tolerance)


# ---- schedules ----------------------------------------------------------------------------------

SCHEDULES = {
    "sd3": (tr.sd3_sigmas(10, 3.0), [
        1, .96012931, .91334895, .85769231, .79036827, .70727848, .60215054, .46487603, .27804878,
        .00892857, 0,
    ]),
    "flux": (tr.flux_sigmas(6, 1024), [
        1, .90373557, .78970484, .65248946, .48421845, .27300333, 0,
    ]),
    "shifted_linear": (tr.shifted_linear_sigmas(16, 3.0), [
        1, .97826087, .95454545, .92857143, .9, .86842105, .83333333, .79411765, .75, .7,
        .64285714, .57692308, .5, .40909091, .3, .16666667, 0,
    ]),
    "unipc_start": (tr.unipc_sigmas(20, 3.0)[:3], [.99966644, .98241952, .9639411]),
    "unipc_end": (tr.unipc_sigmas(20, 3.0)[-3:], [.24979163, .13623966, 0]),
    "flash_head": (tr.mixgrpo_flash_sigmas(25, 3, .4, 3.0)[:4], MIX[:4]),
    "flash_tail": (tr.mixgrpo_flash_sigmas(25, 3, .4, 3.0)[4:], [
        .94029851, .8852459, .81818182, .73469388, .62790698, .48648649, .29032258, 0,
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_golden_schedule(name: str) -> None:
    sigmas, expected = SCHEDULES[name]
    assert sigmas.dtype == torch.float64
    assert sigmas.tolist() == pytest.approx(expected, rel=0, abs=1e-7)


@pytest.mark.parametrize("T", [1, 2, 7, 50])
@pytest.mark.parametrize("shift", [0.3, 1.0, 1.7, 3.0, 12.3])
def test_schedules_fall_strictly_from_exactly_one_to_zero(T: int, shift: float) -> None:
    flux = tr.flux_sigmas(T, int(1000 * shift))
    full = [tr.sd3_sigmas(T, shift), tr.shifted_linear_sigmas(T, shift), flux]
    flash = [tr.mixgrpo_flash_sigmas(T, last, 0.4, shift) for last in range(T)]
    assert all(len(sigmas) == T + 1 for sigmas in [*full, tr.unipc_sigmas(T, shift)])
    for sigmas in [*full, *flash]:
        assert sigmas[0] == 1.0  # exactly: flow_sde branches on it
    for sigmas in [*full, *flash, tr.unipc_sigmas(T, shift)]:
        assert sigmas[-1] == 0.0
        assert (sigmas.diff() < 0).all()


def test_flux_shift_at_1024_px() -> None:
    """4096 image tokens: mu = 1.15, and at sigma's grid point 1/2 the shift is the logistic."""
    middle = tr.flux_sigmas(2, 4096)[1].item()
    assert middle == pytest.approx(1 / (1 + math.exp(-1.15)), abs=1e-12)


def test_mixgrpo_flash_length_and_one_point_tail() -> None:
    assert len(tr.mixgrpo_flash_sigmas(25, 3, 0.4, 3.0)) == 11 + 1  # NFE 11
    full = tr.shifted_linear_sigmas(25, 3.0)
    assert torch.equal(tr.mixgrpo_flash_sigmas(25, 23, 0.4, 3.0)[:-1], full[:24])
    assert tr.mixgrpo_flash_sigmas(25, 23, 0.4, 3.0)[-1] == 0.0
    for last in (0, 3, 24):  # nothing is thinned at ratio 1
        kept = tr.mixgrpo_flash_sigmas(25, last, 1.0, 3.0)
        torch.testing.assert_close(kept, full, rtol=0, atol=1e-14)


# ---- properties of the steps --------------------------------------------------------------------

X, V, C = _latents(3, 2, 4, seed=1), _latents(3, 2, 4, seed=2), _latents(3, 2, 4, seed=3)
HIGH, LOW = [0.95, 0.6, 0.2], [0.8, 0.4, 0.0]  # one (sigma, sigma_next) per sample
STEPS: dict[str, Callable[..., tuple[Tensor, tr.Sigma]]] = {
    "flow_sde": lambda x, v, s, t: tr.flow_sde(x, v, s, t, eta=0.7, sigma_at_one=0.9),
    "cps": lambda x, v, s, t: tr.cps(x, v, s, t, eta=0.8),
    "dance_sde": lambda x, v, s, t: tr.dance_sde(x, v, s, t, eta=0.3),
    "wan_sde": lambda x, v, s, t: tr.wan_sde(x, v, s, t, sigma_scale=0.98),
    "ddim": lambda x, v, s, t: tr.ddim(x, v, 1 - s, 1 - t, eta=0.9),
}
ODE_STEPS: dict[str, Callable[..., Tensor]] = {
    "euler": tr.euler,
    "dpmpp_2m": lambda x, v, s, t: tr.dpmpp_2m(x, v, C, s + 0.05, s, t),
}


@pytest.mark.parametrize("name", [*STEPS, *ODE_STEPS])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_per_sample_sigmas_equal_a_loop(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """[B] sigmas, 0-d sigmas and floats agree; [3, 2, 4] would broadcast wrongly in silence."""
    x, v = X.to(dtype), V.to(dtype)
    high, low = (torch.tensor(values, dtype=torch.float64) for values in (HIGH, LOW))
    close = functools.partial(torch.testing.assert_close, rtol=0.0, atol=tolerance)
    if name in ODE_STEPS:
        batched = ODE_STEPS[name](x, v, high, low)
        for b in range(3):
            close(batched[b], ODE_STEPS[name](x, v, HIGH[b], LOW[b])[b])
        return
    mean, std = STEPS[name](x, v, high, low)
    assert isinstance(std, Tensor) and std.shape == (3, 1, 1) and std.dtype == mean.dtype == x.dtype
    for b in range(3):
        one, one_std = STEPS[name](x[b : b + 1], v[b : b + 1], HIGH[b], LOW[b])
        assert isinstance(one_std, float)
        close(mean[b : b + 1], one)
        assert std[b].item() == pytest.approx(one_std, abs=tolerance)
        zero_d, zero_d_std = STEPS[name](x, v, high[b], low[b])
        assert isinstance(zero_d_std, Tensor) and zero_d_std.shape == ()
        close(zero_d[b : b + 1], one)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", STEPS)
def test_half_precision_comes_out_as_float32(name: str, low: torch.dtype) -> None:
    x, v = X.to(low), V.to(low)
    mean, std = STEPS[name](x, v, 0.6, 0.4)
    assert mean.dtype == torch.float32
    assert torch.equal(mean, STEPS[name](x.float(), v.float(), 0.6, 0.4)[0])
    assert STEPS[name](x, v, torch.tensor(0.6, dtype=low), 0.4)[0].dtype == torch.float32
    assert tr.gaussian_log_prob(x, mean.to(low), std).dtype == torch.float32
    assert tr.cps_log_prob(x, mean.to(low)).dtype == torch.float32
    assert tr.euler(x, v, 0.6, 0.4).dtype == torch.float32
    assert tr.dpmpp_2m(x, v, v, 0.8, 0.6, 0.4).dtype == torch.float32


@pytest.mark.parametrize("name", STEPS)
def test_gradient_reaches_the_prediction_and_nothing_else(name: str) -> None:
    x, v = X.clone().requires_grad_(), V.clone().requires_grad_()
    mean, std = STEPS[name](x, v, 0.6, 0.4)
    x_next = mean + std * C  # not detached by the caller
    log_prob = tr.cps_log_prob if name == "cps" else tr.gaussian_log_prob
    args = (x_next, mean) if name == "cps" else (x_next, mean, std)
    log_prob(*args).sum().backward()
    assert x.grad is None
    assert v.grad is not None
    # d log_prob / d mean = (x_next - mean) / std^2 / D, and mean is linear in v.
    slope = STEPS[name](torch.zeros(1, 1), torch.ones(1, 1), 0.6, 0.4)[0].item()
    scale = 2 * std if name == "cps" else 1 / std
    torch.testing.assert_close(v.grad, scale * C * slope / 8, rtol=1e-6, atol=1e-8)


def test_flow_sde_at_sigma_one_has_std_eta() -> None:
    for sigmas in (SD3, FLUX, MIX):
        as_tensor = torch.tensor(sigmas[0], dtype=torch.float64)
        for start in (sigmas[0], as_tensor):
            mean, std = tr.flow_sde(X, V, start, sigmas[1], eta=0.7, sigma_at_one=sigmas[1])
            assert float(std) == pytest.approx(0.7, abs=1e-12)
            assert mean.isfinite().all()


def test_eta_zero_is_euler() -> None:
    euler = X + (0.4 - 0.6) * V
    torch.testing.assert_close(tr.euler(X, V, 0.6, 0.4), euler)
    for mean, std in (
        tr.cps(X, V, 0.6, 0.4, eta=0.0),
        tr.dance_sde(X, V, 0.6, 0.4, eta=0.0),
        tr.flow_sde(X, V, 0.6, 0.4, eta=0.0, sigma_at_one=0.9),
        tr.wan_sde(X, V, 0.6, 0.4, sigma_scale=0.0),
    ):
        assert std == 0
        torch.testing.assert_close(mean, euler, rtol=0, atol=1e-14)


def test_dance_is_the_score_form_and_flow_sde_with_constant_noise() -> None:
    s, t, eta = 0.6, 0.4, 0.3
    mean, std = tr.dance_sde(X, V, s, t, eta=eta)
    score = -(X - (1 - s) * (X - s * V)) / s**2
    torch.testing.assert_close(mean, X + (t - s) * V - eta**2 * score * (t - s) / 2)
    same = tr.flow_sde(X, V, s, t, eta=eta / math.sqrt(s / (1 - s)), sigma_at_one=0.9)
    torch.testing.assert_close(same[0], mean)
    assert same[1] == pytest.approx(std) == pytest.approx(eta * math.sqrt(s - t))


def test_wan_is_flow_sde_with_noise_linear_in_sigma() -> None:
    s, t = 0.6, 0.4
    mean, std = tr.wan_sde(X, V, s, t, sigma_scale=0.98)
    same = tr.flow_sde(X, V, s, t, eta=0.98 * s / math.sqrt(s / (1 - s)), sigma_at_one=0.9)
    torch.testing.assert_close(mean, same[0])
    assert std == pytest.approx(same[1]) == pytest.approx(0.98 * s * math.sqrt(s - t))


@pytest.mark.parametrize("eta", [0.0, 0.8, 1.0])
def test_cps_and_ddim_keep_the_noise_level(eta: float) -> None:
    """With the true prediction for image C and noise N, image and noise keep their exact shares."""
    noise = X
    mean, std = tr.cps(0.4 * C + 0.6 * noise, noise - C, 0.6, 0.35, eta=eta)
    assert isinstance(std, float)
    torch.testing.assert_close(mean, 0.65 * C + math.sqrt(0.35**2 - std**2) * noise)
    a, a_next = 0.3, 0.45
    x = math.sqrt(a) * C + math.sqrt(1 - a) * noise
    mean, std = tr.ddim(x, noise, a, a_next, eta=eta)
    assert isinstance(std, float)
    torch.testing.assert_close(mean, math.sqrt(a_next) * C + math.sqrt(1 - a_next - std**2) * noise)
    last, last_std = tr.ddim(x, noise, a, 1.0, eta=eta)
    assert last_std == 0
    torch.testing.assert_close(last, C)


def test_dpmpp_first_order_is_euler_and_is_taken_where_lambda_diverges() -> None:
    s, t = 0.6, 0.4
    torch.testing.assert_close(tr.dpmpp_2m(X, X - s * V, None, 0.8, s, t), X + (t - s) * V)
    torch.testing.assert_close(tr.dpmpp_2m(X, C, V, 1.0, s, t), tr.dpmpp_2m(X, C, None, 1.0, s, t))
    torch.testing.assert_close(tr.dpmpp_2m(X, C, V, 0.8, s, 0.0), C)
    torch.testing.assert_close(tr.dpmpp_2m(X, C, V, 1.0, s, 0.0), C)
    ends = torch.tensor([0.4, 0.0, 0.4], dtype=torch.float64)
    mixed = tr.dpmpp_2m(X, C, V, 0.8, s, ends)
    torch.testing.assert_close(mixed[1], C[1])
    torch.testing.assert_close(mixed[2], tr.dpmpp_2m(X, C, V, 0.8, s, 0.4)[2])


def test_log_prob_is_the_mean_of_the_normal_density() -> None:
    for std in (0.31, torch.tensor(0.31), torch.tensor([0.2, 0.5, 1.3]).double()):
        wide = std.double().reshape(-1, 1, 1) if isinstance(std, Tensor) else std
        expected = torch.distributions.Normal(V, wide).log_prob(X).mean(dim=(1, 2))
        log_prob = tr.gaussian_log_prob(X, V, std)
        assert log_prob.shape == (3,)
        torch.testing.assert_close(log_prob, expected)
    torch.testing.assert_close(tr.cps_log_prob(X, V), -((X - V) ** 2).mean(dim=(1, 2)))


@pytest.mark.parametrize("std", [0.0, -1.0, math.nan, torch.tensor(0.0), torch.tensor([0.1, 0.0, 0.1])])
def test_log_prob_without_noise_is_refused(std: tr.Sigma) -> None:
    with pytest.raises(ValueError, match="no log-probability"):
        tr.gaussian_log_prob(X, V, std)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: tr.sd3_sigmas(0, 3.0), "T=0"),
        (lambda: tr.flux_sigmas(0, 1024), "T=0"),
        (lambda: tr.flux_sigmas(6, 0), "tokens=0"),
        (lambda: tr.shifted_linear_sigmas(16, 0.0), "shift=0.0"),
        (lambda: tr.unipc_sigmas(20, math.nan), "shift=nan"),
        (lambda: tr.mixgrpo_flash_sigmas(25, 25, 0.4, 3.0), "last=25"),
        (lambda: tr.mixgrpo_flash_sigmas(25, -1, 0.4, 3.0), "last=-1"),
        (lambda: tr.mixgrpo_flash_sigmas(25, 3, 0.0, 3.0), "ratio=0.0"),
        (lambda: tr.mixgrpo_flash_sigmas(25, 3, 1.5, 3.0), "ratio=1.5"),
        (lambda: tr.flow_sde(X, V, 0.4, 0.6, eta=0.7, sigma_at_one=0.9), "sigma_next < sigma"),
        (lambda: tr.wan_sde(X, V, 0.0, 0.0, sigma_scale=0.9), "sigma_next < sigma"),
        (lambda: tr.dance_sde(X, V, 700.0, 600.0, eta=0.3), "700"),
        (lambda: tr.dance_sde(X, V, 0.6, 0.4, eta=-0.3), "eta=-0.3"),
        (lambda: tr.cps(X, V, 0.6, 0.4, eta=1.2), "eta=1.2"),
        (lambda: tr.ddim(X, V, 0.6, 0.4, eta=1.0), "alpha_bar < alpha_bar_next"),
        (lambda: tr.dpmpp_2m(X, V, C, 0.6, 0.6, 0.4), "sigma < sigma_prev"),
        (lambda: tr.euler(X, V, torch.tensor([0.5, 0.4]), 0.3), "one per sample"),
    ],
)
def test_bad_arguments_are_named(call: Callable[[], object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        call()


# ---- against diffusers --------------------------------------------------------------------------


def _wan_scheduler() -> DPMSolverMultistepScheduler:
    scheduler = DPMSolverMultistepScheduler(use_flow_sigmas=True, flow_shift=3.0, prediction_type="flow_prediction")
    scheduler.set_timesteps(20)
    return scheduler


def test_schedules_agree_with_diffusers() -> None:
    sd3 = FlowMatchEulerDiscreteScheduler(shift=3.0)
    sd3.set_timesteps(10)
    torch.testing.assert_close(tr.sd3_sigmas(10, 3.0).float(), sd3.sigmas, rtol=0, atol=1e-6)
    flux = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    flux.set_timesteps(sigmas=[1 - i / 6 for i in range(6)], mu=0.63)
    torch.testing.assert_close(tr.flux_sigmas(6, 1024).float(), flux.sigmas, rtol=0, atol=1e-6)
    # UniPCMultistepScheduler had this grid when flow_grpo's Wan recipe was written and has moved
    # to another since; the DPM-Solver scheduler still computes it.
    wan = _wan_scheduler()
    torch.testing.assert_close(tr.unipc_sigmas(20, 3.0).float(), wan.sigmas, rtol=0, atol=1e-6)


def test_dpmpp_trajectory_agrees_with_diffusers() -> None:
    scheduler = _wan_scheduler()
    sigmas = scheduler.sigmas.double().tolist()
    mine, theirs, history, prev = X, X, None, None
    for i, timestep in enumerate(scheduler.timesteps):
        velocity = torch.tanh(mine + V)  # any function of the latent
        m0 = mine - sigmas[i] * velocity
        mine = tr.dpmpp_2m(mine, m0, history, prev, sigmas[i], sigmas[i + 1])
        theirs = scheduler.step(torch.tanh(theirs + V), timestep, theirs).prev_sample
        history, prev = m0, sigmas[i]
        torch.testing.assert_close(mine, theirs.double(), rtol=0, atol=2e-5)


def test_ddim_agrees_with_diffusers() -> None:
    scheduler = DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear",
        clip_sample=False, set_alpha_to_one=False, steps_offset=1,
    )  # fmt: skip
    scheduler.set_timesteps(50)
    for t in (981, 501, 21, 1):
        mean, std = tr.ddim(X, V, ALPHA_BAR[t], ALPHA_BAR[max(t - 20, 0)], eta=0.9)
        theirs = scheduler.step(V, t, X, eta=0.9, variance_noise=C).prev_sample
        torch.testing.assert_close(mean + std * C, theirs, rtol=0, atol=2e-5)
