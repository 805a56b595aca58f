"""A plan as a table of 80 columns."""

import dataclasses
import re
import textwrap
from collections.abc import Iterator

from leangrpo.planners.memory import COMPONENTS
from leangrpo.planners.plan import GB, Plan
from leangrpo.planners.types import Candidate, Estimate, Layout

WIDTH = 80
RUNNERS_UP = 4


def describe_plan(plan: Plan, *, everything: bool = False) -> str:
    """The choice in a sentence, memory and time by part, speed-ups, runners-up and rejections.

    `everything`: all candidates instead of the best and the reasons.
    """
    lines = [*_head(plan), "", *_memory(plan), "", *_time(plan), "", *_speedups(plan)]
    lines += ["", *(_all_candidates(plan) if everything else _summary(plan))]
    return "\n".join(lines)


def in_words(candidate: Candidate) -> str:
    """The eight choices in a sentence."""
    blocks = {"none": "no block", "all": "all blocks"}.get(
        str(candidate.checkpointing), f"the first {candidate.checkpointing} blocks"
    )
    parts = [candidate.schedule.capitalize()]
    if candidate.schedule == "reweight":
        parts.append(
            {"per_sample": "one buffer per sample", "streaming": "running sums"}.get(
                candidate.buffers, "sharded running sums"
            )
        )
    if candidate.sync != "every_backward":
        parts.append(f"{candidate.buffer_dtype} buffers on the {candidate.buffer_device}")
    parts += [
        f"gradients reduced {candidate.sync.replace('_', ' ')}"
        + (f" in {candidate.buffer_dtype}" if candidate.sync == "every_backward" else ""),
        f"{blocks} checkpointed",
        f"parameters {candidate.residency}",
        f"{candidate.samples_per_forward} sample{'s' * (candidate.samples_per_forward > 1)} per forward",
    ]
    return ", ".join(parts)


def _head(plan: Plan) -> Iterator[str]:
    trace, work = plan.trace, plan.workload
    layout = Layout.of(work, plan.hardware.ranks)
    trained = (
        f"{trace.trainable / 1e9:.2f} B trained" if trace.trainable >= 1e8 else f"{trace.trainable / 1e6:.1f} M trained"
    )
    yield from _wrap(
        f"{trace.name}, {trace.parameters / 1e9:.2f} B parameters, {trained}, on {plan.hardware.title}: "
        f"M {work.group_size}, P {work.prompts_per_update}, T {work.denoising_steps}, S {work.selected_steps}; "
        f"{layout.ranks_per_group} ranks per prompt, {layout.samples} samples each, {layout.rounds} rounds"
    )
    yield ""
    yield from _wrap(f"Plan: {in_words(plan.candidate)}.")
    if work.updates_per_rollout > 1:
        again = work.updates_per_rollout - 1
        yield from _wrap(
            f"Only the first of the {work.updates_per_rollout} optimizer steps on a rollout can be lean; "
            f"the other {again} recompute{'s' * (again == 1)} with ratio and clip."
        )


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    yield f"memory per rank, at its peak ({memory.phase})".ljust(WIDTH - 10) + "GB".rjust(10)
    for name in COMPONENTS:
        if value := getattr(memory, name):
            yield _row(name.replace("_", " "), f"{value / GB:.2f}")
    yield _row("peak", f"{memory.peak / GB:.2f}")
    yield _row("margin (driver, fragmentation)", f"{memory.margin / GB:.2f}")
    yield _row("capacity", f"{plan.hardware.memory_bytes / GB:.2f}")
    if memory.host:
        yield _row("host memory", f"{memory.host / GB:.2f}")


def _time(plan: Plan) -> Iterator[str]:
    yield "time per update".ljust(WIDTH - 10) + "s".rjust(10)
    for field in dataclasses.fields(plan.time):
        if value := getattr(plan.time, field.name):
            yield _row(field.name, _seconds(value))
    yield _row("total", _seconds(plan.time.total))


def _speedups(plan: Plan) -> Iterator[str]:
    public, best = plan.speedup_over_public_native(plan.chosen), plan.speedup_over_best_native(plan.chosen)
    note = "" if plan.public_native.feasible else " (does not fit here)"
    yield _row(f"speed-up over Native as public trainers run it{note}", f"{public:.2f} x")
    yield _row("speed-up over Native under its own best plan", "none fits" if best is None else f"{best:.2f} x")


def _summary(plan: Plan) -> Iterator[str]:
    yield "runners-up".ljust(WIDTH - 20) + "s".rjust(10) + "GB".rjust(10)
    shown: set[tuple[object, ...]] = {_kind(plan.candidate)}
    for one in plan.alternatives:
        if _kind(one.candidate) not in shown and len(shown) <= RUNNERS_UP:
            shown.add(_kind(one.candidate))
            yield from _candidate_row(one)
    if len(shown) == 1:
        yield "  none"
    if plan.rejected:
        yield ""
        yield f"rejected ({len(plan.rejected)} of {len(plan.candidates)} candidates)"
    for example, reason, count in _by_reason(plan):
        more = f" (and {count - 1} alike)" if count > 1 else ""
        yield from _wrap(f"{example}: {reason}{more}", "  ")


def _all_candidates(plan: Plan) -> Iterator[str]:
    yield "all candidates".ljust(WIDTH - 20) + "s".rjust(10) + "GB".rjust(10)
    for one in plan.candidates:
        yield from _candidate_row(one)
        if one.reason:
            yield from _wrap(one.reason, "      ")


def _by_reason(plan: Plan) -> list[tuple[str, str, int]]:
    """One line per kind of candidate and kind of reason: the example that came closest, and how many there are."""
    groups: dict[tuple[str, str], list[Estimate]] = {}
    for one in plan.candidates:
        if not one.feasible:
            kind = "memory" if one.missing_bytes else re.sub(r"[\d.]+", "", one.reason)
            groups.setdefault((_schedule(one.candidate), kind), []).append(one)
    rows = []
    for (schedule, _), group in groups.items():
        closest = min(group, key=lambda one: one.missing_bytes)
        where = f" {closest.candidate.residency} {closest.candidate.buffer_dtype}" if closest.missing_bytes else ""
        rows.append((schedule + where, closest.reason, len(group)))
    return rows


def _kind(candidate: Candidate) -> tuple[object, ...]:
    return (candidate.schedule, candidate.buffers, candidate.residency, candidate.checkpointing == "none")


def _candidate_row(one: Estimate) -> Iterator[str]:
    choice = one.candidate
    parts = [_schedule(choice), choice.buffer_dtype, choice.buffer_device, choice.sync]
    parts += [f"ckpt {choice.checkpointing}", choice.residency]
    text = " ".join(parts) + f" x{choice.samples_per_forward}"
    figures = _seconds(one.time.total).rjust(10) + f"{one.memory.peak / GB:.1f}".rjust(10)
    first, *rest = textwrap.wrap(text, WIDTH - 22, initial_indent="  ", subsequent_indent="    ")
    yield first.ljust(WIDTH - 20) + figures
    yield from rest


def _schedule(candidate: Candidate) -> str:
    return f"reweight {candidate.buffers}" if candidate.schedule == "reweight" else candidate.schedule


def _row(name: str, value: str) -> str:
    return f"  {name}".ljust(WIDTH - 10) + value.rjust(10)


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)
