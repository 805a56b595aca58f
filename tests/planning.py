"""What the tests of the planner share: named workloads, candidates, and a policy made of round numbers."""

from dataclasses import replace
from typing import Any

from leangrpo.configs.loader import load_config
from leangrpo.planners.hardware import parse_hardware
from leangrpo.planners.plan import Plan
from leangrpo.planners.search import plan
from leangrpo.planners.types import BlockTrace, Candidate, PolicyTrace, Workload

PLANNING = [
    "flux_dancegrpo_full",
    "flux_dancegrpo_lora",
    "sd35m_flowgrpo_lora",
    "wan21_14b_flowgrpo_lora",
    "wan21_1b_dancegrpo_full",
    "wan22_5b_dancegrpo_full",
]


def planned(config: str, hardware: str, *overrides: str, **pinned: Any) -> Plan:
    """The plan of a packaged configuration."""
    return plan(load_config(config, overrides), hardware=parse_hardware(hardware), pinned=pinned)


def candidate(**changes: Any) -> Candidate:
    """Native as the paper runs it, with `changes`."""
    native = Candidate(
        schedule="native",
        buffers="per_sample",
        buffer_dtype="bfloat16",
        buffer_device="device",
        sync="every_backward",
        checkpointing="all",
        residency="resharded",
        samples_per_forward=1,
    )
    return replace(native, **changes)


def round_trace(**changes: Any) -> PolicyTrace:
    """4 equal blocks of 1e9 parameters and a root of 1e8, all trained; 1 TFLOP forward, 2 backward; 1 GB per block."""
    blocks = tuple(
        BlockTrace(name=f"blocks.{n}", parameters=10**9, trainable=10**9, forward_flops=2.4e11) for n in range(4)
    )
    trace = PolicyTrace(
        name="round",
        dtype="bfloat16",
        blocks=blocks,
        root_parameters=10**8,
        root_trainable=10**8,
        forward_flops=1e12,
        backward_flops=2e12,
        saved_bytes=tuple(10**7 + 10**9 * (4 - k) + 10**8 * k for k in range(5)),
        fixed_bytes=(10**6,) * 5,
        peak_bytes=tuple(10**7 + 10**9 * (4 - k) + 10**8 * k + (2 * 10**8 if k < 4 else 10**9) for k in range(5)),
        forward_operators=500,
        backward_operators=1000,
        transient_bytes=3 * 10**8,
        rollout_bytes=10**8,
        forward_traffic=(8 * 10**9, 10**9),
        backward_traffic=(16 * 10**9, 2 * 10**9),
        trainable_tensors=401,
        gradient_bytes=10**8,
        separable=True,
        shared_bytes=10**6,
        latent_bytes=10**5,
    )
    return replace(trace, **changes)


def round_workload(**changes: Any) -> Workload:
    """8 prompts of 8 samples, 10 steps of which 5 are trained, every parameter in bfloat16."""
    workload = Workload(
        weights="full", group_size=8, prompts_per_update=8, denoising_steps=10, selected_steps=5, precision="bfloat16"
    )
    return replace(workload, **changes)
