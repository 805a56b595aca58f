"""What tests run on several ranks: importable functions, since new processes start from nothing."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from small import brightness, small_config, small_engine
from torch import Tensor

import leangrpo.engine.planning
from leangrpo.configs import Config, ConfigError
from leangrpo.engine.distributed import World, joined
from leangrpo.engine.memory_meter import MemoryMeter
from leangrpo.engine.planning import choose
from leangrpo.engine.trainer import Engine
from leangrpo.engine.types import StepMetrics
from leangrpo.planners.calibrate import measure_collectives
from leangrpo.planners.hardware import PRESETS
from leangrpo.planners.types import Candidate, HardwareSpec
from leangrpo.tools.count_collectives import count_update

PROMPTS = ["one", "two", "three", "four"]
Outcome = tuple[dict[str, Tensor], StepMetrics]


def train(world: World, cases: list[dict[str, Any]], updates: int = 3) -> list[Outcome]:
    """Parameters and last metrics of each case after `updates` updates."""
    outcomes = []
    for case in cases:
        engine = small_engine(small_config(**case), world=world)
        for _ in range(updates):
            metrics = engine.train_step(PROMPTS)
        outcomes.append(({name: p.clone() for name, p in engine.backend.full_parameters().items()}, metrics))
    return outcomes


def collectives(world: World, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What `count_update` sees of each case."""
    return [count_update(small_engine(small_config(**case), world=world), PROMPTS) for case in cases]


def gradient_buffers(world: World, cases: list[dict[str, Any]]) -> list[float]:
    """The most that gradient buffers took in one update of each case, in copies of the trainable parameters."""
    copies = []
    for case in cases:
        engine = small_engine(small_config(**case), world=world)
        with MemoryMeter(engine) as meter:
            engine.train_step(PROMPTS[: case["prompts_per_update"]])
        copies.append(meter.peaks_of["gradient_buffers"] / (4 * engine.gradients.numel))
    return copies


def failing_reward(images: Tensor, prompts: list[str]) -> Tensor:
    """Fails on rank 1, is the same for every image of "two", and fine elsewhere."""
    if torch.distributed.get_rank() == 1 and prompts[0] == "one":
        raise OSError("the reward server is gone")
    return torch.ones(len(images)) if prompts[0] == "two" else brightness(images, prompts)


def with_failing_reward(world: World, cases: list[dict[str, Any]]) -> list[tuple[StepMetrics, dict[str, Any]]]:
    """Metrics and collectives of a second update in which a reward fails on one rank."""
    outcomes = []
    for case in cases:
        engine = small_engine(small_config(**case), failing_reward, world=world)
        counted = count_update(engine, PROMPTS)
        outcomes.append((engine.train_step(PROMPTS), counted))
    return outcomes


def samples(world: World, case: dict[str, Any]) -> dict[tuple[int, int], Tensor]:
    """The images that this rank drew, by (slot, generation)."""
    engine = small_engine(small_config(**case), world=world)
    rollout = engine._on_policy_gradient(PROMPTS, frozenset(range(4)))
    return {
        (slot, generation): image
        for slot, group in zip(engine.group.slots, rollout.groups, strict=True)
        for trajectory in group.trajectories
        for generation, image in zip(trajectory.generations, trajectory.samples, strict=True)
    }


def stale_weights(world: World, case: dict[str, Any]) -> list[float]:
    """Largest difference between an engine's outputs and those of a new engine with its parameters, update by update.

    The update ends with a forward without grad, which leaves modules unsharded.
    """
    engine, differences = small_engine(small_config(**case), world=world), []
    x = torch.ones(1, 1, 8, 8)
    for _ in range(3):
        engine.train_step(PROMPTS)
        fresh = small_engine(small_config(**(case | {"backend": "replicated", "residency": "resident"})))
        fresh.backend.load_parameters(engine.backend.full_parameters())
        with torch.no_grad():
            outputs = [e.policy.velocity(x, 0.6, e.policy.encode("two", 1)) for e in (engine, fresh)]  # type: ignore[attr-defined]
        differences.append(float((outputs[0] - outputs[1]).abs().max()))
    return differences


def run_and_save(world: World, case: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    """Four updates, with a checkpoint after two."""
    engine = small_engine(small_config(**case), world=world)
    for update in range(4):
        engine.train_step(PROMPTS)
        if update == 1:
            engine.backend.save(folder)
    return {name: p.clone() for name, p in engine.backend.full_parameters().items()}


def resume(world: World, case: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    """The last two of them, from the checkpoint."""
    engine = small_engine(small_config(**case), world=world)
    engine.backend.load(folder)
    engine.update = 2
    for _ in range(2):
        engine.train_step(PROMPTS)
    return {name: p.clone() for name, p in engine.backend.full_parameters().items()}


def drift(world: World, case: dict[str, Any]) -> list[str]:
    """What `drift` says of a sound engine, and after one element on one rank was changed by its last bit."""
    engine = small_engine(small_config(**case), world=world)
    reports = [engine.backend.drift()]
    if world.rank == world.size - 1:
        parameter = (
            engine.backend.masters[3] if case["backend"] == "replicated" else next(engine.backend._sharded()).to_local()
        )  # type: ignore[attr-defined]
        with torch.no_grad():
            parameter.view(-1)[-1] *= 1 + 2**-22
    return [*reports, engine.backend.drift()]


def collective_bandwidths(world: World) -> tuple[float, ...]:
    """Of all-gather and reduce-scatter, in bytes per second."""
    return tuple(measure_collectives(torch.device("cpu")))


def choose_and_train(world: World, configs: list[Config]) -> list[Candidate | str]:
    """What every rank is told to execute, or why nothing; an update is made with it.

    Only rank 0 may detect hardware.
    """

    def detect(ranks: int, device: str) -> HardwareSpec:
        assert world.rank == 0
        return replace(PRESETS["CPU"], ranks_per_node=ranks)

    leangrpo.engine.planning.detect_hardware = detect
    answers: list[Candidate | str] = []
    for config in configs:
        try:
            candidate = choose(config, world).candidate
            Engine.from_config(candidate.resolve(config), world).train_step(["one", "two"])
            answers.append(candidate)
        except ConfigError as error:
            answers.append(str(error))
    return answers


def join_and_leave(rank: int, port: int) -> None:
    """As a worker of torchrun, whose agent holds the store."""
    launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= launcher
    with joined(World(rank, 2, rank, 2), torch.device("cpu"), always=True, timeout_seconds=60):
        pass
    os._exit(0)
