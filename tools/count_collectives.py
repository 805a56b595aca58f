"""Which collectives does one update really issue, when, and how many bytes do they carry?

    torchrun --nproc-per-node 2 tools/count_collectives.py CONFIG [key=value ...] [--json]

Counted at torch's dispatcher, so whatever FSDP2, DeepSpeed or the engine sends is seen, on rank 0 of an update that is
not the first. Rewards and statistics (float64) and the norm for clipping are listed apart.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from leangrpo.configs.checks import ConfigError
from leangrpo.configs.loader import load_config
from leangrpo.engine.distributed import World, joined
from leangrpo.engine.planning import choose
from leangrpo.engine.prompts import load_prompts, prompts_of_update
from leangrpo.engine.trainer import Engine, choose_device
from leangrpo.tools.logs import log_to_stderr

KINDS = {
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "barrier": "barrier",
}
NOT_COLLECTIVE = ("wait_tensor", "_wrap_tensor_autograd")
TOTALS = ("all_gather", "reduce_scatter", "all_reduce")


class CollectiveCounter(TorchDispatchMode):
    """Counts collectives while active; `phase` is what they are booked under."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "rollout"
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # let DTensor turn into its collectives first
        if function.namespace in ("c10d", "_c10d_functional"):
            name = function._schema.name.split("::")[1]
            kind = KINDS.get(name, "all_reduce" if "all_reduce" in name else name)
            if kind not in NOT_COLLECTIVE:
                tensors = tensors_in(args)
                phase = "rewards" if all(t.dtype == torch.float64 for t in tensors) else self.phase
                self.calls[phase, kind] += 1
                self.bytes[phase, kind] += max((t.nbytes for t in tensors), default=0)
        return function(*args, **(kwargs or {}))

    def during(self, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """`method`, with its collectives booked under `phase`."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before, self.phase = self.phase, phase
            try:
                return method(*args, **kwargs)
            finally:
                self.phase = before

        return wrapped


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors_in(item)] if isinstance(value, list | tuple) else []


def count_update(engine: Engine, prompts: Sequence[str]) -> dict[str, Any]:
    """Collectives of one `train_step` on this rank, after one that is not counted."""
    engine.train_step(prompts)
    counter, backend, gradients = CollectiveCounter(), engine.backend, engine.gradients
    originals = [(backend, "reduce"), (backend, "step"), (gradients, "_run")]
    if hasattr(backend, "reduce_scatter"):
        originals.append((backend, "reduce_scatter"))
    for owner, name in originals:
        phase = {"_run": "backward", "reduce_scatter": "reduce"}.get(name, name)
        setattr(owner, name, counter.during(phase, getattr(owner, name)))
    try:
        with counter:
            engine.train_step(prompts)
    finally:
        for owner, name in originals:
            delattr(owner, name)
    return summary(engine, counter)


def summary(engine: Engine, counter: CollectiveCounter) -> dict[str, Any]:
    """Totals of parameter and gradient collectives, and everything by phase."""
    phases: dict[str, dict[str, dict[str, int]]] = {}
    totals = dict.fromkeys(TOTALS, 0)
    for (phase, kind), calls in sorted(counter.calls.items()):
        is_norm = phase == "step" and kind == "all_reduce"  # of the gradient, to clip it
        name = "clip_norm" if is_norm else phase
        phases.setdefault(name, {})[kind] = {"calls": calls, "bytes": counter.bytes[phase, kind]}
        if phase != "rewards" and not is_norm and kind in totals:
            totals[kind] += calls
    config, backend = engine.config, engine.backend
    return {
        "backend": config.backend,
        "world_size": engine.world.size,
        "schedule": config.schedule,
        "buffers": config.buffers,
        "sync": config.sync,
        "residency": config.residency,
        "parameter_groups": backend.parameter_groups,
        "trainable_parameter_groups": backend.trainable_parameter_groups,
        **totals,
        "phases": phases,
    }


def render(result: dict[str, Any]) -> str:
    """A table of at most 80 columns."""
    names = ("backend", "schedule", "buffers", "sync", "residency", "parameter_groups", "trainable_parameter_groups")
    lines = [f"{name:28}{result[name]}" for name in names]
    lines += ["", f"{'phase':12}{'collective':18}{'calls':>8}{'bytes':>16}"]
    for phase, kinds in result["phases"].items():
        lines += [f"{phase:12}{kind:18}{n['calls']:>8}{n['bytes']:>16,}" for kind, n in kinds.items()]
    return "\n".join([*lines, "", "in all: " + ", ".join(f"{kind} {result[kind]}" for kind in TOTALS)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run two updates of a configuration and print the collectives of the second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    log_to_stderr()
    try:
        config = load_config(arguments.config, arguments.overrides)
        world = World.from_environment()
        device = choose_device(config.device, world)
        with joined(world, device, always=True, timeout_seconds=config.timeout):
            config = choose(config, world).candidate.resolve(config)
            engine = Engine.from_config(config, world)
            prompts = prompts_of_update(load_prompts(config.prompts), config.seed, 0, config.prompts_per_update)
            result = count_update(engine, prompts)
            if world.is_main:
                print(json.dumps(result, indent=2) if arguments.json else render(result))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
