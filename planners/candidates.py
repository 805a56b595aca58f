"""Which ways there are to execute an update, and which of them are refused whatever the memory: what is not exact,
what a backend cannot do. The engine's own checks (leangrpo.configs) decide; what only a trace shows is added here."""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, get_args

from leangrpo.configs.checks import Problem, find_problems
from leangrpo.configs.ranks import find_rank_problems
from leangrpo.configs.schema import (
    AdvantageConfig,
    AlgorithmConfig,
    BufferDevice,
    BufferDtype,
    Buffers,
    Checkpointing,
    Config,
    OptimizerConfig,
    PolicyConfig,
    Residency,
    SamplerConfig,
    Schedule,
    Sync,
)
from leangrpo.planners.types import Candidate, HardwareSpec, Layout, PolicyTrace, Workload

# Gradients that may be added up in one bfloat16 buffer: with 24, rounding in the buffer doubles the error that BF16
# compute has anyway (1.7e-2 against 7.8e-3, relative, measured on an SD3 transformer under FSDP2).
BFLOAT16_ADDITIONS = 24

# Per choice, from the simpler and more exact to the less.
PREFERENCE: dict[str, tuple[Any, ...]] = {
    "schedule": ("native", "retain", "reweight"),
    "buffers": ("per_sample", "streaming", "streaming_sharded"),
    "buffer_dtype": ("float32", "bfloat16"),
    "buffer_device": ("device", "host"),
    "sync": ("every_update", "every_group", "every_backward"),
    "residency": ("resharded", "resident"),
}
assert set(PREFERENCE["schedule"]) == set(get_args(Schedule)) and set(PREFERENCE["sync"]) == set(get_args(Sync))
assert set(PREFERENCE["buffers"]) == set(get_args(Buffers))
assert set(PREFERENCE["buffer_dtype"]) == set(get_args(BufferDtype))
assert set(PREFERENCE["buffer_device"]) == set(get_args(BufferDevice))
assert set(PREFERENCE["residency"]) == set(get_args(Residency))


def enumerate_candidates(workload: Workload, hardware: HardwareSpec, pinned: Mapping[str, Any]) -> Iterator[Candidate]:
    """Every combination of the choices but checkpointing, which is "none" where it is not pinned.

    Combinations that differ only in what has no effect appear once.
    """
    samples = Layout.of(workload, hardware.ranks).samples
    free = {**PREFERENCE, "samples_per_forward": tuple(b for b in range(1, samples + 1) if samples % b == 0)}
    options = {name: (pinned[name],) if name in pinned else values for name, values in free.items()}
    checkpointing: Checkpointing = pinned.get("checkpointing", "none")
    seen = set()
    for values in itertools.product(*options.values()):
        choice = dict(zip(options, values, strict=True))
        _drop_what_has_no_effect(choice, pinned, workload, hardware)
        candidate = Candidate(**choice, checkpointing=checkpointing)
        if candidate not in seen:
            seen.add(candidate)
            yield candidate


def _drop_what_has_no_effect(
    choice: dict[str, Any], pinned: Mapping[str, Any], workload: Workload, hardware: HardwareSpec
) -> None:
    plain, ranks = dict[str, Any](), hardware.ranks
    if choice["schedule"] != "reweight":
        plain["buffers"] = "per_sample"
    if hardware.name == "CPU" or (choice["sync"] == "every_backward" and ranks > 1):
        plain["buffer_device"] = "device"
    if ranks == 1:
        plain["sync"] = "every_update"
    if workload.backend == "zero3":
        plain["residency"] = "resharded"
    elif ranks == 1 or workload.backend in ("replicated", "zero1", "zero2"):
        plain["residency"] = "resident"
    if Layout.of(workload, ranks).rounds == 1 and choice["sync"] == "every_group":
        plain["sync"] = "every_update"
    if workload.precision == "float32":
        plain["buffer_dtype"] = "float32"
    choice |= {name: value for name, value in plain.items() if name not in pinned}


def preference(candidate: Candidate, blocks: int) -> tuple[int, ...]:
    """Smaller for the simpler and more exact."""
    ranked = [values.index(getattr(candidate, name)) for name, values in PREFERENCE.items()]
    checkpointed = {"none": 0, "all": blocks}.get(str(candidate.checkpointing), candidate.checkpointing)
    return (*ranked, int(checkpointed), candidate.samples_per_forward)


def find_refusals(workload: Workload, hardware: HardwareSpec, choices: Mapping[str, Any]) -> list[Problem]:
    """What the engine would refuse of a run with these choices; those that are missing count as auto."""
    config = replace(_as_config(workload), **choices)
    return [*find_problems(config), *find_rank_problems(config, hardware.ranks, hardware.ranks_per_node)]


@functools.cache
def _as_config(workload: Workload) -> Config:
    """A configuration that asks for `workload`, as far as combinations are judged by it."""
    advantage = AdvantageConfig(
        std="global" if workload.global_std else "group",
        normalise="per_reward" if workload.reward_terms > 1 else "sum",
        best_of_n=None if workload.affine_advantage else 2,
    )
    return Config(
        out_dir="planned",
        backend=workload.backend,
        shard_ranks=workload.shard_ranks,
        ranks_per_prompt=workload.ranks_per_prompt,
        prompts_per_update=workload.prompts_per_update,
        group_size=workload.group_size,
        updates_per_rollout=workload.updates_per_rollout,
        precision=workload.precision,
        policy=PolicyConfig(weights=workload.weights),
        sampler=SamplerConfig(denoising_steps=workload.denoising_steps),
        algorithm=AlgorithmConfig(
            selected_steps=workload.selected_steps, beta=float(workload.beta), advantage=advantage
        ),
        optimizer=OptimizerConfig(name=workload.optimizer, states=workload.optimizer_states),
    )


def refusal(candidate: Candidate, workload: Workload, trace: PolicyTrace, hardware: HardwareSpec) -> str:
    """Why a candidate is out whatever memory there is; empty if it is not."""
    for one in find_refusals(workload, hardware, asdict(candidate)):
        return one.reason
    if candidate.schedule == "reweight" and candidate.samples_per_forward > 1 and not trace.separable:
        return "a batched backward keeps samples apart in Linear and Conv2d layers only; others are trained too"
    if candidate.buffer_device == "host" and hardware.is_cpu:
        return "on a CPU the host's memory is the device's: nothing would be saved"
    return _rounding_refusal(candidate, workload, hardware.ranks)


def _rounding_refusal(candidate: Candidate, workload: Workload, ranks: int) -> str:
    """Sums in bfloat16 lose what is small beside them."""
    if candidate.buffer_dtype == "float32":
        return ""
    if workload.precision == "float32":
        return "bfloat16 buffers would round gradients that are computed in float32"
    additions = additions_per_buffer(candidate, workload, ranks)
    if additions > BFLOAT16_ADDITIONS:
        return f"{additions} gradients added up in one bfloat16 buffer; beyond {BFLOAT16_ADDITIONS} rounding dominates"
    return ""


def additions_per_buffer(candidate: Candidate, workload: Workload, ranks: int) -> int:
    """The most backwards, or corrected gradients, that one local buffer adds up."""
    layout = Layout.of(workload, ranks)
    rounds = layout.rounds if candidate.sync == "every_update" else 1
    if candidate.sync == "every_backward":
        return 1
    if candidate.schedule == "reweight":
        return max(workload.selected_steps, layout.samples * rounds)
    return workload.selected_steps * math.ceil(layout.samples / candidate.samples_per_forward) * rounds
