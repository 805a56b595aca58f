"""Time of single candidates, against hand-computed figures of a policy made of round numbers."""

from dataclasses import replace

import pytest
from planning import candidate, round_trace, round_workload

from leangrpo.planners.costs import STREAM, Costs
from leangrpo.planners.hardware import parse_hardware
from leangrpo.planners.runtime import estimate_time

# M = 16 on 8 ranks: g = 8, Q = 2; 4 prompts are 4 rounds.
SEVERAL = round_workload(group_size=16, prompts_per_update=4)
SPEC = replace(parse_hardware("8xA100-80"), operator_seconds=0.0, backward_operator_seconds=0.0)
REPLICATED = replace(SEVERAL, backend="replicated", precision="float32")
IN_FLOAT32 = round_trace(dtype="float32")


def test_seconds_of_native_and_lean_are_counted_in_forwards_and_backwards() -> None:
    """One rank, T = 10, S = 5, 32 forwards per step; buffers cost nothing without memory traffic."""
    spec = replace(SPEC, ranks_per_node=1, memory_bandwidth=1e30)
    workload = round_workload(prompts_per_update=4)
    one = 1e12 / spec.rate("bfloat16")
    choice = candidate(sync="every_update", residency="resident", checkpointing="none")
    native, retain, reweight = (
        estimate_time(replace(choice, schedule=schedule), workload, round_trace(), spec)
        for schedule in ("native", "retain", "reweight")
    )
    assert native.rollout == pytest.approx(32 * 10 * one)
    assert native.recompute == pytest.approx(32 * 5 * one)
    assert native.backward == pytest.approx(32 * 5 * 2 * one)
    assert retain.total == reweight.total == pytest.approx(32 * (10 + 5 * 2) * one)
    checkpointed = estimate_time(replace(choice, checkpointing="all"), workload, round_trace(), spec)
    assert checkpointed.backward == pytest.approx(32 * 5 * (2 + 0.96) * one)
    half = estimate_time(replace(choice, checkpointing=2), workload, round_trace(), spec)
    assert half.backward == pytest.approx(32 * 5 * (2 + 0.48) * one)


def test_gathers_hide_behind_compute_or_the_other_way_round() -> None:
    """A pass takes the slower of compute and all-gather, plus what cannot overlap."""
    trace, workload = round_trace(), SEVERAL
    free = replace(SPEC, memory_bandwidth=1e30, collective_latency=0.0)
    slow_link, fast_link = (replace(free, all_gather_bandwidth=rate) for rate in (1e9, 1e15))
    compute, gather = 1e12 / SPEC.rate("bfloat16"), 2 * 4.1e9 * 7 / 8 / 1e9
    forward = Costs(candidate(), workload, trace, slow_link).forward(1)
    assert forward == pytest.approx(gather + 0.24 * compute)
    assert Costs(candidate(), workload, trace, fast_link).forward(1) == pytest.approx(compute, rel=1e-3)
    resident = Costs(candidate(residency="resident"), workload, trace, slow_link)
    assert resident.forward(1) == pytest.approx(compute)
    assert resident.gather_once() == pytest.approx(gather)


def test_reductions_are_exposed_without_nvlink_and_hidden_with_it() -> None:
    choice, fast = candidate(residency="resident"), replace(SPEC, reduce_scatter_bandwidth=1e13)
    exposed, hidden = (
        Costs(choice, SEVERAL, round_trace(), replace(fast, overlaps_reduce=overlaps), by_block=True)
        for overlaps in (False, True)
    )
    plain = replace(choice, sync="every_update")
    backward = Costs(plain, SEVERAL, round_trace(), replace(SPEC, memory_bandwidth=1e30)).backward(1)
    assert exposed.backward(1) == pytest.approx(backward + exposed.reduction(), rel=1e-3)
    assert hidden.backward(1) < backward + 0.3 * hidden.reduction()
    own = Costs(choice, SEVERAL, round_trace(), replace(fast, overlaps_reduce=True))  # when the backward is over
    assert own.backward(1) == pytest.approx(backward + own.accumulate(1) + own.reduction(), rel=1e-3)


def test_nodes_are_as_fast_as_the_links_between_them() -> None:
    inside, across = parse_hardware("1x8xH100"), parse_hardware("4x8xH100")
    slow = replace(across, node_bandwidth=1e9)
    workload = round_workload(group_size=32)
    one, four, slowest = (
        Costs(candidate(), workload, round_trace(), spec).reduction() for spec in (inside, across, slow)
    )
    assert one < four < 1.3 * one
    assert slowest > 10 * four


def test_issuing_operators_hides_behind_compute_on_a_gpu_only() -> None:
    """500 operators of a forward, 1000 of a backward, 500 again where all is checkpointed but the root (4 %).

    On a CPU 30 more around a forward, 50 for the loss, and one per trainable tensor that adds its gradient to the
    buffer; three per tensor in the optimizer step.
    """
    alone = replace(
        SPEC, ranks_per_node=1, operator_seconds=1e-3, backward_operator_seconds=1e-3, memory_bandwidth=1e30
    )
    choice = candidate(sync="every_update", residency="resident")
    compute = 1e12 / SPEC.rate("bfloat16")
    gpu, cpu = (
        Costs(choice, SEVERAL, round_trace(), replace(alone, asynchronous=asynchronous))
        for asynchronous in (True, False)
    )
    assert gpu.forward(1) == pytest.approx(0.5)
    assert cpu.forward(1) == pytest.approx(0.53 + compute)
    assert gpu.backward(1) == pytest.approx(1.0 + 0.96 * 0.5)
    assert cpu.backward(1) == pytest.approx(1.0 + 0.96 * 0.5 + 2.96 * compute + 0.401 + 0.05)
    assert (gpu.optimizer(), cpu.optimizer()) == (pytest.approx(3 * 0.401), pytest.approx(3 * 0.401))
    slow = replace(alone, asynchronous=False, operator_bandwidth=9e9, backward_operator_bandwidth=18e9)
    traffic = Costs(choice, SEVERAL, round_trace(), slow)
    assert traffic.forward(2) - 2 * compute == pytest.approx(0.53 + (8 + 2 * 1) / 9)
    again = 0.96 * (0.5 + 2 * compute + (8 + 2 * 1) / 9)
    assert traffic.backward(2) - 4 * compute == pytest.approx(1.451 + (16 + 2 * 2) / 18 + again)


def test_graphs_and_checkpointing_cost_python() -> None:
    """500 operators of a forward: 2 ms of graph each, 3 ms each and 0.1 s per block where it is checkpointed."""
    plain = replace(SPEC, ranks_per_node=1, asynchronous=False, memory_bandwidth=1e30)
    spec = replace(plain, graph_operator_seconds=2e-3, checkpoint_operator_seconds=3e-3, checkpoint_block_seconds=0.1)
    for checkpointed, extra in (("none", 0.0), (1, 0.24 * 1.5 + 0.1), ("all", 0.96 * 1.5 + 0.4)):
        choice = candidate(sync="every_update", residency="resident", checkpointing=checkpointed)
        more, less = (Costs(choice, SEVERAL, round_trace(), one).backward(1) for one in (spec, plain))
        assert more - less == pytest.approx(1.0 + extra)


def test_adding_to_a_buffer_hides_behind_all_gathers_but_not_on_the_host() -> None:
    """Hooks add in the stream that computes: of what waits for links only the last block's part is to be seen."""
    slow_link = replace(SPEC, all_gather_bandwidth=1e9, collective_latency=0.0)
    costs = Costs(candidate(sync="every_update"), SEVERAL, round_trace(), slow_link)
    gather, adding = 2 * 4.1e9 * 7 / 8 / 1e9, (2 + 4) * 4.1e9 / (STREAM * SPEC.memory_bandwidth)
    # copies of what was gathered are in that stream as well: 2 GB in and out for a block
    last = 0.24 * 3e12 / SPEC.rate("bfloat16") + 4e9 / (STREAM * SPEC.memory_bandwidth) + adding * 1 / 4.1
    assert costs.accumulate(1) == pytest.approx(adding)
    assert costs.backward(1) == pytest.approx(gather + last)
    hosted = Costs(replace(costs.candidate, buffer_device="host"), SEVERAL, round_trace(), slow_link)
    assert hosted.backward(1) == pytest.approx(gather + last - adding / 4.1 + hosted.accumulate(1))


def test_nothing_overlaps_on_a_cpu() -> None:
    cpu = replace(SPEC, asynchronous=False, memory_bandwidth=1e30, collective_latency=0.0, all_gather_bandwidth=1e9)
    compute, gather = 1e12 / SPEC.rate("bfloat16"), 2 * 4.1e9 * 7 / 8 / 1e9
    assert Costs(candidate(), SEVERAL, round_trace(), cpu).forward(1) == pytest.approx(compute + gather)


def test_samples_that_are_kept_apart_cost_python_and_traffic() -> None:
    """401 tensors, 2 ms each in a backward of two samples and the forward before it; both rows are read and written."""
    spec = replace(SPEC, ranks_per_node=1, operator_seconds=1e-3, backward_operator_seconds=1e-3, asynchronous=False)
    spec = replace(spec, operator_bandwidth=1e30, backward_operator_bandwidth=10e9, memory_bandwidth=20e9 / STREAM)
    choice = candidate(sync="every_update", residency="resident", checkpointing="none", buffer_dtype="float32")
    workload, trace = replace(SEVERAL, precision="float32"), round_trace(backward_traffic=(0, 0))
    retain, reweight = (
        Costs(replace(choice, schedule=schedule), workload, trace, spec) for schedule in ("retain", "reweight")
    )
    assert reweight.forward(2) == retain.forward(2)  # of a forward without a graph nothing will be asked
    assert retain.accumulate(2) == pytest.approx(0.401 + 3 * 16.4 / 20)  # elementwise: gradient and buffer
    assert reweight.accumulate(2) == pytest.approx(2 * 2 * 16.4 / 10)
    more = reweight.backward(2) - retain.backward(2)
    assert more == pytest.approx(2 * 0.802 - 0.05 + reweight.accumulate(2) - retain.accumulate(2))


def test_more_of_anything_costs_more() -> None:
    base = estimate_time(candidate(), SEVERAL, round_trace(), SPEC).total
    for changes in ({"selected_steps": 6}, {"denoising_steps": 11}, {"prompts_per_update": 5}, {"beta": 0.1}):
        assert estimate_time(candidate(), replace(SEVERAL, **changes), round_trace(), SPEC).total > base


def test_seconds_of_an_all_reduce() -> None:
    """Twice 7/8 of 16.4 GB at 220 GB/s, one collective; each rank steps every parameter."""
    choice = candidate(sync="every_update", residency="resident", buffer_dtype="float32")
    costs = Costs(choice, REPLICATED, IN_FLOAT32, replace(SPEC, collective_latency=0.5))
    assert costs.reduction() == pytest.approx(0.5 + 2 * 7 / 8 * 16.4 / 220)
    assert costs.gather_once() == 0
    sharded = Costs(choice, replace(SEVERAL, precision="float32"), IN_FLOAT32, SPEC)
    assert costs.optimizer() == pytest.approx(8 * sharded.optimizer())
