"""What gradient buffers take on each of two ranks, as the group grows: the promise of the running sums, measured."""

import pytest
import rank_jobs

from leangrpo.tools.launch import on_ranks

pytestmark = pytest.mark.distributed

UPDATES = ((1, 1), (1, 2), (2, 1), (4, 1), (8, 1), (8, 2))
"""samples of a prompt on one rank, M/R, and prompts"""
FORMS = ("streaming", "streaming_sharded", "per_sample")


def test_running_sums_are_constant_and_one_buffer_per_sample_grows() -> None:
    cases = [
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
        for samples, prompts in UPDATES
    ]
    for copies in on_ranks(2, rank_jobs.gradient_buffers, cases):
        streaming, sharded, per_sample = (copies[first : first + len(UPDATES)] for first in (0, 6, 12))
        assert streaming == [4] * len(UPDATES)  # one sample, sums 0 and 1, the total
        assert sharded == [2] * len(UPDATES)  # one sample, half of sums 0 and 1 each
        # and the total, which a rank's only sample becomes itself where there is none yet
        assert per_sample == [samples + (samples > 1 or prompts > 1) for samples, prompts in UPDATES]
