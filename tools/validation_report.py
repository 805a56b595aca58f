"""From what tools/validate_planner.py measured to regret, memory errors, and whether the criteria are met."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

CRITERIA: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "configurations >= 24": lambda s: s["configurations"] >= 24 and not s["failed"],
    "candidates each >= 6": lambda s: s["fewest_candidates"] >= 6,
    "best most often <= 60 %": lambda s: s["most_often_best"] <= 0.6,
    "regret: median <= 2 %": lambda s: s["median_regret"] <= 0.02,
    "regret: largest <= 5 %": lambda s: s["largest_regret"] <= 0.05,
    "memory error: median <= 2 %": lambda s: s["median_memory_error"] <= 0.02,
    "memory error: largest <= 5 %": lambda s: s["largest_memory_error"] <= 0.05,
    ".94 of a peak rejects, 1.06 accepts": lambda s: not s["wrong_verdicts"],
    "no chosen plan exceeds its budget": lambda s: not s["over_budget"],
}


def ratio_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """Median of first / second, pair by pair, and the order statistics that hold it with at least 95 %.

    The number of pairs above the median is binomial with 1/2 (a sign test): no assumption on how times are distributed.
    """
    ratios = sorted(a / b for a, b in zip(first, second, strict=True))
    n, below, tail = len(ratios), 0, 0.5 ** len(ratios)
    while tail + math.comb(n, below + 1) / 2**n <= 0.025:
        below += 1
        tail += math.comb(n, below) / 2**n
    return statistics.median(ratios), ratios[below], ratios[n - 1 - below]


def judge(case: Mapping[str, Any]) -> dict[str, Any]:
    """Of one configuration: the best measured candidate, the regret, the memory errors. The first row is the choice."""
    rows = case["candidates"]
    chosen = rows[0]
    best = min(rows, key=lambda row: statistics.median(row["seconds"]))
    ratio, low, high = ratio_interval(chosen["seconds"], best["seconds"])
    errors = [row["predicted_memory"]["peak"] / row["measured_memory"]["peak"] - 1 for row in rows]
    return {
        "chosen": chosen["label"],
        "best": best["label"],
        "ratio": [ratio, low, high],
        "regret": ratio - 1 if low > 1 else 0.0,
        "memory_errors": errors,
        "time_errors": [row["predicted_seconds"] / statistics.median(row["seconds"]) - 1 for row in rows],
        "wrong_verdicts": [row["label"] for row in rows if not _verdicts_are_right(row)],
        "over_budget": case["budget"] is not None and chosen["measured_memory"]["peak"] > case["budget"],
        "kind": kind(best["candidate"], max(row["candidate"]["samples_per_forward"] for row in rows)),
    }


def kind(candidate: Mapping[str, Any], most: int) -> str:
    """A candidate's choices with numbers made relative, to be the same candidate in every configuration."""
    batch, checkpointing = candidate["samples_per_forward"], candidate["checkpointing"]
    size = "all" if batch == most else "one" if batch == 1 else "some"
    part = checkpointing if isinstance(checkpointing, str) else "some"
    names = ("schedule", "buffers", "sync", "residency")
    return " ".join([*(candidate[name] for name in names), f"{size} samples", f"{part} checkpointed"])


def _verdicts_are_right(row: Mapping[str, Any]) -> bool:
    """A device with .94 of the measured peak must refuse it, one with 1.06 of it and the margin must take it."""
    predicted, measured = row["predicted_memory"], row["measured_memory"]["peak"]
    needed = predicted["peak"] + predicted["margin"]
    return bool(0.94 * measured < needed <= 1.06 * measured + predicted["margin"])


def summarise(cases: Mapping[str, Any]) -> dict[str, Any]:
    """Over all configurations; `met`: criterion by criterion."""
    judged = {name: judge(case) for name, case in cases.items() if "error" not in case}
    errors = [abs(error) for one in judged.values() for error in one["memory_errors"]] or [math.inf]
    regrets = [one["regret"] for one in judged.values()] or [math.inf]
    best = Counter(one["kind"] for one in judged.values()).most_common()
    summary: dict[str, Any] = {
        "configurations": len(judged),
        "failed": {name: case["error"] for name, case in cases.items() if "error" in case},
        "fewest_candidates": min((len(one["memory_errors"]) for one in judged.values()), default=0),
        "best": dict(best),
        "most_often_best": best[0][1] / len(judged) if best else 1.0,
        "median_regret": statistics.median(regrets),
        "largest_regret": max(regrets),
        "median_memory_error": statistics.median(errors),
        "largest_memory_error": max(errors),
        "wrong_verdicts": {name: one["wrong_verdicts"] for name, one in judged.items() if one["wrong_verdicts"]},
        "over_budget": [name for name, one in judged.items() if one["over_budget"]],
        "judged": judged,
    }
    return summary | {"met": {name: bool(holds(summary)) for name, holds in CRITERIA.items()}}


def describe(summary: Mapping[str, Any]) -> str:
    """A table within 80 columns."""
    lines = [f"{'configuration':22}{'regret':>7}  {'ratio to the best':20}{'memory':>13}{'time':>13}"]
    for name, one in summary["judged"].items():
        ratio = "{:.3f} ({:.3f}-{:.3f})".format(*one["ratio"])
        spans = [f"{100 * min(errors):+.1f} {100 * max(errors):+.1f}" for errors in (one["memory_errors"],)]
        spans += [f"{100 * min(one['time_errors']):+.0f} {100 * max(one['time_errors']):+.0f}"]
        lines.append(f"{name:22}{100 * one['regret']:6.1f}%  {ratio:20}{spans[0]:>13}{spans[1]:>13}")
        lines.append(f"  chose {one['chosen']}" + ("" if one["best"] == one["chosen"] else f"; best {one['best']}"))
        lines += ["  exceeds its budget"] if one["over_budget"] else []
        lines += [f"  budget test wrong: {text}" for text in one["wrong_verdicts"]]
    lines += [f"{name}: failed: {error}"[:80] for name, error in summary["failed"].items()]
    lines += ["", "memory, time: predicted over measured, percent, lowest and highest candidate", ""]
    lines += [f"{count:3} x best: {name}"[:80] for name, count in summary["best"].items()]
    figures = {
        "regret": (summary["median_regret"], summary["largest_regret"]),
        "memory error": (summary["median_memory_error"], summary["largest_memory_error"]),
    }
    lines += [
        f"{name}: median {100 * median:.2f} %, largest {100 * most:.2f} %" for name, (median, most) in figures.items()
    ]
    lines += [f"{'met   ' if met else 'MISSED'} {name}" for name, met in summary["met"].items()]
    return "\n".join(lines)
