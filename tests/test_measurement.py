"""Predictions are held against the first updates: what a run logs, writes down and warns about."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small import PROMPTS, small_config, small_engine

import leangrpo.engine.run
from leangrpo.configs import load_config
from leangrpo.engine.distributed import World
from leangrpo.engine.measurement import Measured, PeakMemory, compare
from leangrpo.engine.memory_meter import MemoryMeter
from leangrpo.engine.planning import choose
from leangrpo.planners.plan import Plan
from leangrpo.tools.cli import main

SMALL = [
    "updates=2",
    "prompts_per_update=1",
    "group_size=2",
    "sampler.denoising_steps=3",
    "algorithm.selected_steps=1",
    "evaluation.denoising_steps=2",
    "schedule=retain",
    "evaluation.samples=4",
    "logging.progress=false",
    "logging.tensorboard=false",
]


def lines_of(out: Path, caplog: pytest.LogCaptureFixture, *overrides: str) -> dict[str, tuple[str, str]]:
    """Level and text of what a run says about memory and time."""
    caplog.clear()
    with caplog.at_level("INFO", "leangrpo"):
        assert main(["train", "digits_flowgrpo_lora", *SMALL, f"out_dir={out}", *overrides]) == 0
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    return {text.split()[0]: (level, text) for level, text in found if "predicted" in text and "measured" in text}


def measured_in(out: Path) -> dict[str, Any]:
    measured: dict[str, Any] = json.loads((out / "plan.json").read_text())["measured"]
    return measured


@pytest.mark.parametrize("change", [{}, {"schedule": "retain", "updates_per_rollout": 2}])
def test_peak_of_the_first_update_counts_states_as_later_ones_will(change: dict[str, Any]) -> None:
    engine = small_engine(small_config(**change))
    with PeakMemory(engine) as first:
        engine.train_step(PROMPTS)
    with PeakMemory(engine) as second:
        engine.train_step(PROMPTS)
    with MemoryMeter(engine) as third:
        engine.train_step(PROMPTS)
    assert first.bytes == second.bytes == third.peak_bytes


def test_a_run_compares_its_first_updates_with_the_plan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = lines_of(tmp_path / "run", caplog, "checkpoint.every=1")
    measured = measured_in(tmp_path / "run")
    assert lines.keys() == {"memory", "time"}
    assert f"measured {measured['peak_memory_bytes'] / 1e6:.1f} MB" in lines["memory"][1]
    assert f"measured {measured['seconds']:.3g} s in update 2 (" in lines["time"][1]
    assert lines_of(tmp_path / "run", caplog, "resume=true", "updates=4") == {}  # the same plan, once
    assert measured_in(tmp_path / "run") == measured


def test_a_prediction_of_memory_that_is_off_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines_of(tmp_path / "as planned", caplog, "updates=1")
    truth = measured_in(tmp_path / "as planned")["peak_memory_bytes"]
    for factor, level in ((1.2, "WARNING"), (1.05, "INFO")):

        def manipulated(*arguments: Any, factor: float = factor) -> Plan:
            plan = choose(*arguments)
            memory = replace(plan.memory, peak=round(factor * truth))
            return replace(plan, chosen=replace(plan.chosen, memory=memory))

        monkeypatch.setattr(leangrpo.engine.run, "choose", manipulated)
        lines = lines_of(tmp_path / str(factor), caplog, "updates=1")
        assert lines["memory"][0] == level
        assert f"({factor - 1:+.1%})" in lines["memory"][1]
        assert ("more than 10% off" in lines["memory"][1]) == (level == "WARNING")
        assert "in update 1, which counting bytes has slowed down" in lines["time"][1]


def test_a_prediction_of_time_that_is_off_is_said_to_be() -> None:
    plan = choose(load_config("digits_flowgrpo_lora", SMALL), World())
    for factor, is_off in ((1.2, True), (0.8, True), (1.05, False), (0.95, False)):
        seconds = plan.time.total / factor
        (_, memory), (line, time) = compare(plan, Measured(plan.memory.peak, seconds, 2, was_metered=False))
        assert memory == 0 and time == pytest.approx(factor - 1)
        assert ("calibrate" in line) == is_off
