"""Rewards to advantages: golden values, exact zeros, and what is left out."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from leangrpo.configs.schema import AdvantageConfig
from leangrpo.engine.advantages import AdvantageRule, GroupStatistics

GOLDEN = [0.2, 0.4, 0.6, 1.0]


def rule(weights: tuple[float, ...] = (1.0,), **settings: Any) -> AdvantageRule:
    return AdvantageRule(AdvantageConfig(**settings), weights)


def group(made: AdvantageRule, *rewards: list[float]) -> GroupStatistics:
    return made.statistics(made.terms(torch.tensor(rewards, dtype=torch.float64).T))


def advantages(made: AdvantageRule, *groups: GroupStatistics) -> list[Tensor]:
    divisors_K = made.divisors(groups)
    return [made.advantages(one, divisors_K) for one in groups]


def test_golden_values_of_flow_grpo() -> None:
    made = rule()
    expected = torch.tensor([-1.18281609, -0.50692118, 0.16897373, 1.52076355], dtype=torch.float64)
    assert torch.allclose(advantages(made, group(made, GOLDEN))[0], expected, atol=1e-8)


def test_ddof_and_epsilon() -> None:
    made = rule(ddof=1, epsilon=0.5)
    std = math.sqrt(sum((r - 0.55) ** 2 for r in GOLDEN) / 3)
    expected = [(r - 0.55) / (std + 0.5) for r in GOLDEN]
    assert advantages(made, group(made, GOLDEN))[0].tolist() == pytest.approx(expected, rel=1e-12)


def test_global_std_is_that_of_all_rewards_of_the_update() -> None:
    made = rule(std="global", epsilon=0.0)
    groups = group(made, GOLDEN), group(made, [5.0, 5.0, 5.0, 9.0])
    std = torch.tensor([*GOLDEN, 5.0, 5.0, 5.0, 9.0], dtype=torch.float64).std(correction=0)
    first, second = advantages(made, *groups)
    assert torch.allclose(first, (torch.tensor(GOLDEN, dtype=torch.float64) - 0.55) / std, rtol=1e-12)
    assert torch.allclose(second, torch.tensor([-1.0, -1.0, -1.0, 3.0], dtype=torch.float64) / std, rtol=1e-12)


@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 1e9 / 7, -2.7, 1e-300])
def test_equal_rewards_give_zero_exactly(value: float) -> None:
    """A mean of n equal numbers can be off by an ulp; with a tiny epsilon that would be an advantage of order 1."""
    for size in range(2, 40):
        for std in ("group", "global"):
            made = rule(std=std, epsilon=1e-300)
            assert not advantages(made, group(made, [value] * size))[0].any()


def test_clamp() -> None:
    made = rule(clamp=0.5)
    assert advantages(made, group(made, GOLDEN))[0].tolist() == pytest.approx([-0.5, -0.5, 0.16897373, 0.5])
    for size in (26, 27):  # the largest advantage of n rewards is sqrt(n - 1)
        made = rule(epsilon=0.0, clamp=5.0)
        one = group(made, [0.0] * (size - 1) + [1.0])
        divisors_K = made.divisors([one])
        assert torch.allclose(made.affine(one, divisors_K), made.advantages(one, divisors_K)) == (size == 26)


def test_missing_rewards_do_not_count() -> None:
    made = rule()
    with_gaps = group(made, [0.2, math.nan, 0.4, 0.6, math.inf, 1.0, -math.inf])
    result = advantages(made, with_gaps)[0]
    assert result[[0, 2, 3, 5]].tolist() == pytest.approx(advantages(made, group(made, GOLDEN))[0].tolist())
    assert not result[[1, 4, 6]].any() and int((~with_gaps.finite_G).sum()) == 3
    for rewards in ([math.nan] * 4, [math.nan, 1.0, math.nan, math.nan]):
        for ddof in (0, 1):
            made = rule(ddof=ddof)
            assert advantages(made, group(made, rewards))[0].tolist() == [0.0] * 4


def test_several_rewards() -> None:
    summed = rule(weights=(1.0, 0.5))
    other = [10.0, 30.0, 20.0, 40.0]
    expected = advantages(rule(), group(rule(), [a + 0.5 * b for a, b in zip(GOLDEN, other, strict=True)]))[0]
    assert torch.allclose(advantages(summed, group(summed, GOLDEN, other))[0], expected, rtol=1e-12)
    apart = rule(weights=(1.0, 0.5), normalise="per_reward")
    parts = [advantages(rule(), group(rule(), rewards))[0] for rewards in (GOLDEN, other)]
    assert torch.allclose(advantages(apart, group(apart, GOLDEN, other))[0], parts[0] + 0.5 * parts[1], rtol=1e-12)


def test_best_of_n_keeps_both_ends() -> None:
    made = rule(best_of_n=4)
    rewards = [0.3, 0.9, math.nan, 0.1, 0.5, 0.5, 0.7, 0.2]
    result = advantages(made, group(made, rewards))[0]
    everyone = advantages(rule(), group(rule(), rewards))[0]
    assert result[[1, 6, 3, 7]].tolist() == everyone[[1, 6, 3, 7]].tolist()  # statistics are those of all
    assert not result[[0, 2, 4, 5]].any()
    few = advantages(made, group(made, [0.3, math.nan, 0.9, 0.1]))[0]
    assert few.tolist() == advantages(rule(), group(rule(), [0.3, math.nan, 0.9, 0.1]))[0].tolist()
