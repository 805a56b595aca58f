"""What tools/compare_schedules.py prints: a table of at most 80 columns, Markdown, or JSON."""

import json
import math
import platform
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from leangrpo.tools.gradient_cells import Cell

HEADERS = ("backend", "schedule", "1 - cos", "rel. L2", "max abs", "units", "x Native", "bits")
WIDTHS = (12, 19, 9, 9, 9, 8, 10, 4)


@dataclass(frozen=True)
class Comparison:
    """A cell against float64 and against Native of the same backend; `refused`: the engine's reason, if it did."""

    cell: Cell
    refused: str = ""
    cosine_distance: float = math.nan
    """1 - cosine"""
    relative_l2: float = math.nan
    """norm of the difference over the norm of the reference"""
    max_abs: float = math.nan
    units: float = math.nan
    """relative_l2 in units of the epsilon of the cell's arithmetic times the condition of the gradient"""
    times_native: float = math.nan
    """relative_l2 over Native's"""
    equals_native: bool = False
    """to the bit"""
    is_exact: bool = True
    """within the limits"""


def machine() -> str:
    """CPU model and torch version, which the last digits depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor() or platform.machine()}, torch {torch.__version__}"


def as_text(results: list[Comparison], ranks: int) -> str:
    """For a terminal."""
    lines = [f"{ranks} {'ranks' if ranks > 1 else 'rank'}, {machine()}"]
    reasons = _reasons(results)
    for problem, group in _by_problem(results).items():
        lines += ["", problem, "".join(h.ljust(w) for h, w in zip(HEADERS, WIDTHS, strict=True)).rstrip()]
        for one in group:
            lines.append("".join(c.ljust(w) for c, w in zip(_row(one, reasons), WIDTHS, strict=True)).rstrip())
    lines += ["", "units: rel. L2 over (epsilon x condition); x Native: rel. L2 over native's;"]
    lines += ["bits: = native's to the bit, ! outside of the limits"]
    for reason, number in reasons.items():
        lines += textwrap.wrap(f"[{number}] {reason}", 80, subsequent_indent="    ")
    return "\n".join(lines)


def as_markdown(results: list[Comparison], ranks: int) -> str:
    """For docs/exactness.md."""
    lines = [f"{ranks} {'ranks' if ranks > 1 else 'rank'}, {machine()}."]
    reasons = _reasons(results)
    for problem, group in _by_problem(results).items():
        lines += ["", f"### {problem}", "", "| " + " | ".join(HEADERS) + " |", "|---" * len(HEADERS) + "|"]
        lines += ["| " + " | ".join(_row(one, reasons)) + " |" for one in group]
    lines += ["", "### Refused", ""] if reasons else []
    lines += [f"- [{number}] {reason}" for reason, number in reasons.items()]
    return "\n".join(lines)


def as_json(results: list[Comparison], ranks: int) -> str:
    """Everything, unrounded; refused cells have null in place of numbers."""
    cells = []
    for one in results:
        values = asdict(one)
        cell = values.pop("cell") | values | {"cosine": 1 - one.cosine_distance}
        cells.append({key: None if one.refused and isinstance(value, float) else value for key, value in cell.items()})
    return json.dumps({"ranks": ranks, "machine": machine(), "cells": cells}, indent=1)


def _by_problem(results: list[Comparison]) -> dict[str, list[Comparison]]:
    groups: dict[str, list[Comparison]] = {}
    for one in results:
        groups.setdefault(one.cell.problem, []).append(one)
    return groups


def _reasons(results: list[Comparison]) -> dict[str, int]:
    """The different reasons for refusing, numbered from 1."""
    texts = dict.fromkeys(one.refused for one in results if one.refused)
    return {text: number for number, text in enumerate(texts, 1)}


def _row(one: Comparison, reasons: dict[str, int]) -> list[str]:
    row = [one.cell.backend, one.cell.execution]
    if one.refused:
        return [*row, f"refused [{reasons[one.refused]}]", "", "", "", "", ""]
    numbers = [f"{value:.1e}" for value in (one.cosine_distance, one.relative_l2, one.max_abs)]
    marks = ("=" if one.equals_native else "") + ("" if one.is_exact else " !")
    return [*row, *numbers, f"{one.units:.2f}", f"{one.times_native:.2f}", marks]
