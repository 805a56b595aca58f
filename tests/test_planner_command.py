"""`leangrpo plan`: what is printed, and what a plan costs."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from leangrpo.configs import ConfigError
from leangrpo.planners.types import CHOICES
from leangrpo.tools.plan import plan_command


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command("flux_dancegrpo_lora") == 0
    text = capsys.readouterr().out
    assert text.startswith("flux1-dev, 12.05 B parameters, 0.15 B trained,") and "on 8xA6000-48GB" in text
    assert max(map(len, text.splitlines())) <= 80


def test_json_has_choice_and_candidates(capsys: pytest.CaptureFixture[str]) -> None:
    plan_command("flux_dancegrpo_lora", ["schedule=native", "hardware=8xH100"], as_json=True)
    stored = json.loads(capsys.readouterr().out)
    assert set(stored["choice"]) == set(CHOICES)
    assert stored["choice"]["schedule"] == "native" and stored["pinned"] == {"schedule": "native"}
    assert stored["hardware"]["name"] == "H100-80GB"
    assert {one["schedule"] for one in stored["candidates"]} == {"native"}


def test_all_lists_every_candidate(capsys: pytest.CaptureFixture[str]) -> None:
    plan_command("digits_flowgrpo_lora", ["hardware=2xCPU"], show_all=True)
    text = capsys.readouterr().out
    listed = text.split("all candidates")[1]
    plan_command("digits_flowgrpo_lora", ["hardware=2xCPU"], as_json=True)
    candidates = json.loads(capsys.readouterr().out)["candidates"]
    assert listed.count(" x1") + listed.count(" x2") + listed.count(" x4") == len(candidates)
    assert max(map(len, text.splitlines())) <= 80


def test_mistakes() -> None:
    for overrides, words in (
        (["schedule=lean"], "must be auto, native, retain or reweight"),
        (["hardware=8xA600"], "did you mean A6000"),
        (["sampler.stesp=3"], "unknown key"),
        (["samples_per_forward=0"], "must be auto or an integer >= 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan_command("flux_dancegrpo_lora", overrides)


def test_stored_trace_needs_no_torch(tmp_path: Path) -> None:
    """A second plan takes a fraction of a second, because nothing heavy is imported."""
    plan_command("digits_flowgrpo_lora", ["hardware=CPU"])
    code = (
        "import sys; from leangrpo.tools.plan import plan_command;"
        "plan_command('digits_flowgrpo_lora', ['hardware=CPU']); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, stdout=subprocess.DEVNULL)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["flux_dancegrpo_full", "wan21_14b_flowgrpo_lora"])
def test_first_plan_is_quick_and_small(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU seconds and peak memory of a process that traces; wall time depends on who else uses the machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = f"from leangrpo.tools.plan import plan_command; plan_command({config!r}, ['hardware=8xA100-80'])"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 20
    assert after.ru_maxrss < 4e6  # KiB
