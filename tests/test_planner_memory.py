"""Memory of single candidates, against hand-computed figures of a policy made of round numbers."""

from dataclasses import replace

import pytest
from planning import candidate, round_trace, round_workload

from leangrpo.planners.candidates import refusal
from leangrpo.planners.costs import Costs
from leangrpo.planners.hardware import parse_hardware
from leangrpo.planners.memory import buffer_copies, estimate_memory
from leangrpo.planners.types import Layout, OtherModel

# M = 16 on 8 ranks: g = 8, Q = 2; 4 prompts are 4 rounds.
SEVERAL = round_workload(group_size=16, prompts_per_update=4)
ONE = round_workload(group_size=16, prompts_per_update=1)
SPEC = replace(parse_hardware("8xA100-80"), operator_seconds=0.0, backward_operator_seconds=0.0)
REPLICATED = replace(SEVERAL, backend="replicated", precision="float32")
IN_FLOAT32 = round_trace(dtype="float32")


@pytest.mark.parametrize(
    "schedule, buffers, every_group, every_update",
    [
        ("native", "per_sample", 1, 1),
        ("retain", "per_sample", 1, 1),
        ("reweight", "per_sample", 2, 3),
        ("reweight", "streaming", 3, 4),
        ("reweight", "streaming_sharded", 1 + 2 / 8, 1 + 2 / 8),  # the total is in the sharded gradients
    ],
)
def test_buffer_copies(schedule: str, buffers: str, every_group: float, every_update: float) -> None:
    for sync, workload, expected in (
        ("every_group", SEVERAL, every_group),
        ("every_update", SEVERAL, every_update),
        ("every_update", ONE, every_group),
    ):
        copies = buffer_copies(candidate(schedule=schedule, buffers=buffers, sync=sync), workload, SPEC)
        assert copies.backward == expected
        assert copies.correction == (every_update if buffers != "streaming_sharded" else expected)
        one_total = sync == "every_update" and buffers != "streaming_sharded"
        assert copies.reduction == (1 if one_total else copies.correction)


def test_buffers_for_kl_and_separate_rewards() -> None:
    streaming = candidate(schedule="reweight", buffers="streaming", sync="every_update")
    per_sample = replace(streaming, buffers="per_sample")
    assert buffer_copies(streaming, replace(SEVERAL, reward_terms=3), SPEC).backward == 4 + 2
    assert buffer_copies(per_sample, replace(SEVERAL, beta=0.1), SPEC).backward == 3  # straight into the total
    assert buffer_copies(per_sample, replace(SEVERAL, beta=0.1, global_std=True), SPEC).backward == 4
    assert buffer_copies(replace(per_sample, sync="every_group"), replace(SEVERAL, beta=0.1), SPEC).backward == 3
    assert buffer_copies(per_sample, replace(ONE, beta=0.1), SPEC).backward == 3  # the KL term makes the total


def test_a_rank_with_one_sample_weighs_it_in_place() -> None:
    """M = 8 on 8 ranks: one buffer, two where an earlier group's total, a KL term or undivided sums exist already."""
    alone = replace(SEVERAL, group_size=8)
    for sync, changes, correction in (
        ("every_group", {}, 1),
        ("every_update", {"prompts_per_update": 1}, 1),
        ("every_update", {}, 2),
        ("every_group", {"beta": 0.1}, 2),
        ("every_update", {"prompts_per_update": 1, "global_std": True}, 2),
    ):
        choice = candidate(schedule="reweight", sync=sync)
        assert buffer_copies(choice, replace(alone, **changes), SPEC).correction == correction


def test_memory_of_native_by_component() -> None:
    """4.1e9 parameters in BF16 on 8 ranks, everything checkpointed, every backward reduced."""
    memory = estimate_memory(candidate(), SEVERAL, round_trace(), SPEC)
    assert memory.phase == "forward with graph"
    assert memory.parameters == 4 * 4.1e9 / 8
    assert memory.optimizer_states == 8 * 4.1e9 / 8
    assert memory.gradients == 4 * 4.1e9 / 8
    assert memory.gathered_parameters == 2 * 2.1e9
    assert memory.gradient_buffers == 2 * 4.1e9
    stored = 4 * (2 * 11 * 10**5 + 10**6)  # rounds x (samples x (S + 1 latents, S means), shared inputs)
    graph = round_trace().saved_bytes[4] + round_trace().fixed_bytes[4]
    assert memory.activations == 0.75 * graph + stored  # three of four blocks have run when most is gathered
    assert memory.temporaries == 2e9  # the flat buffer of one block
    resident = estimate_memory(candidate(residency="resident"), SEVERAL, round_trace(peak_bytes=(9 * 10**9,) * 5), SPEC)
    assert resident.phase == "backward"
    assert resident.activations == 9e9 + stored
    assert resident.temporaries == 1e8  # the largest gradient
    by_block = estimate_memory(candidate(), SEVERAL, round_trace(), SPEC, by_block=True)
    assert memory.peak - by_block.peak == 2 * 4.1e9
    assert memory.peak + memory.margin < SPEC.memory_bytes


def test_retain_holds_every_selected_step_of_a_group() -> None:
    native, retain = (
        estimate_memory(candidate(schedule=schedule, residency="resident"), SEVERAL, round_trace(), SPEC)
        for schedule in ("native", "retain")
    )
    graph = round_trace().saved_bytes[4] + round_trace().fixed_bytes[4]
    means = 4 * 2 * 5 * 10**5
    assert retain.activations - native.activations + means == (5 * 2 - 1) * graph
    waiting = estimate_memory(
        candidate(schedule="retain", residency="resident"), replace(SEVERAL, global_std=True), round_trace(), SPEC
    )
    assert waiting.activations - native.activations + means == (5 * 2 * 4 - 1) * graph


def test_states_on_the_host_are_on_the_device_during_the_step_only() -> None:
    """Native with every backward reduced: the states less while a forward runs, over the bus and back in the step."""
    waiting, states = replace(SEVERAL, optimizer_states="host"), 8 * 4.1e9 / 8
    base, hosted = (estimate_memory(candidate(), one, round_trace(), SPEC) for one in (SEVERAL, waiting))
    assert hosted.phase == base.phase == "forward with graph"
    assert (hosted.optimizer_states, hosted.peak, hosted.host) == (0, base.peak - states, base.host + states)
    two = replace(SPEC, ranks_per_node=2)
    small = round_trace(peak_bytes=(0,) * 5, saved_bytes=(0,) * 5, fixed_bytes=(0,) * 5)
    stepping = estimate_memory(candidate(), waiting, small, two)
    assert (stepping.phase, stepping.optimizer_states) == ("optimizer step", 8 * 4.1e9 / 2)
    here, there = (Costs(candidate(), one, round_trace(), SPEC).optimizer() for one in (SEVERAL, waiting))
    assert there - here == pytest.approx(2 * states / SPEC.host_bandwidth)
    cpu = replace(parse_hardware("8xCPU"), operator_seconds=0.0)
    assert estimate_memory(candidate(), waiting, round_trace(), cpu).optimizer_states == states  # the same memory


def test_residency_optimizer_and_host() -> None:
    base = estimate_memory(candidate(), SEVERAL, round_trace(), SPEC)
    resident = estimate_memory(candidate(residency="resident"), SEVERAL, round_trace(), SPEC)
    assert resident.gathered_parameters == 2 * 4.1e9
    small = estimate_memory(candidate(), replace(SEVERAL, optimizer="adamw_8bit"), round_trace(), SPEC)
    assert small.optimizer_states == pytest.approx(base.optimizer_states / 4, rel=0.02)
    on_host = candidate(schedule="reweight", sync="every_group", buffer_device="host")
    hosted = estimate_memory(on_host, SEVERAL, round_trace(), SPEC)
    assert hosted.gradient_buffers == 0
    assert hosted.host == 3 * 2 * 4.1e9  # two samples, and the sum of the group
    encoder = OtherModel(name="text encoder", bytes=70 * 10**9, flops=0.0, per="prompt", place="host")
    fetched = estimate_memory(candidate(), replace(SEVERAL, other_models=(encoder,)), round_trace(), SPEC)
    assert fetched.phase == "encoding, decoding or reward" and fetched.temporaries == encoder.bytes


def test_one_rank_holds_everything_once() -> None:
    alone = replace(SPEC, ranks_per_node=1)
    choice = candidate(sync="every_update", residency="resident", buffer_dtype="float32")
    in_float32 = estimate_memory(choice, replace(SEVERAL, precision="float32"), round_trace(dtype="float32"), alone)
    assert (in_float32.parameters, in_float32.gathered_parameters) == (4 * 4.1e9, 0)
    assert in_float32.gradient_buffers == 4 * 4.1e9
    in_bfloat16 = estimate_memory(choice, SEVERAL, round_trace(), alone)
    assert (in_bfloat16.parameters, in_bfloat16.gathered_parameters) == (4 * 4.1e9, 2 * 4.1e9)


def test_zero_1_keeps_parameters_whole_and_has_a_bucket() -> None:
    choice = candidate(sync="every_update")
    memory = estimate_memory(choice, replace(SEVERAL, backend="zero1"), round_trace(), SPEC)
    assert memory.gathered_parameters == 2 * 4.1e9
    assert memory.phase == "reduction"
    assert memory.temporaries == 5e8 * 2 + 4 * 4.1e9 / 8


def test_layout() -> None:
    assert Layout.of(round_workload(group_size=12), 8) == Layout(ranks_per_group=4, samples=3, rounds=4)
    assert Layout.of(SEVERAL, 8) == Layout(ranks_per_group=8, samples=2, rounds=4)
    assert Layout.of(SEVERAL, 1) == Layout(ranks_per_group=1, samples=16, rounds=4)
    assert Layout.of(round_workload(prompts_per_update=3, group_size=4), 8).rounds == 2


def test_a_forward_that_gathers_keeps_a_flat_buffer_more_than_a_backward() -> None:
    """Root and two blocks, 2.1e9, and a third of 1e9 flat; of four equal blocks the third has run by then."""
    trace = round_trace(peak_bytes=(10**9,) * 5, saved_bytes=(8 * 10**9,) * 5, fixed_bytes=(0,) * 5)
    memory = estimate_memory(candidate(sync="every_update", checkpointing="none"), SEVERAL, trace, SPEC)
    assert memory.phase == "forward with graph"
    assert (memory.gathered_parameters, memory.temporaries) == (2 * 2.1e9, 2e9)
    assert memory.activations == 0.75 * 8e9 + 4 * (2 * 11 * 10**5 + 10**6)


def test_gathering_holds_a_flat_buffer_beside_what_is_gathered() -> None:
    choice = candidate(sync="every_update", residency="resident", buffer_dtype="bfloat16")
    small = round_trace(trainable_tensors=2, peak_bytes=(0,) * 5, rollout_bytes=0, gradient_bytes=0)
    frozen = replace(
        small,
        blocks=tuple(replace(block, trainable=10**6) for block in small.blocks),
        root_trainable=0,
    )
    memory = estimate_memory(choice, SEVERAL, frozen, SPEC)
    assert (memory.phase, memory.gathered_parameters, memory.temporaries) == ("gathering", 2 * 4.1e9, 2e9)
    for last, gathered, flat in ((9 * 10**8, 4e9, 9e8), (10**8, 3.1e9, 1e9)):  # the last group's, or the one before
        blocks = (*frozen.blocks[:3], replace(frozen.blocks[3], parameters=last))
        memory = estimate_memory(choice, SEVERAL, replace(frozen, blocks=blocks), SPEC)
        assert memory.phase == "gathering"
        assert (memory.gathered_parameters, memory.temporaries) == (2 * gathered, 2 * flat)
    replicated = estimate_memory(choice, replace(SEVERAL, backend="replicated"), frozen, SPEC)
    assert replicated.phase != "gathering"


def test_replicated_ranks_hold_everything_and_reduce_one_flat_buffer() -> None:
    """4.1e9 parameters in float32 on 8 ranks: as on one, and where reduced gradients wait one gradient more."""
    choice = candidate(sync="every_update", residency="resident", buffer_dtype="float32")
    memory = estimate_memory(choice, REPLICATED, IN_FLOAT32, SPEC)
    assert (memory.parameters, memory.gathered_parameters) == (4 * 4.1e9, 0)
    assert (memory.optimizer_states, memory.gradients, memory.gradient_buffers) == (8 * 4.1e9, 0, 4 * 4.1e9)
    waiting = estimate_memory(replace(choice, sync="every_group"), REPLICATED, IN_FLOAT32, SPEC)
    assert waiting.peak - memory.peak == waiting.gradients == 4 * 4.1e9
    in_bfloat16 = estimate_memory(choice, replace(REPLICATED, precision="bfloat16"), round_trace(), SPEC)
    assert in_bfloat16.gathered_parameters == 2 * 4.1e9


def test_hsdp_shards_inside_a_node_and_reduces_shards_across() -> None:
    """2 nodes of 8, shards of 8: memory of one node; one all-reduce of 1/8 of the gradient between the two copies."""
    one, two = parse_hardware("8xA100-80"), parse_hardware("2x8xA100-80")
    workload = replace(SEVERAL, backend="hsdp", shard_ranks=8, group_size=32)
    choice = candidate(sync="every_update", buffer_dtype="float32")
    hsdp = estimate_memory(choice, workload, round_trace(), two)
    fsdp = estimate_memory(choice, replace(workload, backend="fsdp2", group_size=16), round_trace(), one)
    assert (hsdp.parameters, hsdp.optimizer_states) == (fsdp.parameters, fsdp.optimizer_states)
    assert hsdp.gathered_parameters == fsdp.gathered_parameters
    inside = Costs(choice, replace(SEVERAL, group_size=16), round_trace(), one)
    across = Costs(choice, workload, round_trace(), two)
    assert across.forward(1) == pytest.approx(inside.forward(1))  # gathered inside
    between = 5 * two.collective_latency + 2 * 1 / 2 * (4 * 4.1 / 8) / (two.node_bandwidth / 1e9)
    assert across.reduction() == pytest.approx(inside.reduction() + between)


def test_packed_gradients_under_way() -> None:
    """Two groups of 1e9 in float32 and what was received of all, 4.1e9 / 8; gloo reduces a copy of a third."""
    choice = candidate(sync="every_update", buffer_dtype="float32", checkpointing="all")
    small = round_trace(peak_bytes=(0,) * 5)
    memory = estimate_memory(choice, SEVERAL, small, SPEC)
    assert (memory.phase, memory.temporaries) == ("reduction", 2 * 4e9 + 4 * 4.1e9 / 8)
    on_cpu = estimate_memory(choice, SEVERAL, small, replace(SPEC, asynchronous=False))
    assert on_cpu.temporaries == 3 * 4e9 + 4 * 4.1e9 / 8


def test_a_reward_model_works_while_graphs_are_retained() -> None:
    scorer = OtherModel(name="reward", bytes=0, flops=0.0, per="sample", place="device", working_bytes=50 * 10**9)
    retain = estimate_memory(
        candidate(schedule="retain"), replace(SEVERAL, other_models=(scorer,)), round_trace(), SPEC
    )
    assert retain.phase == "encoding, decoding or reward"
    assert retain.temporaries == 50e9
    graph = round_trace().saved_bytes[4] + round_trace().fixed_bytes[4]
    assert retain.activations >= 5 * 2 * graph


def test_a_rollout_under_retain_ends_with_all_graphs_and_a_forward() -> None:
    trace = round_trace(rollout_bytes=10**11)
    retain = estimate_memory(candidate(schedule="retain"), SEVERAL, trace, SPEC)
    graph = trace.saved_bytes[4] + trace.fixed_bytes[4]
    assert retain.phase == "rollout"
    assert retain.activations == 10**11 + 5 * 2 * graph + 4 * (2 * 6 * 10**5 + 10**6)


def test_kl_needs_the_reference_beside_the_graph_and_reweight_the_graph_twice() -> None:
    """Nothing checkpointed: a graph of 4.011 GB; the reference's forward takes 5 GB, a backward beside it 3 or 7."""
    choice = candidate(checkpointing="none", residency="resident", buffer_dtype="float32", sync="every_update")
    workload = replace(REPLICATED, beta=0.1)
    for schedule, transient, more in (("native", 7, 5), ("reweight", 3, 5), ("reweight", 7, 7)):
        trace = round_trace(rollout_bytes=5 * 10**9, transient_bytes=transient * 10**9)
        memory = estimate_memory(replace(choice, schedule=schedule), workload, trace, SPEC)
        tensors = 11 if schedule == "native" else 6  # S + 1 latents, and S means
        stored = 4 * (2 * tensors * 10**5 + 10**6)
        graph = trace.saved_bytes[0] + trace.fixed_bytes[0]
        assert memory.phase == "backward"
        assert memory.activations == graph + more * 10**9 + stored


def test_buffers_on_the_host_of_a_cpu_save_nothing() -> None:
    cpu = parse_hardware("2xCPU-200GB")
    assert "the host's memory is the device's" in refusal(
        candidate(sync="every_group", buffer_device="host", residency="resident"), SEVERAL, round_trace(), cpu
    )
