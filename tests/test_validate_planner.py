"""tools/validate_planner.py: its statistics on made-up figures, and a small run of the real thing."""

import json
from pathlib import Path
from typing import Any

import pytest
from planning import candidate

from leangrpo.planners.types import Candidate
from leangrpo.tools.validate_planner import label, main
from leangrpo.tools.validation_grid import GRID
from leangrpo.tools.validation_report import describe, judge, ratio_interval, summarise


def row(seconds: list[float], *, predicted: int = 100, measured: int = 100, **choice: Any) -> dict[str, Any]:
    """A candidate as the tool stores it, with a margin of 1 %."""
    made = candidate(sync="every_update", checkpointing="none", residency="resident", **choice)
    return {
        "candidate": {name: getattr(made, name) for name in Candidate.__dataclass_fields__},
        "label": label(made),
        "predicted_seconds": 1.0,
        "predicted_memory": {"peak": predicted, "margin": predicted // 100},
        "measured_memory": {"peak": measured},
        "seconds": seconds,
    }


def case(*rows: dict[str, Any], budget: int | None = None) -> dict[str, Any]:
    return {"candidates": list(rows), "budget": budget}


def test_interval_holds_the_median_with_95_percent() -> None:
    """Nine pairs: the second and the eighth order statistic, 1 - 2 * 10 / 512 = 96 %."""
    first = [float(n) for n in (11, 14, 19, 12, 18, 13, 17, 16, 15)]
    assert ratio_interval(first, [10.0] * 9) == (1.5, 1.2, 1.8)
    assert ratio_interval([2.0] * 5, [1.0] * 5) == (2.0, 2.0, 2.0)


def test_regret_counts_where_the_interval_excludes_one() -> None:
    slower = [1.0, 1.2, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1]
    noisy = [0.9, 0.9, 0.9, 1.1, 1.1, 1.1, 1.1, 1.1, 0.9]
    best = row([1.0] * 9, schedule="retain")
    assert judge(case(row(slower), best))["regret"] == pytest.approx(0.1)
    assert judge(case(row(noisy), best))["regret"] == 0
    assert judge(case(best, row(slower)))["regret"] == 0


def test_memory_verdicts_and_budgets() -> None:
    """Margin 1 %: a prediction 7 % above a peak would refuse 1.06 of it, one 8 % below would take .94."""
    for predicted, wrong in ((100, 0), (106, 0), (95, 0), (107, 1), (92, 1)):
        judged = judge(case(row([1.0] * 9, predicted=predicted)))
        assert len(judged["wrong_verdicts"]) == wrong
        assert judged["memory_errors"] == pytest.approx([predicted / 100 - 1])
    assert judge(case(row([1.0] * 9), budget=99))["over_budget"]
    assert not judge(case(row([1.0] * 9), row([1.0] * 9, measured=200), budget=100))["over_budget"]


def test_summary_counts_the_same_candidate_whatever_the_group() -> None:
    two = row([1.0] * 9, samples_per_forward=2)
    eight = row([1.0] * 9, samples_per_forward=8)
    slow = row([2.0] * 9, schedule="retain", samples_per_forward=1)
    summary = summarise({"a": case(two, slow), "b": case(eight, slow), "c": {"error": "it broke"}})
    assert list(summary["best"].values()) == [2]
    assert summary["most_often_best"] == 1.0
    assert summary["failed"] == {"c": "it broke"}
    assert not summary["met"]["best most often <= 60 %"]
    assert not summary["met"]["configurations >= 24"]
    assert summary["met"]["regret: largest <= 5 %"]
    assert max(map(len, describe(summary).splitlines())) <= 80


def test_grid_is_as_large_as_promised() -> None:
    assert len({one.name for one in GRID}) == len(GRID) >= 24
    assert {one.ranks for one in GRID} == {1, 2}
    assert {one.weights for one in GRID} == {"lora", "full"}


@pytest.mark.slow
def test_a_small_run_is_saved_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out = tmp_path / "found.json"
    arguments = ["--quick", "--seconds", "0", "--out", str(out)]
    main([*arguments, "--part", "1/2"])
    first = json.loads(out.read_text())
    assert list(first["cases"]) == ["quick lora"]
    capsys.readouterr()
    main([*arguments, "--json"])
    second = json.loads(out.read_text())
    assert second["cases"]["quick lora"] == first["cases"]["quick lora"]
    assert second["calibrations"] == first["calibrations"]
    limited = second["cases"]["quick budget"]
    assert len(limited["candidates"]) >= 6 and all(len(one["seconds"]) == 9 for one in limited["candidates"])
    assert limited["budget"] < first["cases"]["quick lora"]["candidates"][0]["measured_memory"]["peak"]
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert summary["largest_memory_error"] < 0.05
    assert not summary["over_budget"] and not summary["wrong_verdicts"]
