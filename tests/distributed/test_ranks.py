"""Several gloo ranks against one process: the same trajectories, the same update, as few collectives as promised."""

from pathlib import Path
from typing import Any

import pytest
import rank_jobs
import torch
from small import small_config, small_engine
from torch import Tensor

from leangrpo.configs.checks import ConfigError
from leangrpo.configs.ranks import ranks_per_prompt
from leangrpo.engine.distributed import World
from leangrpo.engine.prompt_group import PromptGroup
from leangrpo.tools.gradient_cells import EXECUTIONS
from leangrpo.tools.launch import on_ranks

pytestmark = pytest.mark.distributed

GEOMETRY: dict[str, Any] = {"prompts_per_update": 4, "group_size": 4, "samples_per_forward": 1}
LORA: dict[str, Any] = {"policy": {"weights": "lora"}}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": LORA,
    "global std, clamp, kl": {"advantage": {"std": "global", "clamp": 0.7}, "algorithm": {"beta": 0.3}},
    "clamp, two updates, lora": {"advantage": {"clamp": 0.7}, "updates_per_rollout": 2} | LORA,
}


def cases_on(backend: str, residencies: tuple[str, ...], **extra: Any) -> list[dict[str, Any]]:
    return [
        GEOMETRY | variant | schedule | extra | {"backend": backend, "residency": residency}
        for variant in VARIANTS.values()
        for name, schedule in EXECUTIONS.items()
        for residency in residencies
        if backend != "replicated" or name != "streaming_sharded"
    ]


def on_one_process(case: dict[str, Any]) -> dict[str, Any]:
    buffers = "streaming" if case.get("buffers") == "streaming_sharded" else case.get("buffers", "streaming")
    return case | {"backend": "replicated", "residency": "resident", "shard_ranks": None, "buffers": buffers}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return sum(float((a[name].double() - b[name].double()).square().sum()) for name in a) ** 0.5


def assert_same_updates(ranks: int, cases: list[dict[str, Any]]) -> None:
    expected: dict[str, rank_jobs.Outcome] = {}
    for case in cases:
        key = repr(on_one_process(case))
        if key not in expected:
            expected[key] = rank_jobs.train(World(), [on_one_process(case)])[0]
    results = on_ranks(ranks, rank_jobs.train, cases)
    for index, case in enumerate(cases):
        parameters, metrics = expected[repr(on_one_process(case))]
        start = small_engine(small_config(**on_one_process(case))).backend.full_parameters()
        for rank in range(ranks):
            mine, my_metrics = results[rank][index]
            assert distance(mine, parameters) <= 1e-4 * distance(start, parameters), case
            assert my_metrics.reward_mean == pytest.approx(metrics.reward_mean, rel=1e-3), case
            assert my_metrics.samples == case["prompts_per_update"] * case["group_size"]


def test_two_ranks_make_the_update_of_one_process() -> None:
    """A selection that meets every schedule, backend, residency and variant; all combinations are in the slow tests."""
    cases = cases_on("fsdp2", ("resident",))
    chosen = (
        cases[:5] + cases[5::4] + cases_on("replicated", ("resident",))[::5] + cases_on("fsdp2", ("resharded",))[3::5]
    )
    alone = GEOMETRY | EXECUTIONS["per_sample"] | {"group_size": 2, "residency": "resident"}
    chosen += [  # a rank's only sample is weighted in place, where there is no total yet
        alone | variant | {"backend": backend, "sync": sync}
        for backend in ("fsdp2", "replicated")
        for variant, sync in ((LORA, "every_group"), (VARIANTS["global std, clamp, kl"], "every_update"))
    ]
    chosen += [alone | {"backend": "fsdp2", "sync": "every_update"}]
    assert_same_updates(2, chosen)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["replicated", "fsdp2"])
def test_two_ranks_make_the_update_of_one_process_in_every_combination(backend: str) -> None:
    residencies = ("resident",) if backend == "replicated" else ("resident", "resharded")
    assert_same_updates(2, cases_on(backend, residencies))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["replicated", "fsdp2", "hsdp"])
def test_four_ranks_make_the_update_of_one_process(backend: str) -> None:
    residencies = ("resident",) if backend == "replicated" else ("resident", "resharded")
    extra = {"shard_ranks": 2} if backend == "hsdp" else {}
    assert_same_updates(4, cases_on(backend, residencies, **extra))


def test_retain_is_native_to_the_bit_on_two_ranks() -> None:
    cases = [
        GEOMETRY | variant | {"backend": backend, "schedule": schedule, "sync": sync, "residency": residency}
        for backend, residency, variant in (
            ("fsdp2", "resident", LORA),
            ("fsdp2", "resharded", {}),
            ("replicated", "resident", {}),
        )
        for sync in ("every_update", "every_group", "every_backward")
        for schedule in ("native", "retain")
    ]
    for outcomes in on_ranks(2, rank_jobs.train, cases, 2):
        for (native, _), (retain, _) in zip(outcomes[::2], outcomes[1::2], strict=True):
            assert all(torch.equal(native[name], retain[name]) for name in native)


def test_trajectories_do_not_depend_on_the_number_of_ranks() -> None:
    case = GEOMETRY | {"backend": "replicated", "schedule": "native"}
    alone = rank_jobs.samples(World(), case)
    for ranks, extra in ((2, {}), (2, {"ranks_per_prompt": 1}), (4, {"group_size": 6})):
        expected = alone if "group_size" not in extra else rank_jobs.samples(World(), case | extra)
        drawn: dict[tuple[int, int], Tensor] = {}
        for part in on_ranks(ranks, rank_jobs.samples, case | extra):
            assert not drawn.keys() & part.keys()
            drawn |= part
        assert drawn.keys() == expected.keys()
        assert all(torch.equal(drawn[key], expected[key]) for key in expected)


def test_one_gather_and_one_reduction_per_group_and_update() -> None:
    base = GEOMETRY | {"backend": "fsdp2", "residency": "resident"}
    cases = [
        base | weights | schedule | workload
        for weights in ({}, LORA)
        for name, schedule in EXECUTIONS.items()
        if name != "streaming_sharded"
        for workload in ({}, {"algorithm": {"selected_steps": 1}, "group_size": 8})
    ]
    results = on_ranks(2, rank_jobs.collectives, cases)
    assert results[0] == results[1]
    for case, counted in zip(cases, results[0], strict=True):
        assert counted["all_gather"] == counted["parameter_groups"] == 3
        assert counted["reduce_scatter"] == counted["trainable_parameter_groups"] == (2 if "policy" in case else 3)
        assert counted["all_reduce"] == 0 and "backward" not in counted["phases"]


def test_collectives_of_the_other_choices() -> None:
    base = GEOMETRY | {"backend": "fsdp2", "residency": "resident"}
    cases = [
        base | EXECUTIONS["streaming_sharded"],
        base | {"schedule": "native", "sync": "every_group"},
        base | {"schedule": "retain", "sync": "every_backward"},
        GEOMETRY | {"backend": "replicated", "schedule": "retain", "sync": "every_group"},
    ]
    sharded, group, backward, replicated = on_ranks(2, rank_jobs.collectives, cases)[0]
    groups, prompts, rounds, steps = 3, 4, 2, 4
    assert sharded["reduce_scatter"] == 2 * groups * prompts * rounds
    assert group["reduce_scatter"] == groups * prompts
    assert backward["reduce_scatter"] == groups * prompts * rounds * steps
    assert replicated["all_reduce"] == prompts


def test_hsdp_adds_one_all_reduce_per_group() -> None:
    case = GEOMETRY | {"backend": "hsdp", "shard_ranks": 2, "schedule": "reweight"}
    results = on_ranks(4, rank_jobs.collectives, [case])
    assert all(result == results[0] for result in results)
    counted = results[0][0]
    assert counted["all_gather"] == counted["reduce_scatter"] == counted["all_reduce"] == 3
    reduced, scattered = counted["phases"]["reduce"]["all_reduce"], counted["phases"]["reduce"]["reduce_scatter"]
    assert reduced["bytes"] == pytest.approx(scattered["bytes"] / 2, rel=0.05)  # of the shard only


def test_a_failing_reward_leaves_no_rank_waiting() -> None:
    cases = [
        GEOMETRY | {"backend": backend, "residency": residency} | EXECUTIONS[name]
        for backend, residency in (("fsdp2", "resharded"), ("fsdp2", "resident"), ("replicated", "resident"))
        for name in ("native", "retain", "per_sample", "streaming")
    ]
    results = on_ranks(2, rank_jobs.with_failing_reward, cases)
    for (metrics, counted), (other_metrics, other_counted) in zip(*results, strict=True):
        assert metrics == other_metrics and counted == other_counted
        assert metrics.dropped_samples == 2 and metrics.flat_groups == 1 and metrics.grad_norm > 0


@pytest.mark.parametrize("residency", ["resident", "resharded"])
def test_the_forward_after_a_step_uses_the_new_weights(residency: str) -> None:
    """Without the reshard before the step the root would train on, silently, with its old weights."""
    case = GEOMETRY | {"backend": "fsdp2", "residency": residency, "schedule": "reweight"}
    for differences in on_ranks(2, rank_jobs.stale_weights, case):
        assert max(differences) < 1e-6


@pytest.mark.parametrize("weights", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_resume_to_the_bit_and_on_another_number_of_ranks(weights: str, tmp_path: Path) -> None:
    """Saved with optimizer states on the host, resumed with states on the device, and on the host again."""
    case = GEOMETRY | {"backend": "fsdp2", "policy": {"weights": weights}}
    saved = tmp_path / "saved"
    saved.mkdir()
    on_host = case | {"optimizer": {"states": "host"}}
    whole = on_ranks(2, rank_jobs.run_and_save, on_host, saved)[0]
    resumed = on_ranks(2, rank_jobs.resume, case, saved)[0]
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    one_rank = on_ranks(1, rank_jobs.resume, on_host, saved)[0]
    start = small_engine(small_config(**on_one_process(case))).backend.full_parameters()
    assert distance(one_rank, whole) < 1e-4 * distance(start, whole)


def test_ranks_that_drift_apart_are_found() -> None:
    for reports in on_ranks(2, rank_jobs.drift, GEOMETRY | {"backend": "replicated"}):
        assert reports[0] == "" and reports[1] != ""


def test_geometry() -> None:
    assert [ranks_per_prompt(12, ranks) for ranks in (1, 2, 3, 5, 8, 16)] == [1, 2, 3, 1, 4, 4]
    group = PromptGroup(World(), 12, 5, 4, None)
    assert list(group.slots) == [0, 1, 2, 3, 4] and group.generations == tuple(range(12))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts_per_update": 3, "ranks_per_prompt": 1}, r"prompts_per_update=3: .* use a multiple: 2 or 4"),
        ({"ranks_per_prompt": 3, "group_size": 12}, r"ranks_per_prompt=3: .* use 1, 2$"),
        (
            {"group_size": 4, "samples_per_forward": 4, "prompts_per_update": 4},
            r"samples_per_forward=4: .* divisor of 2",
        ),
        ({"backend": "hsdp", "shard_ranks": 2}, r"shard_ranks=2: .* use a smaller shard_ranks, or backend=fsdp2"),
        (
            {"buffers": "streaming_sharded", "backend": "fsdp2", "group_size": 3},
            r"buffers=streaming_sharded: .* 2 ranks",
        ),
    ],
)
def test_impossible_geometries_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_engine(small_config(**({"samples_per_forward": 1} | changes)), world=World(0, 2, 0, 2))
