"""Device memory of one rank at its peak, per candidate: pure functions of workload, trace and hardware.

An update passes through four phases (encoding, backward, reduction, optimizer step); what is held in each is added up
and the largest is the peak. docs/planner.md lists the terms.
"""

import math
from dataclasses import dataclass

from leangrpo.planners.types import BYTES, Candidate, HardwareSpec, Layout, MemoryEstimate, PolicyTrace, Workload

MASTER = 4  # bytes of a float32 master weight, and of the gradient that the optimizer reads
STATES = {"adamw": 8.0, "adamw_8bit": 2.0 + 8 / 256}  # two moments; in 8 bit with two float32 scales per 256 values
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


def estimate_memory(
    candidate: Candidate, workload: Workload, trace: PolicyTrace, hardware: HardwareSpec
) -> MemoryEstimate:
    """The peak of one rank. Frees of the update before are assumed to be complete when the next begins."""
    models = workload.other_models
    static = {
        "parameters": _sharded_parameters(workload, trace, hardware),
        "optimizer_states": int(local_trainable(trace, hardware) * STATES[workload.optimizer]),
        "other_models": sum(model.bytes for model in models if model.place == "device")
        + _reference(workload, trace, hardware),
    }
    phases = _phases(candidate, workload, trace, hardware)
    phase = max(phases, key=lambda name: sum(phases[name].values()))
    held = dict.fromkeys(COMPONENTS, 0) | static | phases[phase]
    peak = sum(held.values())
    host = sum(model.bytes for model in models if model.place == "host")
    if candidate.buffer_device == "host":
        copies = buffer_copies(candidate, workload, hardware.ranks).correction
        host += int(copies * trace.trainable * BYTES[candidate.buffer_dtype])
    margin = int(hardware.reserved_bytes + hardware.fragmentation * peak)
    return MemoryEstimate(**held, peak=peak, margin=margin, phase=phase, host=host)


def _phases(
    candidate: Candidate, workload: Workload, trace: PolicyTrace, hardware: HardwareSpec
) -> dict[str, dict[str, int]]:
    """What is held on the device in each part of an update, beside what always is."""
    copies = buffer_copies(candidate, workload, hardware.ranks)
    buffer = trace.trainable * BYTES[candidate.buffer_dtype] * (candidate.buffer_device == "device")
    gradient = MASTER * local_trainable(trace, hardware)
    alone, accumulates = hardware.ranks == 1, _accumulates(candidate, workload, hardware)
    resident = _resident(candidate, workload, trace, hardware)
    stored = _stored_transitions(candidate, workload, trace, hardware)
    fetched = max((model.bytes for model in workload.other_models if model.place == "host"), default=0)
    return {
        "encoding or decoding": {
            "gathered_parameters": resident,
            "gradient_buffers": int(copies.backward * buffer),
            "gradients": gradient * accumulates,
            "activations": stored,
            "temporaries": fetched,
        },
        "backward": {
            "gathered_parameters": resident or _gathered_in_turn(trace, hardware),
            "gradient_buffers": int(copies.backward * buffer),
            "gradients": gradient * (accumulates and not alone),
            "activations": _activations(candidate, workload, trace, hardware) + stored,
            "temporaries": _backward_temporaries(candidate, workload, trace, hardware, resident),
        },
        "correction and reduction": {
            "gathered_parameters": resident,
            "gradient_buffers": int(copies.correction * buffer),
            "gradients": gradient * (not alone),
            "activations": stored,
            "temporaries": _largest_group(trace, trainable=True) * BYTES[candidate.buffer_dtype] * (buffer == 0),
        },
        "optimizer step": {
            "gathered_parameters": resident if alone or workload.backend in ("zero1", "zero2") else 0,
            "gradient_buffers": buffer * (alone and candidate.buffer_dtype != "float32"),  # else read as it is
            "gradients": gradient,
            "activations": stored,
        },
    }


def _accumulates(candidate: Candidate, workload: Workload, hardware: HardwareSpec) -> bool:
    """Whether reduced gradients wait for more while backwards go on."""
    several = Layout.of(workload, hardware.ranks).rounds > 1
    return candidate.sync == "every_backward" or (candidate.sync == "every_group" and several)


def buffer_copies(candidate: Candidate, workload: Workload, ranks: int) -> BufferCopies:
    """How many full-size gradient buffers a schedule keeps.

    The table of docs/planner.md. `total`: what already has its advantage and waits for the one reduction; with a global
    std one undivided sum per reward term takes its place.
    """
    layout = Layout.of(workload, ranks)
    several = layout.rounds > 1 or ranks == 1
    sums = workload.reward_terms if workload.global_std else 1
    if candidate.schedule != "reweight":
        none = candidate.sync == "every_backward" and ranks > 1
        return BufferCopies(backward=0.0 if none else 1.0, correction=0.0 if none else 1.0)
    running = 1 + workload.reward_terms
    pending, total = {
        "per_sample": (float(layout.samples), float(sums)),
        "streaming": (float(candidate.samples_per_forward + running), float(sums)),
        "streaming_sharded": (candidate.samples_per_forward + running / ranks, sums / ranks),
    }[candidate.buffers]
    keeps_total = candidate.sync == "every_update" and several
    kl = workload.beta > 0 and (workload.global_std or not keeps_total)
    held = pending + float(kl) + (total if keeps_total and layout.rounds > 1 else 0.0)
    return BufferCopies(backward=held, correction=pending + float(kl) + (total if keeps_total else 0.0))


def local_trainable(trace: PolicyTrace, hardware: HardwareSpec) -> int:
    """Trainable parameters whose optimizer states this rank holds."""
    return math.ceil(trace.trainable / hardware.ranks)


def _sharded_parameters(workload: Workload, trace: PolicyTrace, hardware: HardwareSpec) -> int:
    """Float32 masters of the trainable share, and the frozen share in the working precision."""
    frozen = (trace.parameters - trace.trainable) * BYTES[workload.precision]
    if workload.backend in ("zero1", "zero2") and hardware.ranks > 1:
        frozen = 0  # whole on every rank, among the gathered
    return MASTER * local_trainable(trace, hardware) + frozen // hardware.ranks


def _resident(candidate: Candidate, workload: Workload, trace: PolicyTrace, hardware: HardwareSpec) -> int:
    """Bytes of the whole working copy; 0 if parameters are gathered in turn."""
    if hardware.ranks == 1:
        return trace.trainable * BYTES[workload.precision] * (workload.precision != "float32")
    if candidate.residency == "resident" or workload.backend in ("zero1", "zero2"):
        return trace.parameters * BYTES[workload.precision]
    return 0


def _gathered_in_turn(trace: PolicyTrace, hardware: HardwareSpec) -> int:
    """The root, which FSDP2 keeps after its forward, and the largest pair of current and prefetched block."""
    if hardware.ranks == 1:
        return 0
    sizes = [block.parameters for block in trace.blocks]
    pair = max((first + second for first, second in zip(sizes, [*sizes[1:], 0], strict=True)), default=0)
    return (trace.root_parameters + pair) * BYTES[trace.dtype]


def _reference(workload: Workload, trace: PolicyTrace, hardware: HardwareSpec) -> int:
    """The frozen base for the KL term; with adapters it is the policy without them."""
    if workload.beta == 0 or workload.weights == "lora":
        return 0
    return trace.parameters * BYTES[workload.precision] // hardware.ranks


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


def _activations(candidate: Candidate, workload: Workload, trace: PolicyTrace, hardware: HardwareSpec) -> int:
    """One step's graph, or under Retain those of all steps whose advantages are still unknown."""
    k, batch = trace.checkpointed(candidate.checkpointing), candidate.samples_per_forward
    one_step = batch * trace.peak_bytes[k]
    if candidate.schedule != "retain":
        return one_step
    layout = Layout.of(workload, hardware.ranks)
    forwards = layout.samples // batch * (layout.rounds if workload.global_std else 1)
    graph = batch * trace.saved_bytes[k] + trace.fixed_bytes[k]
    return one_step + (workload.selected_steps * forwards - 1) * graph


def _backward_temporaries(
    candidate: Candidate, workload: Workload, trace: PolicyTrace, hardware: HardwareSpec, resident: int
) -> int:
    """Flat buffers of collectives, and gradients on their way into a buffer: one tensor, or a block to be reduced."""
    if hardware.ranks == 1:
        return trace.gradient_bytes
    precision = BYTES[workload.precision]
    flat = 0 if resident else _largest_group(trace) * precision
    if workload.backend in ("zero1", "zero2"):
        flat += min(ZERO_BUCKET, trace.trainable) * precision
    if candidate.sync == "every_backward":
        # FSDP2 holds a block's gradients until they are packed, while the block before is still being reduced
        flat += _largest_group(trace, trainable=True) * (precision + 2 * BYTES[candidate.buffer_dtype])
        return flat
    return flat + trace.gradient_bytes
