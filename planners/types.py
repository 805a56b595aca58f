"""Types that the planner and the engine share: `Candidate`, the eight choices that decide how an update is executed,
and what they are judged by: `Workload`, `PolicyTrace`, `HardwareSpec`; what comes out: `MemoryEstimate`,
`TimeEstimate`, `Estimate`. Bytes, seconds and floating-point operations throughout, of one rank unless said otherwise.
"""

import math
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Literal

from leangrpo.configs.checks import ConfigError
from leangrpo.configs.ranks import ranks_per_prompt
from leangrpo.configs.schema import (
    CHOICES,
    Backend,
    BufferDevice,
    BufferDtype,
    Buffers,
    Checkpointing,
    Config,
    Residency,
    Schedule,
    Sync,
)

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to execute an update; the same names in YAML, on the command line and in code."""

    schedule: Schedule
    buffers: Buffers
    buffer_dtype: BufferDtype
    buffer_device: BufferDevice
    sync: Sync
    checkpointing: Checkpointing
    residency: Residency
    samples_per_forward: int

    @classmethod
    def from_config(cls, config: Config) -> "Candidate":
        """The choices of `config`. ConfigError if one is still auto."""
        choices = {name: getattr(config, name) for name in CHOICES}
        for name, value in choices.items():
            if value == "auto":
                raise ConfigError(
                    f"{name}=auto: nothing has been chosen yet; plan first: "
                    "config = engine.plan(config).candidate.resolve(config), or see leangrpo plan"
                )
        return cls(**choices)

    def resolve(self, config: Config) -> Config:
        """`config` with these choices."""
        return replace(config, **asdict(self))


assert tuple(Candidate.__dataclass_fields__) == CHOICES


@dataclass(frozen=True, kw_only=True)
class OtherModel:
    """A frozen model beside the policy: text encoder, VAE, reward model. It is whole on every rank that uses it."""

    name: str
    bytes: int
    flops: float
    """of one use"""
    per: Literal["prompt", "sample"]
    place: Literal["device", "host"]
    """host: moved to the device for its uses, between which its memory is free"""
    working_bytes: int = 0
    """activations of one use; 0 where nobody has measured them"""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one update has to compute, whoever computes it. The letters are those of the paper."""

    weights: Literal["full", "lora"]
    group_size: int
    """M, samples of a prompt that are normalised together"""
    prompts_per_update: int
    """P, over all ranks"""
    denoising_steps: int
    """T"""
    selected_steps: int
    """S"""
    updates_per_rollout: int = 1
    beta: float = 0.0
    """weight of the KL term to the frozen base"""
    global_std: bool = False
    """one divisor for all groups of the update"""
    reward_terms: int = 1
    """K, rewards that are normalised separately"""
    affine_advantage: bool = True
    """False: best-of-n ranks, for example, which running sums cannot express"""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    optimizer_states: Literal["device", "host"] = "device"
    """where they wait between steps"""
    backend: Backend = "fsdp2"
    shard_ranks: int | None = None
    """hsdp: ranks that share one copy of the parameters; None: those of a node"""
    ranks_per_prompt: int | None = None
    """g, ranks that share a prompt; None: the greatest common divisor of M and the number of ranks"""
    other_models: tuple[OtherModel, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.selected_steps <= self.denoising_steps:
            raise ValueError(
                f"selected_steps={self.selected_steps}: nothing would be trained below 1, and there are "
                f"denoising_steps={self.denoising_steps}; use 1 to {self.denoising_steps}"
            )


@dataclass(frozen=True, kw_only=True)
class BlockTrace:
    """One block that is sharded, gathered and checkpointed as a unit."""

    name: str
    parameters: int
    trainable: int
    forward_flops: float
    """of one sample"""


@dataclass(frozen=True, kw_only=True)
class PolicyTrace:
    """What one forward and backward of a policy costs, per sample (both branches under classifier-free guidance).

    Lists over k, 0 <= k <= len(blocks), are for the first k blocks checkpointed.
    """

    name: str
    dtype: Literal["float32", "bfloat16"]
    blocks: tuple[BlockTrace, ...]
    """in the order of execution"""
    root_parameters: int
    root_trainable: int
    forward_flops: float
    backward_flops: float
    """without recomputation"""
    saved_bytes: tuple[int, ...]
    """over k: what one more sample adds to the saved activations of a step"""
    fixed_bytes: tuple[int, ...]
    """over k: saved once per step, whatever the number of samples"""
    peak_bytes: tuple[int, ...]
    """over k: most activations at one time during the forward and backward of one step of one sample"""
    transient_bytes: int
    """most that a backward of one sample needs beside its graph, were none of that freed meanwhile"""
    rollout_bytes: int
    """most activations at one time during a forward of one sample without grad"""
    forward_traffic: tuple[int, int]
    """bytes that operators read and write: once per step (weights), and per sample"""
    backward_traffic: tuple[int, int]
    trainable_tensors: int
    gradient_bytes: int
    """of the largest trainable tensor, as autograd makes it"""
    forward_operators: int
    """calls of torch operators, views left out: what it costs to issue them does not depend on their size"""
    backward_operators: int
    separable: bool
    """whether all trainable parameters are of Linear and Conv2d layers, whose gradients a batched backward can keep
    apart by sample"""
    shared_bytes: int
    """inputs that all steps share, e.g. text embeddings; counted once per prompt"""
    latent_bytes: int
    """of one sample at one step, as stored (float32)"""

    @cached_property
    def parameters(self) -> int:
        return self.root_parameters + sum(block.parameters for block in self.blocks)

    @cached_property
    def trainable(self) -> int:
        return self.root_trainable + sum(block.trainable for block in self.blocks)

    def checkpointed(self, choice: Checkpointing) -> int:
        """k of a `checkpointing` choice."""
        if isinstance(choice, int):
            return min(choice, len(self.blocks))
        return len(self.blocks) if choice == "all" else 0

    def recomputed_flops(self, k: int) -> float:
        """What checkpointing of the first k blocks adds to a backward."""
        return sum(block.forward_flops for block in self.blocks[:k])


@dataclass(frozen=True, kw_only=True)
class HardwareSpec:
    """Machines of one kind. Rates are what is sustained, not data-sheet peaks, except `flops`."""

    name: str
    nodes: int = 1
    ranks_per_node: int = 1
    memory_bytes: int
    """of one rank's device"""
    flops: float
    """data-sheet operations per second in bfloat16 with float32 accumulation, dense"""
    float32_flops: float
    efficiency: float
    """fraction of `flops` that a transformer's forward reaches"""
    backward_efficiency: float
    """the same of a backward"""
    operator_seconds: float
    """to issue one operator"""
    backward_operator_seconds: float
    operator_bandwidth: float | None = None
    """bytes per second at which operators read and write what they work on; None: the efficiencies contain it"""
    backward_operator_bandwidth: float | None = None
    graph_operator_seconds: float = 0.0
    """that an operator of a forward costs its backward: its part of the graph is built, and freed"""
    checkpoint_block_seconds: float = 0.0
    """per checkpointed block, beside running it again"""
    checkpoint_operator_seconds: float = 0.0
    """per operator in such blocks: what is saved passes through torch's Python hooks"""
    asynchronous: bool
    """whether operators are issued while others compute, as on a GPU; else the two add up"""
    memory_bandwidth: float
    """bytes per second"""
    all_gather_bandwidth: float
    """bus bandwidth inside a node, bytes per second and rank: (R - 1) / R of the gathered bytes over the time"""
    reduce_scatter_bandwidth: float
    node_bandwidth: float
    """between nodes, bytes per second and node"""
    collective_latency: float
    overlaps_reduce: bool
    """whether reduce-scatters hide behind the compute of the backward"""
    host_bandwidth: float
    """between device and host memory, bytes per second and rank"""
    host_memory_bytes: int
    """of one node"""
    host_memory_bandwidth: float
    """bytes per second and rank"""
    reserved_bytes: int
    """taken by driver, context and collectives before the first tensor"""
    fragmentation: float
    """part of the peak that the allocator may lose on top of it"""
    source: str = ""

    @property
    def ranks(self) -> int:
        """R"""
        return self.nodes * self.ranks_per_node

    @property
    def title(self) -> str:
        """As `parse_hardware` reads it, e.g. 8xA6000-48GB."""
        nodes = f"{self.nodes}x" if self.nodes > 1 else ""
        return f"{nodes}{self.ranks_per_node}x{self.name}"

    @property
    def is_cpu(self) -> bool:
        """Only GPUs work while the next operator is issued."""
        return not self.asynchronous

    def rate(self, precision: str, *, backward: bool = False) -> float:
        """Sustained floating-point operations per second."""
        peak = self.flops if precision == "bfloat16" else self.float32_flops
        return peak * (self.backward_efficiency if backward else self.efficiency)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Shared-prompt data parallelism (section 4 of the paper): which rank makes which samples."""

    ranks_per_group: int
    """g, ranks that serve one prompt"""
    samples: int
    """Q, samples of a group that one rank makes"""
    rounds: int
    """groups that one rank takes part in, per update"""

    @classmethod
    def of(cls, workload: Workload, ranks: int) -> "Layout":
        """As the engine shares the work out, see configs/ranks.py."""
        together = ranks_per_prompt(workload.group_size, ranks, workload.ranks_per_prompt)
        rounds = math.ceil(workload.prompts_per_update / (ranks // together))
        return cls(ranks_per_group=together, samples=workload.group_size // together, rounds=rounds)


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Device memory by component at the moment of the peak, in bytes; `peak` is their sum, without the margin."""

    parameters: int
    """sharded float32 masters of what is trained, and what is frozen"""
    gathered_parameters: int
    gradients: int
    """sharded, as the optimizer reads them"""
    gradient_buffers: int
    """rank-local or sharded sums, before the last reduction"""
    optimizer_states: int
    activations: int
    temporaries: int
    other_models: int
    peak: int
    margin: int
    """for what the allocator loses and the driver takes; peak + margin must fit"""
    phase: str
    """where in the update the peak is"""
    host: int
    """host memory for buffers and models that were moved out, per rank"""


@dataclass(frozen=True, kw_only=True)
class TimeEstimate:
    """Seconds of one update (one rollout and its optimizer steps) by phase."""

    encode: float
    rollout: float
    recompute: float
    """the second forward of the selected steps"""
    reference: float
    """forwards of the frozen base for the KL term"""
    backward: float
    """with the reductions in it under sync=every_backward"""
    correction: float
    """weighting and adding up of gradient buffers"""
    synchronisation: float
    """reductions outside of the backward, and gathering once what stays resident"""
    reward: float
    """decoding and scoring"""
    optimizer: float
    replay: float
    """second and later optimizer steps on the same rollout"""

    @property
    def total(self) -> float:
        return float(sum(getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A candidate with what it would cost; `reason`: why it is out, empty if it is not."""

    candidate: Candidate
    memory: MemoryEstimate
    time: TimeEstimate
    reason: str = ""
    missing_bytes: int = 0
    """what does not fit, of the device's memory"""

    @property
    def feasible(self) -> bool:
        return not self.reason
