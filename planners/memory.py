"""Device memory of one rank at its peak, per candidate: pure functions of workload, trace and hardware.

An update passes through phases (encoding, decoding or reward; rollout; backward; correction; reduction; optimizer
step); what is held in each is added up and the largest is the peak. docs/planner.md lists the terms.
"""

import itertools
import math
from dataclasses import dataclass

from leangrpo.planners.types import BYTES, Candidate, HardwareSpec, Layout, MemoryEstimate, PolicyTrace, Workload

MASTER = 4  # bytes of a float32 master weight, and of the gradient that the optimizer reads
STATES = {"adamw": 8.0, "adamw_8bit": 2.0 + 8 / 256}  # two moments; in 8 bit with two float32 scales per 256 values
WHOLE = ("replicated", "zero1", "zero2")  # backends under which the parameters that compute are never sharded
IN_FLIGHT = 2  # parameter groups that the engine packs and reduces at once under FSDP2
ZERO_BUCKET = 500_000_000  # elements; DeepSpeed's default reduce_bucket_size (zero/config.py), allocated in stages 1, 2

COMPONENTS = (
    "parameters",
    "gathered_parameters",
    "gradients",
    "gradient_buffers",
    "optimizer_states",
    "activations",
    "temporaries",
    "other_models",
)


@dataclass(frozen=True, kw_only=True)
class BufferCopies:
    """Gradient buffers in full-size copies of the trainable parameters."""

    backward: float
    """while graphs are alive"""
    correction: float
    """while advantages are applied"""
    reduction: float
    """while gradients are reduced"""


def estimate_memory(
    candidate: Candidate, workload: Workload, trace: PolicyTrace, hardware: HardwareSpec, *, by_block: bool = False
) -> MemoryEstimate:
    """The peak of one rank. Frees of the update before are assumed to be complete when the next begins.

    `by_block`: as FSDP2 itself would do it under sync=every_backward, which reduces a block's gradients as soon as it
    has them; this engine gathers them in a flat buffer first.
    """
    models = workload.other_models
    static = {
        "parameters": _sharded_parameters(workload, trace, hardware),
        "optimizer_states": 0 if states_on_host(workload, hardware) else state_bytes(workload, trace, hardware),
        "other_models": sum(model.bytes for model in models if model.place == "device")
        + _reference(workload, trace, hardware),
    }
    phases = _phases(candidate, workload, trace, hardware)
    if by_block:
        for name in ("forward with graph", "backward", "correction", "reduction"):
            phases[name]["gradient_buffers"] = 0
    phase = max(phases, key=lambda name: sum((static | phases[name]).values()))
    held = dict.fromkeys(COMPONENTS, 0) | static | phases[phase]
    peak = sum(held.values())
    host = sum(model.bytes for model in models if model.place == "host")
    if candidate.buffer_device == "host":
        copies = buffer_copies(candidate, workload, hardware).correction
        host += int(copies * trace.trainable * BYTES[candidate.buffer_dtype])
    host += state_bytes(workload, trace, hardware) * states_on_host(workload, hardware)
    margin = int(hardware.reserved_bytes + hardware.fragmentation * peak)
    return MemoryEstimate(**held, peak=peak, margin=margin, phase=phase, host=host)


def _phases(
    candidate: Candidate, workload: Workload, trace: PolicyTrace, hardware: HardwareSpec
) -> dict[str, dict[str, int]]:
    """What is held on the device in each part of an update, beside what always is."""
    copies, layout = buffer_copies(candidate, workload, hardware), Layout.of(workload, hardware.ranks)
    buffer = trace.trainable * BYTES[candidate.buffer_dtype] * (candidate.buffer_device == "device")
    gradient = MASTER * local_trainable(workload, trace, hardware)
    resident = _resident(candidate, workload, trace, hardware)
    stored = _stored_transitions(candidate, workload, trace, hardware)
    retained = _retained(candidate, workload, trace, hardware)
    waiting = retained - _graph(candidate, trace) * (retained > 0)  # while the backward of one of them runs
    batch, whole = candidate.samples_per_forward, shard_ranks(workload, hardware) == 1
    accumulates = _accumulates(candidate, workload, hardware)
    always = {"gathered_parameters": resident, "activations": stored, "gradients": gradient * accumulates}
    # Native and Retain make theirs in the first backward, and it is gone when it has been reduced
    is_retain = candidate.schedule == "retain"
    exists = candidate.schedule == "reweight" or (layout.rounds > 1 and candidate.sync == "every_update")
    before = always | {"gradient_buffers": int(copies.backward * buffer) * exists, "activations": stored + retained}
    in_pass = {"gathered_parameters": resident or _gathered_in_turn(workload, trace, hardware)}
    in_backward = {"gradients": gradient * accumulates, "gradient_buffers": int(copies.backward * buffer)}
    flat, resharded = _largest_group(trace) * BYTES[workload.precision], not whole and not resident
    # FSDP2 keeps the flat buffer of a forward's all-gather until the next one is unpacked; a backward does not
    in_forward = in_pass | {"temporaries": flat * resharded}
    graph_so_far = int(_graph(candidate, trace) * _share_until_largest_pair(trace))
    return {
        "gathering": always | _gathering(resident, workload, trace),
        "encoding, decoding or reward": before | {"temporaries": _of_other_models(candidate, workload)},
        "rollout": before | in_forward | {"activations": batch * trace.rollout_bytes + retained + stored},
        "forward with graph": (before if is_retain else in_backward)
        | in_forward
        | {"activations": graph_so_far + waiting + stored},
        "backward": in_backward
        | in_pass
        | {
            "activations": _one_step(candidate, workload, trace) + waiting + stored,
            "temporaries": trace.gradient_bytes,
        },
        "correction": always | {"gradient_buffers": int(copies.correction * buffer)},
        "reduction": {
            "gathered_parameters": resident,
            "gradient_buffers": int(copies.reduction * buffer),
            "gradients": gradient * (accumulates or (whole and candidate.buffer_dtype != "float32")),
            "activations": stored + waiting * (candidate.sync == "every_backward"),
            "temporaries": _reduction_temporaries(candidate, workload, trace, hardware),
        },
        "optimizer step": {
            "gathered_parameters": resident if whole or workload.backend in WHOLE else 0,
            "gradients": gradient,
            "optimizer_states": state_bytes(workload, trace, hardware),
            "activations": stored,
        },
    }


def state_bytes(workload: Workload, trace: PolicyTrace, hardware: HardwareSpec) -> int:
    """Of this rank's optimizer states, wherever they are."""
    return int(local_trainable(workload, trace, hardware) * STATES[workload.optimizer])


def states_on_host(workload: Workload, hardware: HardwareSpec) -> bool:
    """Whether they are out of the device's memory between steps; that of a CPU is the host's."""
    return workload.optimizer_states == "host" and not hardware.is_cpu


def _of_other_models(candidate: Candidate, workload: Workload) -> int:
    """What one of them needs while it works: its activations, and itself if it has to be fetched."""
    batch = candidate.samples_per_forward
    sizes = [model.bytes * (model.place == "host") + batch * model.working_bytes for model in workload.other_models]
    return max(sizes, default=0)


def _accumulates(candidate: Candidate, workload: Workload, hardware: HardwareSpec) -> bool:
    """Whether reduced gradients wait for more while backwards go on."""
    several = Layout.of(workload, hardware.ranks).rounds > 1
    if candidate.schedule == "reweight" and candidate.buffers == "streaming_sharded":
        return several and not workload.global_std
    return candidate.sync == "every_backward" or (candidate.sync == "every_group" and several)


def buffer_copies(candidate: Candidate, workload: Workload, hardware: HardwareSpec) -> BufferCopies:
    """How many full-size gradient buffers a schedule keeps.

    The table of docs/planner.md. `total`: what already has its advantage and waits for the one reduction; with a global
    std one undivided sum per reward term takes its place. Sharded sums go into the sharded gradients instead.
    """
    layout, shards = Layout.of(workload, hardware.ranks), shard_ranks(workload, hardware)
    sums = workload.reward_terms if workload.global_std else 1
    if candidate.schedule != "reweight":
        return BufferCopies(backward=1.0, correction=1.0, reduction=1.0)
    running, batch, with_kl = 1 + workload.reward_terms, candidate.samples_per_forward, workload.beta > 0
    if candidate.buffers == "streaming_sharded":
        held = batch + (running + workload.global_std * sums) / shards + float(with_kl)
        return BufferCopies(backward=held, correction=held, reduction=held)
    pending = float(layout.samples if candidate.buffers == "per_sample" else batch + running)
    with_earlier = candidate.sync == "every_update" and layout.rounds > 1
    # sums that wait for a divisor, and beside them the KL term's total; else both go into the same total
    held = pending + (sums * with_earlier + with_kl if workload.global_std else (with_earlier or with_kl))
    weighted = pending + float(with_kl and workload.global_std) + float(sums)
    if candidate.buffers == "per_sample" and layout.samples == 1 and not workload.global_std:
        weighted = held  # a rank's only sample is weighted in place
    # the schedule and what it holds is gone before the one reduction of an update
    return BufferCopies(
        backward=held, correction=weighted, reduction=1.0 if candidate.sync == "every_update" else weighted
    )


def shard_ranks(workload: Workload, hardware: HardwareSpec) -> int:
    """Ranks that share one copy of masters and optimizer states."""
    if workload.backend == "replicated":
        return 1
    if workload.backend == "hsdp":
        return min(workload.shard_ranks or hardware.ranks_per_node, hardware.ranks)
    return hardware.ranks


def local_trainable(workload: Workload, trace: PolicyTrace, hardware: HardwareSpec) -> int:
    """Trainable parameters whose optimizer states this rank holds."""
    return math.ceil(trace.trainable / shard_ranks(workload, hardware))


def _sharded_parameters(workload: Workload, trace: PolicyTrace, hardware: HardwareSpec) -> int:
    """Float32 masters of the trainable share, and the frozen share in the working precision."""
    frozen = (trace.parameters - trace.trainable) * BYTES[workload.precision]
    if workload.backend in ("zero1", "zero2") and hardware.ranks > 1:
        frozen = 0  # whole on every rank, among the gathered
    return MASTER * local_trainable(workload, trace, hardware) + frozen // shard_ranks(workload, hardware)


def _resident(candidate: Candidate, workload: Workload, trace: PolicyTrace, hardware: HardwareSpec) -> int:
    """Bytes of the whole working copy; 0 if parameters are gathered in turn."""
    if shard_ranks(workload, hardware) == 1:
        return trace.trainable * BYTES[workload.precision] * (workload.precision != "float32")
    if candidate.residency == "resident" or workload.backend in WHOLE:
        return trace.parameters * BYTES[workload.precision]
    return 0


def _gathering(resident: int, workload: Workload, trace: PolicyTrace) -> dict[str, int]:
    """When most is held while a resident policy is gathered: all groups until then, and the last one's flat buffer."""
    if not resident or workload.backend not in ("fsdp2", "hsdp"):
        return {"gathered_parameters": resident}
    sizes = [trace.root_parameters, *(block.parameters for block in trace.blocks)]
    until = list(itertools.accumulate(sizes))
    most = max(range(len(sizes)), key=lambda index: until[index] + sizes[index])
    return {
        "gathered_parameters": until[most] * BYTES[workload.precision],
        "temporaries": sizes[most] * BYTES[workload.precision],
    }


def _gathered_in_turn(workload: Workload, trace: PolicyTrace, hardware: HardwareSpec) -> int:
    """The root, which FSDP2 keeps after its forward, and the largest pair of current and prefetched block."""
    if shard_ranks(workload, hardware) == 1:
        return 0
    return (trace.root_parameters + max(_pairs(trace), default=0)) * BYTES[trace.dtype]


def _pairs(trace: PolicyTrace) -> list[int]:
    """Parameters of every block and the next."""
    sizes = [block.parameters for block in trace.blocks]
    return [first + second for first, second in zip(sizes, [*sizes[1:], 0], strict=True)]


def _share_until_largest_pair(trace: PolicyTrace) -> float:
    """Part of the blocks that a forward has been through when most is gathered."""
    pairs = _pairs(trace)
    last = max((index for index, size in enumerate(pairs) if size == max(pairs)), default=-1)
    return (last + 1) / max(1, len(pairs))


def _reference(workload: Workload, trace: PolicyTrace, hardware: HardwareSpec) -> int:
    """The frozen base for the KL term, whole under ZeRO; with adapters it is the policy without them."""
    if workload.beta == 0 or workload.weights == "lora":
        return 0
    shards = 1 if workload.backend.startswith("zero") else shard_ranks(workload, hardware)
    return trace.parameters * BYTES[workload.precision] // shards


def _largest_group(trace: PolicyTrace, trainable: bool = False) -> int:
    sizes = [block.trainable if trainable else block.parameters for block in trace.blocks]
    return max([trace.root_trainable if trainable else trace.root_parameters, *sizes])


def _stored_transitions(candidate: Candidate, workload: Workload, trace: PolicyTrace, hardware: HardwareSpec) -> int:
    """Latents before and after every selected step of all local samples, and what their steps share.

    Native also keeps the means, which are part of the graph or gone under the other schedules.
    """
    layout = Layout.of(workload, hardware.ranks)
    tensors = workload.selected_steps * (2 if candidate.schedule == "native" else 1) + 1
    return layout.rounds * (layout.samples * tensors * trace.latent_bytes + trace.shared_bytes)


def _k(candidate: Candidate, trace: PolicyTrace) -> int:
    return trace.checkpointed(candidate.checkpointing)


def _graph(candidate: Candidate, trace: PolicyTrace) -> int:
    """What one step keeps for its backward."""
    k = _k(candidate, trace)
    return candidate.samples_per_forward * trace.saved_bytes[k] + trace.fixed_bytes[k]


def _one_step(candidate: Candidate, workload: Workload, trace: PolicyTrace) -> int:
    """The most at one time in a step's backward; with KL the reference runs beside the graph as well.

    Reweight goes through the graph of a step with KL twice, so that the first time nothing of it is freed.
    """
    batch, k = candidate.samples_per_forward, _k(candidate, trace)
    peak = batch * trace.peak_bytes[k]
    if workload.beta == 0:
        return peak
    graph = _graph(candidate, trace)
    twice = batch * trace.transient_bytes * (candidate.schedule == "reweight")
    return max(peak, graph + max(batch * trace.rollout_bytes, twice))


def _retained(candidate: Candidate, workload: Workload, trace: PolicyTrace, hardware: HardwareSpec) -> int:
    """Under Retain the graphs of all steps whose advantages are still unknown."""
    if candidate.schedule != "retain":
        return 0
    layout = Layout.of(workload, hardware.ranks)
    forwards = layout.samples // candidate.samples_per_forward * (layout.rounds if workload.global_std else 1)
    return workload.selected_steps * forwards * _graph(candidate, trace)


def _reduction_temporaries(candidate: Candidate, workload: Workload, trace: PolicyTrace, hardware: HardwareSpec) -> int:
    """Parameter groups that are packed and under way, and what this rank has received of all of them."""
    buffer = BYTES[candidate.buffer_dtype]
    fetched = _largest_group(trace, trainable=True) * buffer
    if shard_ranks(workload, hardware) == 1:
        return fetched * (candidate.buffer_device == "host")
    if workload.backend not in ("fsdp2", "hsdp"):
        bucket = min(ZERO_BUCKET, trace.trainable) * BYTES[workload.precision] * (workload.backend != "zero3")
        return bucket + MASTER * local_trainable(workload, trace, hardware)
    under_way = IN_FLIGHT + hardware.is_cpu  # gloo reduces a copy of what it is given
    return under_way * fetched + buffer * local_trainable(workload, trace, hardware)
