"""What is device memory spent on during an update, when, and was it predicted?

    tools/profile_memory.py CONFIG [key=value ...] [--out DIR] [--json]
    torchrun --nproc-per-node 2 tools/profile_memory.py CONFIG ...

Measures the second update, since optimizer states exist from the end of the first. Bytes are those of tensors
(engine/memory_meter.py); on CUDA the allocator's own peak of every phase stands beside them. Counting makes small
operators several times slower, so the times are good for order only. --out writes memory.png and memory.json.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from leangrpo.configs.checks import ConfigError
from leangrpo.configs.loader import load_config
from leangrpo.configs.schema import Config
from leangrpo.engine.distributed import World, all_gather, joined
from leangrpo.engine.memory_meter import MemoryMeter
from leangrpo.engine.phases import PHASES, watch_phases
from leangrpo.engine.planning import choose
from leangrpo.engine.prompts import load_prompts, prompts_of_update
from leangrpo.engine.timeline import PNG, Sample, save_timeline, thin
from leangrpo.engine.trainer import Engine, choose_device
from leangrpo.planners.memory import COMPONENTS
from leangrpo.planners.types import MemoryEstimate
from leangrpo.tools.logs import log_to_stderr

MB = 1e6
SLICES = 2000
"""of the update's time; of each the moment with most memory is kept"""


def profile_update(engine: Engine, prompts_of: Callable[[int], Sequence[str]]) -> tuple[dict[str, Any], list[Sample]]:
    """Bytes of this rank's second update, and its timeline. `prompts_of`: an update's index -> its prompts."""
    engine.train_step(prompts_of(0))
    allocator: dict[str, int] = {}
    with MemoryMeter(engine, keep_timeline=True) as meter, watch_phases(engine, allocator_peaks(engine, allocator)):
        engine.train_step(prompts_of(1))
    assert meter.timeline is not None
    by_phase = phase_peaks(meter.timeline)
    measured = {
        "peak_bytes": meter.peak_bytes,
        "peak_phase": meter.peak_phase,
        "at_peak": meter.peak,
        "most": meter.peaks_of,
        "phases": {phase: by_phase[phase] for phase in PHASES if phase in by_phase},
        "allocator_phases": allocator,
    }
    return measured, thin(meter.timeline, SLICES)


def phase_peaks(timeline: Sequence[Sample]) -> dict[str, int]:
    """Most bytes in each phase; what was held when it began counts."""
    peaks: dict[str, int] = {}
    before = 0
    for _, phase, held in timeline:
        peaks[phase] = max(peaks.get(phase, 0), before, sum(held))
        before = sum(held)
    return peaks


def allocator_peaks(engine: Engine, peaks: dict[str, int]) -> Callable[[str], None]:
    """Called at every change of phase, fills `peaks` with the CUDA allocator's; does nothing on a CPU."""
    now = ["rollout"]

    def changed(phase: str) -> None:
        if engine.policy.device.type == "cuda":
            peaks[now[0]] = max(peaks.get(now[0], 0), torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        now[0] = phase

    return changed


def profile(config: Config, world: World) -> tuple[dict[str, Any], list[Sample]]:
    """Everything that is known about one configuration, with the peaks of all ranks. Collective."""
    plan = choose(config, world)
    config = plan.candidate.resolve(config)
    engine, prompts = Engine.from_config(config, world), load_prompts(config.prompts)
    measured, samples = profile_update(
        engine, lambda update: prompts_of_update(prompts, config.seed, update, config.prompts_per_update)
    )
    own = torch.tensor([measured["peak_bytes"], measured["most"]["gradient_buffers"]], dtype=torch.float64)
    ranks = [[int(value) for value in one.tolist()] for one in all_gather(own, None, world.size)]
    names = ("backend", "schedule", "buffers", "sync", "checkpointing", "residency", "samples_per_forward")
    return {
        **{name: getattr(config, name) for name in (*names, "precision", "group_size", "prompts_per_update")},
        "device": engine.policy.device.type,
        "world_size": world.size,
        "update": 2,
        "buffer_bytes": engine.gradients.new_buffer().nbytes,
        "measured": measured,
        "predicted": predicted(plan.memory),
        "ranks": [{"peak_bytes": peak, "gradient_buffers": buffers} for peak, buffers in ranks],
    }, samples


def predicted(memory: MemoryEstimate) -> dict[str, Any]:
    """The planner's figures under the names of the measured ones."""
    return {
        "peak_bytes": memory.peak,
        "peak_phase": memory.phase,
        "at_peak": {name: getattr(memory, name) for name in COMPONENTS},
    }


def render(result: dict[str, Any]) -> str:
    """A table of at most 80 columns."""
    measured, estimate = result["measured"], result["predicted"]
    how = result["schedule"] + (f" ({result['buffers']})" if result["schedule"] == "reweight" else "")
    lines = [
        f"{how}, {result['backend']}, {result['world_size']} rank(s), {result['device']}: update 2, rank 0",
        f"a gradient buffer takes {result['buffer_bytes'] / MB:.3f} MB",
        "",
        f"{'MB':22}{'at the peak':>14}{'predicted':>14}{'at its most':>14}",
    ]
    for name in COMPONENTS:
        values = (measured["at_peak"][name], estimate["at_peak"][name], measured["most"][name])
        lines.append(f"{name.replace('_', ' '):22}" + "".join(f"{value / MB:>14.3f}" for value in values))
    error = estimate["peak_bytes"] / measured["peak_bytes"] - 1
    lines += [
        f"{'peak':22}{measured['peak_bytes'] / MB:>14.3f}{estimate['peak_bytes'] / MB:>14.3f}"
        f"   prediction {error:+.1%}",
        f"{'':2}{'in phase':20}{measured['peak_phase']:>14}   {estimate['peak_phase']}",
        "",
        "most in each phase, MB:",
        *(f"  {phase:20}{value / MB:>14.3f}" for phase, value in measured["phases"].items()),
    ]
    if measured["allocator_phases"]:
        lines += ["as the CUDA allocator counts, MB:"]
        lines += [f"  {phase:20}{value / MB:>14.3f}" for phase, value in measured["allocator_phases"].items()]
    if result["world_size"] > 1:
        lines += ["", f"{'rank':>4}{'peak, MB':>14}{'gradient buffers at their most, MB':>38}"]
        for rank, one in enumerate(result["ranks"]):
            lines.append(f"{rank:>4}{one['peak_bytes'] / MB:>14.3f}{one['gradient_buffers'] / MB:>38.3f}")
    return "\n".join(lines)


def write(result: dict[str, Any], samples: Sequence[Sample], directory: Path) -> None:
    """memory.png and memory.json."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = [{"seconds": at, "phase": phase, "bytes": list(held)} for at, phase, held in samples]
    content = result | {"components": COMPONENTS, "samples": rows}
    (directory / "memory.json").write_text(json.dumps(content) + "\n")
    title = f"{result['schedule']}, {result['backend']}, {result['world_size']} rank(s): update 2 of rank 0"
    save_timeline(samples, COMPONENTS, result["predicted"]["peak_bytes"], directory / PNG, title=title)


def main(argv: Sequence[str] | None = None) -> int:
    """Run two updates of a configuration and show the memory of the second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write memory.png and memory.json there")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args(argv)
    log_to_stderr()
    try:
        config = load_config(arguments.config, arguments.overrides)
        world = World.from_environment()
        device = choose_device(config.device, world)
        with joined(world, device, always=True, timeout_seconds=config.timeout):
            result, samples = profile(config, world)
            if world.is_main:
                print(json.dumps(result, indent=2) if arguments.json else render(result))
                if arguments.out is not None:
                    write(result, samples, arguments.out)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
