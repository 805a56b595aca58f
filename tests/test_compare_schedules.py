"""tools/compare_schedules.py: sound schedules are within its limits, broken ones are not, refusals are the engine's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leangrpo.configs.checks import ConfigError, check_config
from leangrpo.configs.loader import load_config
from leangrpo.configs.schema import Config
from leangrpo.engine.distributed import World
from leangrpo.engine.reweight import ReweightPerSample, ReweightStreaming
from leangrpo.engine.schedules import Group, Retain
from leangrpo.tools.compare_schedules import compare, main, parse, record
from leangrpo.tools.exactness_table import Comparison, as_markdown, as_text
from leangrpo.tools.fixed_trajectory import FixedTrajectory
from leangrpo.tools.float64_reference import Reference
from leangrpo.tools.gradient_cells import Cell, config_of, make_cells, measure, pin

SMALL = [
    "prompts_per_update=2",
    "group_size=4",
    "samples_per_forward=2",
    "sampler.denoising_steps=4",
    "algorithm.selected_steps=2",
]
PINNED = {"policy.weights": "lora", "precision": "float32", "backend": "replicated"}
Recorded = tuple[Config, FixedTrajectory, Reference]


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    config = pin(load_config("digits_flowgrpo_lora", SMALL))
    return config, *record(config, make_cells(PINNED)[0])


def compare_cells(recorded: Recorded) -> list[Comparison]:
    config, trajectory, reference = recorded
    results, native = [], None
    for cell in make_cells(PINNED):
        try:
            gradients = measure(config, cell, trajectory, World())
        except ConfigError as error:
            results.append(Comparison(cell, str(error)))
            continue
        results.append(compare(config, cell, gradients, reference, native))
        native = native or (gradients, results[0])
    return results


def test_sound_schedules_are_exact_and_refusals_are_the_engines(recorded: Recorded) -> None:
    native, retain, per_sample, streaming, sharded = results = compare_cells(recorded)
    assert all(one.is_exact for one in results) and native.relative_l2 < 1e-6
    assert retain.equals_native and not per_sample.equals_native and not streaming.equals_native
    with pytest.raises(ConfigError) as refusal:
        check_config(config_of(recorded[0], sharded.cell, 1))
    assert sharded.refused == str(refusal.value)
    text = as_text(results, 1)
    assert max(map(len, text.splitlines())) <= 80 and "streaming_sharded  refused [1]" in text
    assert as_markdown(results, 1).count("| replicated |") == 5


def break_per_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = ReweightPerSample._known

    def one_buffer_is_a_little_too_large(self: ReweightPerSample) -> Tensor:
        pending = sound(self)
        pending[0].mul_(1 + 1e-5)
        return pending

    monkeypatch.setattr(ReweightPerSample, "_known", one_buffer_is_a_little_too_large)


def break_streaming(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = ReweightStreaming.group_known

    def centre_is_off(self: ReweightStreaming, group: Group) -> None:
        assert self.centre_K is not None
        self.centre_K = self.centre_K + 1e-5
        sound(self, group)

    monkeypatch.setattr(ReweightStreaming, "group_known", centre_is_off)


def break_retain(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_bit(self: Retain, step: Any, advantages_B: Tensor) -> None:
        sound(self, step, torch.nextafter(advantages_B, torch.tensor(torch.inf)))

    sound = Retain._backward
    monkeypatch.setattr(Retain, "_backward", last_bit)


@pytest.mark.parametrize(
    ("broken", "execution"),
    [(break_per_sample, "per_sample"), (break_streaming, "streaming"), (break_retain, "retain")],
)
def test_a_broken_schedule_is_outside_of_the_limits(
    broken: Any, execution: str, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    assert {one.cell.execution for one in compare_cells(recorded) if not one.is_exact} == {execution}


def test_a_gradient_that_misses_a_sample_is_outside_of_the_limits(recorded: Recorded) -> None:
    config, trajectory, reference = recorded
    cell = make_cells(PINNED)[0]
    gradients = measure(config, cell, trajectory, World())
    assert compare(config, cell, gradients, reference).is_exact
    scaled = {name: g * (1 + 1e-5) for name, g in gradients.items()}
    assert not compare(config, cell, scaled, reference).is_exact


def test_every_engine_is_led_along_the_first_ones_trajectory(recorded: Recorded, tmp_path: Path) -> None:
    """Other batches would draw other latents in the last bit."""
    config, trajectory, reference = recorded
    trajectory.save(tmp_path / "trajectory.safetensors")
    loaded = FixedTrajectory.load(tmp_path / "trajectory.safetensors")
    assert loaded.rewards.keys() == trajectory.rewards.keys() and len(loaded.next_latents) == 2 * 4 * 4
    one_by_one = pin(load_config("digits_flowgrpo_lora", [*SMALL, "samples_per_forward=1"]))
    gradients = measure(one_by_one, make_cells(PINNED)[0], loaded, World())
    assert compare(config, make_cells(PINNED)[0], gradients, reference).is_exact


@pytest.mark.distributed
def test_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["digits_flowgrpo_lora", *SMALL, "samples_per_forward=1", "policy.weights=lora", "precision=float32"]
    assert main([*arguments, "backend=fsdp2", "--ranks", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ranks"] == 2 and [cell["execution"] for cell in result["cells"]][-1] == "streaming_sharded"
    for cell in result["cells"]:
        assert cell["refused"] == "" and 0 < cell["relative_l2"] < 1e-6 and 1 - cell["cosine"] < 1e-12
    assert [cell["equals_native"] for cell in result["cells"]] == [True, True, False, False, False]


def test_backends_get_what_they_need() -> None:
    config = pin(load_config("digits_flowgrpo_lora"))
    made = {b: config_of(config, Cell("lora", "float32", b, "native"), 4) for b in ("fsdp2", "hsdp", "zero3")}
    assert {b: (one.shard_ranks, one.residency) for b, one in made.items()} == {
        "fsdp2": (None, "resident"),
        "hsdp": (2, "resident"),
        "zero3": (None, "resharded"),
    }


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("schedule=native", "all schedules and buffers are compared"),
        ("backend=zero4", "use replicated, fsdp2"),
        ("--ranks=0", "use 1 or more"),
        ("group_size=1", "group_size=1"),
    ],
)
def test_mistakes_are_one_line(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["digits_flowgrpo_lora", argument]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_keys_of_the_axes_narrow_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    _, cells, _ = parse(["digits_flowgrpo_lora"])
    assert len(cells) == 2 * 2 * 6 * 5
    config, cells, _ = parse(["digits_flowgrpo_lora", "backend=hsdp", "shard_ranks=1", "precision=bfloat16"])
    assert len(cells) == 2 * 5 and config_of(config, cells[0], 4).shard_ranks == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["digits_flowgrpo_lora"]) == 2
