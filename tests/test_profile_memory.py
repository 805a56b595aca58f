"""The memory profile as a user sees it: a table that fits the terminal, JSON, a picture."""

import json
from pathlib import Path

import pytest
from PIL import Image

from leangrpo.engine.timeline import Sample, thin
from leangrpo.planners.memory import COMPONENTS
from leangrpo.tools.profile_memory import main, phase_peaks

SMALL = ["prompts_per_update=1", "group_size=4", "sampler.denoising_steps=3", "algorithm.selected_steps=2"]
CHOICES = ["schedule=reweight", "buffers=per_sample", "samples_per_forward=2"]


def test_table_picture_and_json_of_one_update(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["digits_flowgrpo_lora", *SMALL, *CHOICES, "--out", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert all(len(line) <= 80 for line in table.splitlines())
    stored = json.loads((tmp_path / "memory.json").read_text())
    measured, predicted, buffer = stored["measured"], stored["predicted"], stored["buffer_bytes"]
    assert measured["at_peak"].keys() == predicted["at_peak"].keys() == set(COMPONENTS)
    assert sum(measured["at_peak"].values()) == measured["peak_bytes"] == max(measured["phases"].values())
    assert measured["most"]["gradient_buffers"] == 5 * buffer  # 4 samples and the total
    assert max(sum(sample["bytes"]) for sample in stored["samples"]) == measured["peak_bytes"]
    assert stored["ranks"] == [{"peak_bytes": measured["peak_bytes"], "gradient_buffers": 5 * buffer}]
    assert {"rollout", "backward", "optimizer step"} <= measured["phases"].keys()
    assert f"{measured['peak_bytes'] / 1e6:.3f}" in table and f"{predicted['peak_bytes'] / 1e6:.3f}" in table
    with Image.open(tmp_path / "memory.png") as image:
        assert min(image.size) > 400


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["digits_flowgrpo_lora", "group_size=0"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_thinning_and_phases_keep_peaks() -> None:
    timeline: list[Sample] = [(0.0, "rollout", (1,)), (0.1, "rollout", (9,)), (0.2, "backward", (2,)), (1.0, "x", (3,))]
    assert thin(timeline, 2) == [timeline[1], timeline[3]]
    assert phase_peaks(timeline) == {"rollout": 9, "backward": 9, "x": 3}  # what a phase finds counts
