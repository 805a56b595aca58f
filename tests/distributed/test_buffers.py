"""What gradient buffers take on each of two ranks, as the group grows: the promise of the running sums, measured."""

from pathlib import Path
from typing import Any

import pytest
import rank_jobs
from ranks import run_ranks

pytestmark = pytest.mark.distributed

SAMPLES = (1, 2, 4, 8)
"""of a prompt on one rank, M/R"""
FORMS = ("streaming", "streaming_sharded", "per_sample")


def test_running_sums_are_constant_and_one_buffer_per_sample_grows(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [
        {
            "backend": "fsdp2",
            "buffers": buffers,
            "samples_per_forward": 1,
            "group_size": 2 * samples,
            "prompts_per_update": prompts,
            "sampler": {"denoising_steps": 2},
            "algorithm": {"selected_steps": 1},
        }
        for buffers in FORMS
        for prompts in (1, 2)
        for samples in SAMPLES
    ]
    for copies in run_ranks(2, rank_jobs.gradient_buffers, cases, folder=tmp_path):
        rows = [copies[first : first + len(SAMPLES)] for first in range(0, len(copies), len(SAMPLES))]
        streaming, sharded, per_sample = rows[:2], rows[2:4], rows[4:]
        for row in per_sample:
            assert row == [samples + 1 for samples in SAMPLES]  # and the total
        for row in streaming:
            assert row == [4] * len(SAMPLES)  # one sample, sums 0 and 1, the total
        for row in sharded:
            assert row == [2] * len(SAMPLES)  # one sample, half of sums 0 and 1 each; the total is the sharded gradient
