"""What the ranks of tests/distributed/test_zero.py do: one process serves one ZeRO stage and reports plain values."""

import collections
from pathlib import Path
from typing import Any

import torch
from small import brightness, small_config, small_engine
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from leangrpo.configs.checks import ConfigError, find_problems
from leangrpo.configs.schema import Config
from leangrpo.engine.checkpoint import load_parameters
from leangrpo.engine.distributed import World
from leangrpo.engine.sharding.base import NonFiniteGradientError
from leangrpo.engine.trainer import Engine

PROMPTS = ["one", "two"]
SCHEDULES: dict[str, dict[str, Any]] = {
    "native": {"schedule": "native"},
    "retain": {"schedule": "retain"},
    "per_sample": {"schedule": "reweight", "buffers": "per_sample"},
    "streaming": {"schedule": "reweight", "buffers": "streaming"},
}
Parameters = dict[str, Tensor]


class Counter(TorchDispatchMode):
    """Counts the collectives that this process sends, by their names in torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def config_for(backend: str, schedule: str = "streaming", weights: str = "full", **changes: Any) -> Config:
    """2 prompts x 4 samples, 2 of 3 steps, a clip that is active."""
    changes = {
        "backend": backend,
        "residency": "resharded" if backend == "zero3" else "resident",
        "prompts_per_update": 2,
        "sampler": {"denoising_steps": 3},
        "policy": {"weights": weights},
        "optimizer": {"max_grad_norm": 2e-3},
        **SCHEDULES[schedule],
        **changes,
    }
    changes["algorithm"] = {"selected_steps": 2, **changes.get("algorithm", {})}
    return small_config(**changes)


def train(config: Config, world: World, updates: int, *, reward: Any = brightness) -> Parameters:
    engine = small_engine(config, reward, world=world)
    for _ in range(updates):
        engine.train_step(PROMPTS)
    return copied(engine)


def copied(engine: Engine) -> Parameters:
    return {name: p.clone() for name, p in engine.backend.full_parameters().items()}


def no_reward_for_two(images: Tensor, prompts: list[str]) -> Tensor:
    return torch.tensor([float("nan") if p == "two" else 1.0 for p in prompts]) * brightness(images, prompts)


def same_reward_for_two(images: Tensor, prompts: list[str]) -> Tensor:
    return torch.where(torch.tensor([p == "two" for p in prompts]), 0.5, brightness(images, prompts))


REWARDS = {"failed reward": no_reward_for_two, "std 0": same_reward_for_two}
CASES: dict[str, dict[str, Any]] = {
    "kl, full": {"schedule": "retain", "algorithm": {"beta": 0.5}},
    "kl, lora": {"schedule": "native", "weights": "lora", "algorithm": {"beta": 0.5}},
    "kl, reweight": {"schedule": "streaming", "weights": "lora", "algorithm": {"beta": 0.5}},
    "checkpointing": {"schedule": "retain", "checkpointing": "all"},
    "off-policy": {"schedule": "streaming", "updates_per_rollout": 2},
}


def updates_of(world: World, backend: str, samples_per_forward: int) -> dict[str, Parameters]:
    """Trainable parameters after 3 updates, for each kind of weights and schedule."""
    return {
        f"{weights}, {schedule}": train(
            config_for(backend, schedule, weights, samples_per_forward=samples_per_forward), world, 3
        )
        for weights in ("full", "lora")
        for schedule in SCHEDULES
    }


def other_updates(world: World, backend: str) -> dict[str, Parameters]:
    """The same for what goes with one schedule only."""
    results = {}
    for name, case in CASES.items():
        if not find_problems(config_for(backend, **case)):
            results[name] = train(config_for(backend, **case), world, 3)
    for name, reward in REWARDS.items():  # prompt "two" is rank 1's
        results[name] = train(config_for(backend, ranks_per_prompt=1), world, 2, reward=reward)
    results["bfloat16"] = train(config_for(backend, precision="bfloat16"), world, 1)
    return results


def everything(world: World, backend: str, folder: Path) -> dict[str, Any]:
    original = torch.nn.functional.linear
    results: dict[str, Any] = {"updates": updates_of(world, backend, 2), "others": other_updates(world, backend)}
    # with the linear that stage 3 leaves in this process, which rounds twice where torch's rounds once
    results["bfloat16, one process"] = train(config_for("replicated", precision="bfloat16"), World(), 1)
    results["linear is replaced"] = torch.nn.functional.linear is not original
    results["collectives"] = collectives(world, backend)
    results["stale"], results["fresh"] = stale_and_fresh(world, backend)
    results["non-finite"] = non_finite(world, backend)
    results["resume"] = resume(world, config_for(backend, precision="bfloat16"), folder / "bf16")
    results["resume lora"] = resume(world, config_for(backend, weights="lora"), folder / "lora")
    results["drift"] = drift(world, backend)
    return results


def collectives(world: World, backend: str) -> dict[str, Any]:
    """Of the third update, by phase; its gradient norm; and what the module holds after it."""
    results: dict[str, Any] = {}
    for schedule in SCHEDULES:
        engine = small_engine(config_for(backend, schedule), world=world)
        for _ in range(2):
            engine.train_step(PROMPTS)
        phases = {"backward": Counter(), "reduce": Counter(), "step": Counter(), "all": Counter()}
        count_calls(engine.gradients, "_run", phases["backward"])
        count_calls(engine.backend, "reduce", phases["reduce"])
        count_calls(engine.backend, "step", phases["step"])
        with phases["all"]:
            norm = engine.train_step(PROMPTS).grad_norm
        results[schedule] = {phase: dict(counter.counts) for phase, counter in phases.items()}
        held = sum(p.numel() for p in engine.policy.module.parameters())
        results[schedule] |= {"grad_norm": norm, "held elements": held}
    return results


def count_calls(owner: Any, method: str, counter: Counter) -> None:
    original = getattr(owner, method)

    def counted(*args: Any, **kwargs: Any) -> Any:
        with counter:
            return original(*args, **kwargs)

    setattr(owner, method, counted)


def stale_and_fresh(world: World, backend: str) -> tuple[Parameters, Parameters]:
    """After 2 updates, before each of which a gradient was reduced and never stepped; and without."""
    results = []
    for leftover in (True, False):
        engine = small_engine(config_for(backend), world=world)
        for _ in range(2):
            if leftover:
                engine.backend.reduce(torch.ones(engine.gradients.numel))
            engine.train_step(PROMPTS)
        results.append(copied(engine))
    return results[0], results[1]


def non_finite(world: World, backend: str) -> dict[str, Any]:
    """One element on one rank is not a number."""
    engine = small_engine(config_for(backend), world=world)
    before, total = copied(engine), torch.zeros(engine.gradients.numel)
    if world.rank == 1:
        total[7] = torch.nan
    engine.backend.reduce(total)
    raised = False
    try:
        engine.backend.step()
    except NonFiniteGradientError:
        raised = True
    unchanged = all(torch.equal(before[name], p) for name, p in copied(engine).items())
    for _ in range(3):
        engine.train_step(PROMPTS)
    return {"raised": raised, "unchanged": unchanged, "after": copied(engine)}


def resume_8bit(world: World, backend: str, folder: Path) -> dict[str, Any]:
    return resume(world, config_for(backend, optimizer={"name": "adamw_8bit"}), folder)


def resume(world: World, config: Config, folder: Path) -> dict[str, Any]:
    """An update, a checkpoint, an update; and the second one again from the checkpoint, in another engine."""
    engine = small_engine(config, world=world)
    engine.train_step(PROMPTS)
    folder.mkdir(exist_ok=True)
    world.barrier()
    engine.backend.save(folder)
    saved = copied(engine)
    engine.train_step(PROMPTS)
    again = small_engine(config, world=world)
    again.backend.load_parameters({name: p + 1 for name, p in copied(again).items()})
    again.backend.load(folder)
    again.update = 1
    loaded = copied(again)
    again.train_step(PROMPTS)
    world.barrier()
    if world.is_main:
        next((folder / "deepspeed").glob("*_optim_states.pt")).rename(folder / "elsewhere")
    world.barrier()
    refused = ""
    try:
        again.backend.load(folder)
    except ConfigError as error:
        refused = str(error)
    return {
        "saved": saved,
        "read by one process": load_parameters(folder),
        "loaded": loaded,
        "ended": copied(engine),
        "resumed": copied(again),
        "refused": refused,
    }


def drift(world: World, backend: str) -> tuple[str, str]:
    """What is found before and after rank 1 changes a parameter."""
    engine = small_engine(config_for(backend), world=world)
    before = engine.backend.drift()
    with torch.no_grad():
        if world.rank == 1:
            engine.backend.parameters[3].add_(1e-3)
    return before, engine.backend.drift()
