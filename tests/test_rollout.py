"""The rollout is the update: same log-probabilities, no gradient between steps, noise a function of its place."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from small import PROMPTS, small_config, small_engine, small_policy

from leangrpo.engine.noise import Noise, generator_for
from leangrpo.engine.policies.base import NonFiniteLogProbError, sample_trajectory
from leangrpo.engine.trainer import Engine

SELECTED = frozenset({0, 1, 2, 3})


def noise(generations: tuple[int, ...] = (0, 1), **changes: int) -> Noise:
    return replace(Noise(seed=3, update=2, slot=1, generations=generations), **changes)


@pytest.mark.parametrize("weights", ["full", "lora"])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", ["none", "all"])
def test_reevaluated_log_prob_is_the_rollouts_to_the_bit(
    weights: str, precision: torch.dtype, checkpointing: str
) -> None:
    engine = small_engine(small_config(policy={"weights": weights}, checkpointing=checkpointing))
    policy = engine.policy
    policy.to(dtype=precision)
    with torch.no_grad():
        without_grad = sample_trajectory(policy, "two", noise(), SELECTED)
    with_grad = sample_trajectory(policy, "two", noise(), SELECTED)
    for a, b in zip(without_grad.selected, with_grad.selected, strict=True):
        again = policy.transition(a.latents, a.timestep, a.conditioning, stochastic=True).log_prob(a.next_latents)
        assert torch.equal(a.log_prob_B, b.log_prob_B) and torch.equal(a.log_prob_B, again)
        assert a.log_prob_B.dtype == torch.float32 and not a.log_prob_B.requires_grad and b.log_prob_B.requires_grad
    assert torch.equal(without_grad.samples, with_grad.samples)


@pytest.mark.parametrize("schedule", ["native", "retain", "reweight"])
def test_every_schedule_draws_the_same_samples(schedule: str) -> None:
    engine = small_engine(small_config(schedule=schedule))
    expected = small_engine(small_config(schedule="native"))
    groups = [e._on_policy_gradient(PROMPTS, SELECTED).groups for e in (engine, expected)]
    for group, other in zip(*groups, strict=True):
        for a, b in zip(group.trajectories, other.trajectories, strict=True):
            assert torch.equal(a.samples, b.samples)
            for step, other_step in zip(a.selected, b.selected, strict=True):
                assert torch.equal(step.log_prob_B, other_step.log_prob_B)
                assert (not step.log_prob_B.requires_grad and step.transition is None) or schedule == "native"


def test_no_gradient_crosses_a_step() -> None:
    policy = small_policy(small_config())
    steps = sample_trajectory(policy, "two", noise(), SELECTED).selected
    parameters = list(policy.module.parameters())
    for step in steps:
        assert not step.latents.requires_grad and not step.next_latents.requires_grad
        log_prob = step.log_prob_B.sum()
        own = torch.autograd.grad(log_prob, parameters, retain_graph=True, allow_unused=True)
        alone = policy.transition(step.latents.clone(), step.timestep, step.conditioning, stochastic=True)
        expected = torch.autograd.grad(alone.log_prob(step.next_latents).sum(), parameters, allow_unused=True)
        for a, b in zip(own, expected, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


def test_latents_are_handed_on_as_they_were_scored() -> None:
    steps = sample_trajectory(small_policy(small_config()), "two", noise(), SELECTED).selected
    for step, following in itertools.pairwise(steps):
        assert step.next_latents is following.latents and step.next_latents.dtype == torch.float32


def test_noise_depends_on_its_place_only() -> None:
    batch, single = noise((4, 5, 6)), noise((5,))
    assert torch.equal(batch.draw(2, (1, 8, 8))[1:2], single.draw(2, (1, 8, 8)))
    torch.randn(7)  # the global generator plays no part
    assert torch.equal(single.draw(2, (1, 8, 8)), noise((5,)).draw(2, (1, 8, 8)))
    draws = [single.draw(step, (1, 8, 8)) for step in (-1, 0, 1)]
    draws += [noise((5,), **change).draw(0, (1, 8, 8)) for change in ({"seed": 4}, {"update": 3}, {"slot": 2})]
    draws += [noise((6,)).draw(0, (1, 8, 8))]
    for i, a in enumerate(draws):
        assert abs(float(a.mean())) < 0.5 and 0.7 < float(a.std()) < 1.3
        assert not any(torch.equal(a, b) for b in draws[:i])


def test_selection_is_drawn_from_the_seed_before_the_rollout() -> None:
    for selection, count in (("random", 3), ("window", 2), ("first", 5)):
        algorithm: dict[str, Any] = {"selection": selection, "selected_steps": count}
        engine = small_engine(small_config(algorithm=algorithm))
        draws = [engine.algorithm.select(5, generator_for("steps", 0, update)) for update in range(60)]
        again = [engine.algorithm.select(5, generator_for("steps", 0, update)) for update in range(60)]
        assert draws == again and all(len(draw) == count for draw in draws)
        if selection == "first":
            assert set(draws) == {frozenset(range(5))}
        else:
            assert len(set(draws)) > 2 and frozenset().union(*draws) == frozenset(range(4))  # the last step never
        if selection == "window":
            assert all(max(draw) - min(draw) == count - 1 for draw in draws)


def test_unselected_steps_take_no_noise_with_ode() -> None:
    policy = small_policy(small_config(algorithm={"selected_steps": 1}))
    ode = sample_trajectory(policy, "two", noise(), frozenset({0}), unselected_stochastic=False)
    latents = ode.selected[0].next_latents
    with torch.no_grad():
        for timestep in policy.timesteps[1:]:
            velocity = policy.velocity(latents, timestep.sigma, ode.selected[0].conditioning)
            latents = latents + (timestep.sigma_next - timestep.sigma) * velocity
    assert torch.equal(ode.samples, policy.decode(latents))
    sde = sample_trajectory(policy, "two", noise(), frozenset({0}))
    assert not torch.equal(ode.samples, sde.samples)


@pytest.mark.parametrize("schedule", ["native", "retain", "reweight"])
def test_a_non_finite_log_prob_names_its_place_and_loses_nothing(schedule: str) -> None:
    engine = small_engine(small_config(schedule=schedule))
    before = {name: p.clone() for name, p in engine.backend.parameters().items()}
    original, calls = engine.policy.velocity, []

    def broken(latents: torch.Tensor, sigma: float, conditioning: Any) -> torch.Tensor:
        calls.append(sigma)
        velocity = original(latents, sigma, conditioning)
        return velocity + (torch.nan if len(calls) == 8 else 0.0)

    engine.policy.velocity = broken  # type: ignore[method-assign]
    message = "prompt 'one', generation 2, denoising step 2"
    with pytest.raises(NonFiniteLogProbError, match=message):
        engine.train_step(PROMPTS)
    for name, p in engine.backend.parameters().items():
        assert torch.equal(p, before[name])
    engine.policy.velocity = original  # type: ignore[method-assign]
    assert _after_one_step(engine) == _after_one_step(small_engine(small_config(schedule=schedule)))


def _after_one_step(engine: Engine) -> list[float]:
    engine.train_step(PROMPTS)
    return [float(p.double().sum()) for p in engine.backend.parameters().values()]


def test_wrong_number_of_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="2 prompts given, but prompts_per_update is 3"):
        small_engine(small_config()).train_step(PROMPTS[:2])
