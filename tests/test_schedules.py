"""The gradient of every schedule against an independent float64 reference, and the identities between schedules."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small import PROMPTS, brightness, hand_advantages, reference_of, small_config, small_engine
from torch import Tensor

from leangrpo.engine.replay import ReplayStatistics
from leangrpo.engine.schedules import Group
from leangrpo.engine.trainer import Engine, Rollout

EXECUTIONS: dict[str, dict[str, Any]] = {
    "native": {"schedule": "native"},
    "retain": {"schedule": "retain"},
    "per_sample": {"schedule": "reweight", "buffers": "per_sample"},
    "streaming": {"schedule": "reweight", "buffers": "streaming"},
    "streaming, one by one": {"schedule": "reweight", "buffers": "streaming", "samples_per_forward": 1},
}
WORKLOADS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"policy": {"weights": "lora"}},
    "global std": {"advantage": {"std": "global", "ddof": 1}},
    "clamp": {"advantage": {"clamp": 0.7}},
    "clamp, global std": {"advantage": {"clamp": 0.7, "std": "global"}},
    "kl": {"algorithm": {"beta": 0.5}},
    "kl, lora": {"algorithm": {"beta": 0.5}, "policy": {"weights": "lora"}},
    "kl exact, global std": {"algorithm": {"beta": 0.5, "kl_form": "exact"}, "advantage": {"std": "global"}},
    "cps": {"sampler": {"transition": "cps"}},
    "dance": {"sampler": {"transition": "dance_sde", "eta": 0.3, "unselected": "ode"}},
    "random steps": {"algorithm": {"selected_steps": 2, "selection": "random"}},
    "window": {"algorithm": {"selected_steps": 2, "selection": "window"}},
    "all steps": {"algorithm": {"selected_steps": 5}},
    "two rewards": {"advantage": {"normalise": "per_reward"}},
    "two rewards, global std, clamp": {"advantage": {"normalise": "per_reward", "std": "global", "clamp": 1.0}},
    "checkpointed": {"checkpointing": 1},
}


def contrast(images: Tensor, prompts: list[str]) -> Tensor:
    """A second reward, on another scale."""
    return 10 * images.float().std(dim=(1, 2, 3)) / 255 + 3


def leave_base(engine: Engine) -> None:
    """Move the trained weights away from the base, so that the KL term has a gradient."""
    generator = torch.Generator().manual_seed(5)
    moved = {
        name: p + 0.02 * torch.randn(p.shape, generator=generator)
        for name, p in engine.backend.full_parameters().items()
    }
    engine.backend.load_parameters(moved)


def roll_out(engine: Engine) -> Rollout:
    selected = engine.algorithm.select(len(engine.policy.timesteps), engine._generator("selected steps"))
    return engine._on_policy_gradient(PROMPTS[: engine.config.prompts_per_update], selected)


def on_policy(engine: Engine) -> tuple[Tensor, list[Group], np.ndarray]:
    """The flat gradient of one update without its optimizer step, the groups, and rewards [P, M, K]."""
    rollout = roll_out(engine)
    return engine.gradients.get_total(), rollout.groups, rollout.rewards_PGK.numpy()


def engine_for(workload: dict[str, Any], execution: dict[str, Any], *functions: Any, seed: int = 0) -> Engine:
    if workload.get("advantage", {}).get("normalise") == "per_reward":
        functions = (brightness, contrast)
    engine = small_engine(small_config(**workload, **execution), *functions, seed=seed)
    if engine.algorithm.beta > 0:
        leave_base(engine)
    return engine


def relative_error(gradient: Tensor, reference: Tensor) -> float:
    return float((gradient.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_gradient_equals_the_float64_reference(workload: str, execution: str) -> None:
    engine = engine_for(WORKLOADS[workload], EXECUTIONS[execution])
    rollout = roll_out(engine)
    gradient, advantages = engine.gradients.get_total(), hand_advantages(engine, rollout.rewards_PGK.numpy())
    assert relative_error(gradient, reference_of(engine, rollout.groups, advantages)) < 1e-6
    if "clamp" in WORKLOADS[workload].get("advantage", {}):
        assert np.isclose(np.abs(advantages), engine.config.algorithm.advantage.clamp).any()
        if "streaming" in execution:
            assert rollout.clamped_samples > 0


@pytest.mark.parametrize("std", ["group", "global"])
def test_best_of_n(std: str) -> None:
    gradients = {}
    for name in ("native", "retain", "per_sample"):
        engine = engine_for({"advantage": {"best_of_n": 2, "std": std}}, EXECUTIONS[name])
        gradients[name], groups, rewards = on_policy(engine)
        advantages = hand_advantages(engine, rewards)
        middle = np.argsort(rewards[:, :, 0], axis=1)[:, 1:3]  # neither the best nor the worst of 4
        assert not np.take_along_axis(advantages, middle, axis=1).any()
        assert relative_error(gradients[name], reference_of(engine, groups, advantages)) < 1e-6


def with_nan(images: Tensor, prompts: list[str]) -> Tensor:
    """No reward for the darker images of "one", none at all for "two", all equal for "three"."""
    rewards_B = brightness(images, prompts)
    if prompts[0] == "one":
        rewards_B[rewards_B < 0.5] = torch.nan
    return {"one": rewards_B, "two": torch.full_like(rewards_B, torch.inf), "three": torch.ones_like(rewards_B)}[
        prompts[0]
    ]


@pytest.mark.parametrize("std", ["group", "global"])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_missing_rewards_are_dropped_and_counted(execution: str, std: str) -> None:
    engine = engine_for({"advantage": {"std": std}}, EXECUTIONS[execution], with_nan)
    gradient, groups, rewards = on_policy(engine)
    reference = reference_of(engine, groups, hand_advantages(engine, rewards))
    assert reference.norm() > 0 and relative_error(gradient, reference) < 1e-6
    metrics = engine_for({"advantage": {"std": std}}, EXECUTIONS[execution], with_nan).train_step(PROMPTS)
    assert metrics.dropped_samples == int(np.isnan(rewards).sum()) + 4 > 4
    assert metrics.flat_groups == 2 and np.isfinite([metrics.grad_norm, metrics.reward_mean]).all()


@pytest.mark.parametrize("value", [0.1, 0.3, 1e9 / 3, np.nan])
@pytest.mark.parametrize("std", ["group", "global"])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_equal_or_missing_rewards_give_no_gradient_at_all(execution: str, std: str, value: float) -> None:
    def constant(images: Tensor, prompts: list[str]) -> Tensor:
        return torch.full((len(images),), value, dtype=torch.float64)

    engine = engine_for({"advantage": {"std": std, "epsilon": 0.0}}, EXECUTIONS[execution], constant)
    gradient, _, _ = on_policy(engine)
    assert gradient.count_nonzero() == 0 and not gradient.isnan().any()


@pytest.mark.parametrize("workload", ["full", "lora", "global std", "kl, lora", "kl exact, global std", "checkpointed"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("updates_per_rollout", [1, 2])
def test_retain_is_native_to_the_bit(workload: str, precision: str, updates_per_rollout: int) -> None:
    changes = WORKLOADS[workload] | {"precision": precision, "updates_per_rollout": updates_per_rollout}
    native, retain = (engine_for(changes, EXECUTIONS[name]) for name in ("native", "retain"))
    start = {name: p.clone() for name, p in native.backend.full_parameters().items()}
    for _ in range(5):
        native_metrics, retain_metrics = native.train_step(PROMPTS), retain.train_step(PROMPTS)
        assert native_metrics.grad_norm == retain_metrics.grad_norm > 0
        assert native_metrics.ratio_deviation == 0.0
        assert native_metrics.clip_fraction == retain_metrics.clip_fraction
    moved = False
    for (name, p), q in zip(
        native.backend.full_parameters().items(), retain.backend.full_parameters().values(), strict=True
    ):
        assert torch.equal(p, q), name
        moved = moved or not torch.equal(p, start[name])
    assert moved


@pytest.mark.parametrize(("workload", "clip_range"), [("full", 2e-3), ("kl, lora", 2e-4)])
def test_off_policy_gradient_equals_the_float64_reference(workload: str, clip_range: float) -> None:
    """The second update of a rollout: ratio and clip, at parameters that the first has moved."""
    clip = {"clip_range": clip_range} | WORKLOADS[workload].get("algorithm", {})
    engine = engine_for(WORKLOADS[workload] | {"algorithm": clip}, EXECUTIONS["streaming"])
    rollout = roll_out(engine)
    engine.gradients.update_done()
    engine.backend.step()
    statistics = ReplayStatistics()
    engine._off_policy_gradient(rollout.groups, statistics)
    assert 0.1 < statistics.clipped / statistics.ratios < 0.9
    advantages = hand_advantages(engine, rollout.rewards_PGK.numpy())
    reference = reference_of(engine, rollout.groups, advantages, off_policy=True)
    assert relative_error(engine.gradients.get_total(), reference) < 1e-5


@pytest.mark.parametrize("execution", ["per_sample", "streaming"])
def test_off_policy_updates_use_ratio_and_clip(execution: str) -> None:
    changes: dict[str, Any] = {"updates_per_rollout": 3, "algorithm": {"clip_range": 1e-4}}
    native, reweight = (engine_for(changes, EXECUTIONS[name]) for name in ("native", execution))
    metrics = native.train_step(PROMPTS), reweight.train_step(PROMPTS)
    assert metrics[0].clip_fraction == metrics[1].clip_fraction > 0
    update = 0.0
    for p, q in zip(
        native.backend.full_parameters().values(), reweight.backend.full_parameters().values(), strict=True
    ):
        update = max(update, float((p - q).abs().max()))
    assert update < 1e-5  # three AdamW steps of 1e-3 each; entries with a tiny gradient differ most


MEASURED = {"native": 1.0, "per_sample": 1.10, "streaming": 1.25}


@pytest.mark.parametrize("weights", ["full", "lora"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_reweight_is_as_exact_as_native(precision: str, weights: str) -> None:
    """Mean error against float64 over 20 seeds: per_sample within 1.10 x Native's, streaming 1.25 (1.10 in BF16)."""
    errors: dict[str, list[float]] = {name: [] for name in MEASURED}
    for seed in range(20):
        reference = None
        for name in MEASURED:
            config = small_config(
                seed=seed,
                precision=precision,
                policy={"weights": weights},
                group_size=8,
                prompts_per_update=1,
                samples_per_forward=4,
                algorithm={"selected_steps": 2},
                **EXECUTIONS[name],
            )
            engine = small_engine(config)
            gradient, groups, rewards = on_policy(engine)
            if reference is None:
                reference = reference_of(engine, groups, hand_advantages(engine, rewards))
            errors[name].append(relative_error(gradient, reference))
    mean = {name: float(np.mean(values)) for name, values in errors.items()}
    print(precision, weights, {name: f"{value:.3g} ({value / mean['native']:.3f} x)" for name, value in mean.items()})
    assert mean["native"] < (1e-6 if precision == "float32" else 5e-2)
    for name, limit in MEASURED.items():
        limit = 1.10 if precision == "bfloat16" else limit
        assert mean[name] <= limit * mean["native"], name


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_bfloat16_buffers_round_but_stay_close(execution: str) -> None:
    engine = engine_for({"buffer_dtype": "bfloat16", "buffer_device": "host"}, EXECUTIONS[execution])
    gradient, groups, rewards = on_policy(engine)
    reference = reference_of(engine, groups, hand_advantages(engine, rewards))
    assert gradient.dtype == torch.bfloat16
    assert 1e-4 < relative_error(gradient, reference) < 3e-2


def test_one_sync_choice_changes_nothing_on_one_process() -> None:
    for sync in ("every_backward", "every_group"):
        engines = [small_engine(small_config(schedule="native", sync=s)) for s in (sync, "every_update")]
        reduced = []
        for engine in engines:
            roll_out(engine)
            engine.gradients.update_done()
            reduced.append(engine.backend.gradient)  # type: ignore[attr-defined]
        difference = (reduced[0] - reduced[1]).norm() / reduced[1].norm()
        assert difference < 1e-6  # the same sums in another order


def test_checkpointing_changes_no_bit() -> None:
    for execution in ("native", "retain"):
        gradients = [on_policy(engine_for({"checkpointing": k}, EXECUTIONS[execution]))[0] for k in ("none", 1, "all")]
        assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


def test_gradients_are_those_of_the_configuration_alone() -> None:
    """An update leaves nothing behind in the buffers: the second equals that of an engine which starts there."""
    for execution in EXECUTIONS.values():
        engine = small_engine(small_config(**execution))
        engine.train_step(PROMPTS)
        fresh = small_engine(small_config(**execution))
        fresh.backend.load_parameters({k: p.clone() for k, p in engine.backend.full_parameters().items()})
        fresh.update = 1
        assert torch.equal(on_policy(engine)[0], on_policy(fresh)[0])


def test_config_of_small_models_is_checked() -> None:
    with pytest.raises(ValueError, match="per_sample"):
        small_engine(replace(small_config(advantage={"best_of_n": 2}), buffers="streaming"))
