"""How far off is the planner? Real updates of some tens of configurations, against what it predicts and chooses.

    python tools/validate_planner.py [--quick] [--json] [--out FILE] [--part K/N] [--only NAME ...]

Every configuration is planned; the chosen candidate and the best of every other kind are then executed by the engine in
paired alternations, on one or two processes, after one calibration of this machine. Regret is the chosen candidate's
time over that of the fastest measured one, where the interval of the paired ratio excludes 1. Memory is counted storage
by storage. Results are saved after every configuration; a second call goes on from there.
"""

import argparse
import dataclasses
import gc
import json
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from leangrpo.engine.distributed import World
from leangrpo.engine.memory_meter import MemoryMeter
from leangrpo.engine.trainer import Engine
from leangrpo.planners.search import search
from leangrpo.planners.types import Candidate, Estimate, HardwareSpec
from leangrpo.planners.workloads import workload_of
from leangrpo.tools.calibrate import calibrate_machine
from leangrpo.tools.launch import on_ranks
from leangrpo.tools.logs import log_to_stderr
from leangrpo.tools.validation_grid import GRID, PROMPTS, QUICK, Case, measured_candidates
from leangrpo.tools.validation_report import describe, summarise

MIN_ROUNDS, MAX_ROUNDS = 9, 25  # of all candidates in turn; with 9 the order statistics 2 and 8 hold the median to 96 %
UNLIMITED = 10**12  # bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing in --out, then report all that is there; 1 if a criterion is missed."""
    arguments = parse(argv)
    log_to_stderr()
    stored = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.is_file() else {"cases": {}}
    chosen = [
        case for case in (QUICK if arguments.quick else GRID) if not arguments.only or case.name in arguments.only
    ]
    part, parts = (int(number) for number in arguments.part.split("/"))
    missing = [case for case in chosen[part - 1 :: parts] if "error" in stored["cases"].get(case.name, {"error": ""})]
    begin = time.monotonic()
    for case in missing:
        if time.monotonic() - begin > 60 * arguments.minutes:
            print(f"{arguments.minutes:g} minutes are over; the same command goes on", file=sys.stderr)
            break
        spec = _calibrated(stored, case.ranks)
        print(f"{case.name} ...", file=sys.stderr)
        try:
            stored["cases"][case.name] = on_ranks(case.ranks, measure_case, case, spec, arguments.seconds)[0]
        except Exception as error:
            traceback.print_exc()
            stored["cases"][case.name] = {"error": str(error).strip().splitlines()[-1]}
        _save(stored, arguments.out)
    summary = summarise(stored["cases"])
    print(json.dumps({**stored, "summary": summary}, indent=1) if arguments.json else describe(summary))
    return int(not all(summary["met"].values()))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="two small configurations, to see that it works")
    parser.add_argument("--json", action="store_true", help="print everything that was measured instead of a table")
    parser.add_argument("--out", type=Path, default=Path("validation.json"), help="results (default validation.json)")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every N-th configuration, from the K-th on")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these configurations")
    parser.add_argument("--seconds", type=float, default=12.0, help="of timing per configuration (default 12)")
    parser.add_argument("--minutes", type=float, default=25.0, help="begin no configuration after that (default 25)")
    return parser.parse_args(argv)


def _calibrated(stored: dict[str, Any], ranks: int) -> HardwareSpec:
    """One calibration per number of processes for the whole grid."""
    calibrations = stored.setdefault("calibrations", {})
    if str(ranks) not in calibrations:
        print(f"calibrating {ranks} process(es) ...", file=sys.stderr)
        calibrations[str(ranks)] = dataclasses.asdict(calibrate_machine(ranks, device="cpu"))
    return HardwareSpec(**calibrations[str(ranks)])


def measure_case(world: World, case: Case, spec: HardwareSpec, seconds: float) -> dict[str, Any]:
    """Plan, then run every candidate of interest; the same on all ranks, which return the same."""
    trace, workload = case.trace(), workload_of(case.config())
    unlimited = dataclasses.replace(spec, memory_bytes=UNLIMITED, host_memory_bytes=UNLIMITED)
    hardware = unlimited
    if case.budget is not None:
        peak = search(trace, workload, unlimited, {}).memory.peak
        hardware = dataclasses.replace(unlimited, memory_bytes=int(case.budget * peak))
    plan = search(trace, workload, hardware, {})
    estimates = measured_candidates(plan)
    engines, peaks = [], []
    for estimate in estimates:
        engine = case.engine(estimate.candidate, world)
        engines.append(engine)
        peaks.append(measure_memory(engine, case, world))
    times = measure_times(engines, case, world, seconds)
    rows = [_row(*one) for one in zip(estimates, peaks, times, strict=True)]
    return {"candidates": rows, "budget": hardware.memory_bytes if case.budget else None, "case": str(case)}


def measure_memory(engine: Engine, case: Case, world: World) -> dict[str, Any]:
    """Of the second update, when the optimizer has its states: the largest peak of all ranks, with its components."""
    engine.train_step(PROMPTS[: case.prompts])
    gc.collect()
    with MemoryMeter(engine) as meter:
        for _ in range(2):  # what belongs to nobody, as a reward's model, is known to the meter once it has been used
            engine.train_step(PROMPTS[: case.prompts])
    peak = world.maximum(torch.tensor([float(meter.peak_bytes)], dtype=torch.float64))
    return {"peak": int(peak), "phase": meter.peak_phase, "components": dict(meter.peak)}


def measure_times(engines: list[Engine], case: Case, world: World, seconds: float) -> list[list[float]]:
    """[candidate][round]: seconds of an update, of the slowest rank; rounds alternate in order."""
    prompts = PROMPTS[: case.prompts]

    def once(engine: Engine) -> float:
        world.barrier()
        start = time.perf_counter()
        engine.train_step(prompts)
        spent = time.perf_counter() - start
        return float(world.maximum(torch.tensor([spent], dtype=torch.float64)))

    gc.collect()
    gc.disable()  # no candidate pays for another's garbage
    try:
        round_seconds = sum([once(engine) for engine in engines])
        rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds / round_seconds)))
        times: list[list[float]] = [[] for _ in engines]
        for number in range(rounds):
            order = range(len(engines)) if number % 2 == 0 else reversed(range(len(engines)))
            for index in order:
                times[index].append(once(engines[index]))
            gc.collect()
    finally:
        gc.enable()
    return times


def _row(estimate: Estimate, memory: dict[str, Any], times: list[float]) -> dict[str, Any]:
    return {
        "candidate": dataclasses.asdict(estimate.candidate),
        "label": label(estimate.candidate),
        "predicted_seconds": estimate.time.total,
        "predicted_times": dataclasses.asdict(estimate.time),
        "predicted_memory": dataclasses.asdict(estimate.memory),
        "measured_memory": memory,
        "seconds": times,
    }


def label(candidate: Candidate) -> str:
    """Short, for a table: reweight/streaming x8 ckpt 2 every_group resharded."""
    parts = [candidate.schedule if candidate.schedule != "reweight" else f"reweight/{candidate.buffers}"]
    parts.append(f"x{candidate.samples_per_forward}")
    parts += [] if candidate.checkpointing == "none" else [f"ckpt {candidate.checkpointing}"]
    parts += [] if candidate.sync == "every_update" else [candidate.sync]
    parts += ["resharded"] if candidate.residency == "resharded" else []
    return " ".join(parts)


def _save(stored: dict[str, Any], path: Path) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(stored), encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
