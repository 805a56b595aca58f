"""Seconds of the parts that an update is made of: a forward, a backward, a reduction, ...

Compute is FLOPs over a sustained rate, plus the traffic of gradient buffers over memory bandwidth. All-gathers are
prefetched by one block, as FSDP2 does it: while block i computes, block i + 1 is gathered, so that a pass takes the
slower of the two at every block. Whether reduce-scatters hide behind compute is a property of the machine, and of who
reduces: this engine does it when a backward is over.
"""

from dataclasses import dataclass

from leangrpo.planners.memory import WHOLE, local_trainable, shard_ranks, state_bytes, states_on_host
from leangrpo.planners.types import BYTES, Candidate, HardwareSpec, Layout, PolicyTrace, Workload

STREAM = 0.9  # part of the data-sheet memory bandwidth that streaming kernels sustain
STEP_OPERATORS = 30  # around the policy in every step: noise, the sampler's Gaussian, log-probability (engine/policies)
LOSS_OPERATORS = 50  # of a step's ratio, clip and their statistics; Reweight has none of them (engine/replay.py)
OPTIMIZER_OPERATORS = 3  # per trainable tensor: its part of the clipped norm, and of AdamW's loop over tensors
CAPTURED_OPERATORS = 2  # per trainable tensor and pass with a graph, samples kept apart (engine/per_sample.py)
ADAMW_TRAFFIC = 28.0  # bytes per parameter: gradient read; weight and two moments read and written, float32


@dataclass(frozen=True)
class Costs:
    """Of one candidate. Methods return seconds; `samples`: those of one forward."""

    candidate: Candidate
    workload: Workload
    trace: PolicyTrace
    hardware: HardwareSpec
    by_block: bool = False
    """under sync=every_backward: reduced as FSDP2 itself does it, block by block while the backward goes on"""

    def forward(self, samples: int) -> float:
        """Of one forward, with what it waits for parameters."""
        whole = self._forward_seconds(samples)
        outside = STEP_OPERATORS * self.hardware.operator_seconds * (not self.hardware.asynchronous)
        return outside + self._pass([whole * part for part in self._parts], 0.0)

    def backward(self, samples: int) -> float:
        """Of one backward: recomputation, waiting for parameters, and the gradients' way into a buffer or reduction."""
        k = self.trace.checkpointed(self.candidate.checkpointing)
        whole, again = self._backward_seconds(samples), self._forward_seconds(samples)
        per_block = self.hardware.checkpoint_block_seconds
        again += self.trace.forward_operators * self.hardware.checkpoint_operator_seconds
        again += self._captured(samples) * self.hardware.operator_seconds * (not self.hardware.asynchronous)
        # the root is never checkpointed
        computes = [
            part * whole + (part * again + per_block) * (0 < index <= k) for index, part in enumerate(self._parts)
        ]
        loss = LOSS_OPERATORS * (self.candidate.schedule != "reweight")
        outside = loss * self.hardware.operator_seconds * (not self.hardware.asynchronous)
        by_block = self.by_block and self.reduces_every_backward and self._shards > 1  # and without a flat buffer
        hides = by_block and self.hardware.overlaps_reduce
        added = 0.0 if by_block else self.accumulate(samples)
        if not self._on_host:  # hooks add while the backward goes on, in the stream that computes
            computes = [one + added * part for one, part in zip(computes, self._trainable_parts, strict=True)]
            added = 0.0  # to a buffer on the host, over the link that all-gathers use
        passed = self._pass(computes, self.reduction() if hides else 0.0) + added
        return outside + passed + (self.reduction() if self.reduces_every_backward and not hides else 0.0)

    @property
    def reduces_every_backward(self) -> bool:
        """Whether collectives of gradients are part of the backward."""
        return self.candidate.sync == "every_backward" and self.hardware.ranks > 1

    def gather_once(self) -> float:
        """Of gathering, after an optimizer step, everything that then stays resident."""
        if self._gathers_in_turn or self._shards == 1:
            return 0.0
        size = self.trace.trainable if self.workload.backend in WHOLE else self.trace.parameters
        return self._groups_latency + self._gather_seconds(size * self._precision)

    def reduction(self) -> float:
        """Of one reduction of all trainable gradients: packing, the collectives, adding the shard to the gradient."""
        hardware, size, local = self.hardware, self.trace.trainable * self._buffer, self._local_trainable
        if hardware.ranks == 1:
            return 0.0
        fetched = size / hardware.host_bandwidth if self._on_host else 0.0
        if self.workload.backend == "replicated":  # the flat buffer as it is
            return fetched + hardware.collective_latency + self._all_reduce_seconds(size, hardware.ranks)
        packing = self.memory(2 * size + 3 * 4 * local)
        times = 2 if self.workload.backend in WHOLE else 1  # ZeRO 1 and 2 execute an all-reduce
        inside = self._bandwidth(hardware.reduce_scatter_bandwidth, self._shards)
        seconds = packing + times * (self._groups_latency + size * _ring(self._shards) / inside)
        if self.workload.backend == "hsdp":
            copies = hardware.ranks // self._shards
            seconds += self._groups_latency + self._all_reduce_seconds(size / self._shards, copies)
        return fetched + seconds

    def accumulate(self, samples: int) -> float:
        """Of adding one backward's gradients to local buffers.

        Where samples are kept apart, matrix products add to the rows of all samples themselves; else one hook per
        tensor adds what autograd made.
        """
        rows = samples if self.candidate.schedule == "reweight" else 1
        buffer = 2 * self.trace.trainable * self._buffer  # read and written
        gradient = self.trace.trainable * self._precision
        if self._on_host:
            moved = gradient / self.hardware.host_bandwidth
            return rows * (moved + (gradient + buffer) / self.hardware.host_memory_bandwidth)
        if rows == 1:
            issued = self.trace.trainable_tensors * self.hardware.backward_operator_seconds
            return self.memory(gradient + buffer) + issued * self.hardware.is_cpu
        if self.hardware.is_cpu:
            return _over((rows * buffer, 0), 0, self.hardware.backward_operator_bandwidth)
        return self.memory(rows * buffer)

    def correction(self) -> float:
        """Of weighting the buffers of one group; under streaming_sharded with the reductions in it."""
        if self.candidate.schedule != "reweight":
            return 0.0
        layout = Layout.of(self.workload, self.hardware.ranks)
        samples, running = layout.samples, 1 + self.workload.reward_terms
        # per_sample: read every row, add to one. streaming: per sample read and add to every running sum, zero the row;
        # then fold the sums
        moved = samples + 2 if self.candidate.buffers == "per_sample" else samples * (1 + 3 * running) + 3 * running
        traffic = moved * self.trace.trainable * self._buffer
        seconds = traffic / self.hardware.host_memory_bandwidth if self._on_host else self.memory(traffic)
        if self.candidate.buffers == "streaming_sharded":
            seconds += running * self.reduction() * samples / self.candidate.samples_per_forward
        return seconds

    def optimizer(self) -> float:
        """Of one step on this rank's shard; states on the host come and go."""
        moved = 2 * state_bytes(self.workload, self.trace, self.hardware) * states_on_host(self.workload, self.hardware)
        issued = OPTIMIZER_OPERATORS * self.trace.trainable_tensors * self.hardware.operator_seconds
        seconds = self._busy(self.memory(ADAMW_TRAFFIC * self._local_trainable), issued)
        return seconds + moved / self.hardware.host_bandwidth

    def other_models(self, per: str, uses: int) -> float:
        """Of `uses` uses of the frozen models per "prompt" or "sample"; those on the host are fetched once for all."""
        seconds = 0.0
        for model in self.workload.other_models:
            if model.per == per:
                fetched = model.bytes / self.hardware.host_bandwidth if model.place == "host" else 0.0
                seconds += fetched + uses * self.compute(model.flops)
        return seconds

    def memory(self, traffic: float) -> float:
        """Of `traffic` bytes read or written by element-wise operations on the device."""
        return traffic / (STREAM * self.hardware.memory_bandwidth)

    def compute(self, flops: float, *, backward: bool = False) -> float:
        """Of `flops` operations."""
        return flops / self.hardware.rate(self.workload.precision, backward=backward)

    def _forward_seconds(self, samples: int) -> float:
        trace, hardware = self.trace, self.hardware
        traffic = _over(trace.forward_traffic, samples, hardware.operator_bandwidth)
        issue = trace.forward_operators * hardware.operator_seconds
        return self._busy(self.compute(samples * trace.forward_flops) + traffic, issue)

    def _backward_seconds(self, samples: int) -> float:
        """Without recomputation; with what the forward before it pays for having a graph."""
        trace, hardware = self.trace, self.hardware
        traffic = _over(trace.backward_traffic, samples, hardware.backward_operator_bandwidth)
        captured = self._captured(samples)
        issue = (trace.backward_operators + captured) * hardware.backward_operator_seconds
        issue += trace.forward_operators * hardware.graph_operator_seconds + captured * hardware.operator_seconds
        return self._busy(self.compute(samples * trace.backward_flops, backward=True) + traffic, issue)

    def _captured(self, samples: int) -> int:
        """Operators' worth of Python in a pass with a graph: layers that are functions of autograd of their own."""
        kept_apart = self.candidate.schedule == "reweight" and samples > 1
        return CAPTURED_OPERATORS * self.trace.trainable_tensors * kept_apart

    @property
    def _parts(self) -> list[float]:
        """Of a pass, by FLOPs: the root's, and every block's."""
        blocks = [block.forward_flops / self.trace.forward_flops for block in self.trace.blocks]
        return [1 - sum(blocks), *blocks]

    @property
    def _trainable_parts(self) -> list[float]:
        """Of all trainable parameters: the root's, and every block's."""
        trained = [self.trace.root_trainable, *(block.trainable for block in self.trace.blocks)]
        return [size / (self.trace.trainable or 1) for size in trained]

    def _busy(self, compute: float, issue: float) -> float:
        """Of computing, and of issuing the operators that do it."""
        return max(compute, issue) if self.hardware.asynchronous else compute + issue

    def _pass(self, computes: list[float], reduced: float) -> float:
        """Through root and blocks, `computes` seconds each; `reduced`: seconds of reductions to hide."""
        sizes = [self.trace.root_parameters, *(block.parameters for block in self.trace.blocks)]
        links = [reduced * part for part in self._trainable_parts]
        if self._gathers_in_turn:
            latency = self.hardware.collective_latency
            gathers = [latency + self._gather_seconds(size * self._precision) for size in sizes]
            links = [link + gather for link, gather in zip(links, gathers, strict=True)]
            # what was gathered is split into parameters by copying, in the stream that computes
            copies = [self.memory(2 * size * self._precision) for size in sizes]
            computes = [compute + copy for compute, copy in zip(computes, copies, strict=True)]
        if self.hardware.is_cpu:  # the threads that send and receive compete with those that compute
            return sum(links) + sum(computes)
        return links[0] + sum(map(max, computes, [*links[1:], 0.0]))

    @property
    def _shards(self) -> int:
        return shard_ranks(self.workload, self.hardware)

    @property
    def _local_trainable(self) -> int:
        return local_trainable(self.workload, self.trace, self.hardware)

    @property
    def _gathers_in_turn(self) -> bool:
        return self._shards > 1 and self.candidate.residency == "resharded" and self.workload.backend not in WHOLE

    @property
    def _on_host(self) -> bool:
        return self.candidate.buffer_device == "host"

    @property
    def _precision(self) -> int:
        return BYTES[self.workload.precision]

    @property
    def _buffer(self) -> int:
        return BYTES[self.candidate.buffer_dtype]

    @property
    def _groups_latency(self) -> float:
        """Of one collective per parameter group."""
        return (len(self.trace.blocks) + 1) * self.hardware.collective_latency

    def _gather_seconds(self, size: float) -> float:
        return size * _ring(self._shards) / self._bandwidth(self.hardware.all_gather_bandwidth, self._shards)

    def _all_reduce_seconds(self, size: float, ranks: int) -> float:
        """A reduce-scatter and an all-gather of `size` bytes; those of hsdp's copies cross nodes if there are any."""
        rates = (self.hardware.reduce_scatter_bandwidth, self.hardware.all_gather_bandwidth)
        return sum(size * _ring(ranks) / self._bandwidth(rate, self.hardware.ranks) for rate in rates)

    def _bandwidth(self, inside: float, ranks: int) -> float:
        """A ring of `ranks` that spans several nodes is as slow as the links between them."""
        return inside if ranks <= self.hardware.ranks_per_node else min(inside, self.hardware.node_bandwidth)


def _over(traffic: tuple[int, int], samples: int, bandwidth: float | None) -> float:
    fixed, of_samples = traffic
    return 0.0 if bandwidth is None else (fixed + samples * of_samples) / bandwidth


def _ring(ranks: int) -> float:
    """Part of the bytes that a ring moves through every rank."""
    return (ranks - 1) / ranks
