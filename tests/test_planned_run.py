"""Runs whose choices are auto: planned, written down, resumed with the same choices; pins kept or refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rank_jobs
import torch
from safetensors.torch import load_file
from small import small_config, small_policy

import leangrpo.engine.planning
from leangrpo import engine
from leangrpo.configs import ConfigError, load_config
from leangrpo.configs.schema import CHOICES
from leangrpo.engine.distributed import World
from leangrpo.engine.planning import choose
from leangrpo.engine.run_folder import Begun, read_begun
from leangrpo.engine.trainer import Engine
from leangrpo.planners.hardware import PRESETS
from leangrpo.planners.types import HardwareSpec
from leangrpo.planners.workloads import trace_of, workload_of
from leangrpo.tools.cli import main
from leangrpo.tools.launch import on_ranks

SMALL = [
    "updates=3",
    "prompts_per_update=1",
    "group_size=4",
    "checkpoint.every=1",
    "evaluation.samples=4",
    "logging.progress=false",
    "logging.tensorboard=false",
]
CPU = PRESETS["CPU"]
SLOW_OPERATORS = replace(CPU, operator_seconds=1.0)  # as few forwards as possible
TINY = replace(CPU, memory_bytes=7_000_000)  # 7 MB: no graphs of many steps


def train(out: Path, *overrides: str) -> int:
    return main(["train", "digits_flowgrpo_lora", *SMALL, f"out_dir={out}", *overrides])


def detect(monkeypatch: pytest.MonkeyPatch, spec: HardwareSpec) -> None:
    """Let this machine look like `spec`."""
    monkeypatch.setattr(leangrpo.engine.planning, "detect_hardware", lambda ranks, device: spec)


def plan_of(run: Path) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((run / "plan.json").read_text())
    return stored


def choices_of(run: Path) -> dict[str, Any]:
    config = load_config(str(run / "config.yaml"))
    return {name: getattr(config, name) for name in CHOICES}


def parameters(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "update_000003" / "parameters.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("planned") / "finished"
    with pytest.MonkeyPatch.context() as patch:
        detect(patch, CPU)
        assert train(out) == 0
    return out


def test_a_run_follows_its_plan_and_writes_it_down(finished: Path) -> None:
    stored = plan_of(finished)
    assert stored["pinned"] == {} and stored["hardware"]["name"] == "CPU"
    assert choices_of(finished) == stored["choice"]
    fitting = [one for one in stored["candidates"] if one["feasible"]]
    assert len(fitting) > 10
    fastest = min(one["seconds_per_update"] for one in fitting)
    assert stored["predicted"]["seconds"]["total"] <= 1.005 * fastest


def test_a_plan_is_logged_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    detect(monkeypatch, TINY)
    with caplog.at_level("INFO", "leangrpo"):
        assert train(tmp_path / "run", "updates=1", "sync=every_group") == 0
    said = next(record.getMessage() for record in caplog.records if record.getMessage().startswith("plan: "))
    stored = plan_of(tmp_path / "run")
    assert stored["choice"]["schedule"].capitalize() in said and "pinned: sync=every_group" in said
    fitting = sum(one["feasible"] for one in stored["candidates"])
    assert f"the fastest of {fitting} that fit, {len(stored['candidates'])} judged" in said and fitting > 1
    megabytes = stored["predicted"]["memory_bytes"]["peak"] / 1e6
    assert f"predicted {megabytes:,.0f} MB per rank" in said and "plan.json" in said


def test_the_machine_decides_and_pins_are_kept(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    detect(monkeypatch, TINY)
    assert train(tmp_path / "tiny", "updates=1") == 0
    assert choices_of(tmp_path / "tiny") != choices_of(finished)
    pins = ["schedule=native", "checkpointing=2", "samples_per_forward=2"]
    assert train(tmp_path / "pinned", "updates=1", *pins) == 0
    assert plan_of(tmp_path / "pinned")["pinned"] == {
        "schedule": "native",
        "checkpointing": 2,
        "samples_per_forward": 2,
    }
    assert choices_of(tmp_path / "pinned") == plan_of(tmp_path / "pinned")["choice"]
    assert choices_of(tmp_path / "pinned")["checkpointing"] == 2


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["buffer_dtype=bfloat16"], ("error: buffer_dtype=bfloat16", "computed in float32", "auto")),
        (["schedule=reweight", "sync=every_backward"], ('error: sync="every_backward"', "advantage is known")),
        (["schedule=retain", "checkpointing=none"], ("error: hardware=", "nothing fits", "GB are missing", "auto for")),
        (["checkpointing=9"], ("error: checkpointing=9", "the policy has 4 blocks")),
        (["hardware=8xA6000"], ("error: hardware=8xA6000", "8 ranks, and the run 1")),
        (["schedule=automatic"], ('error: schedule="automatic"', "must be auto, native, retain or reweight")),
    ],
)
def test_impossible_pins_are_one_line_and_status_2(
    overrides: list[str],
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    detect(monkeypatch, replace(CPU, memory_bytes=5_000_000))
    assert train(tmp_path / "run", *overrides) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert all(word in line for word in words), line
    assert not (tmp_path / "run").exists()


def test_resuming_reuses_the_plan_whatever_the_machine_has_become(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "stopped"
    detect(monkeypatch, CPU)
    assert train(out, "updates=1") == 0
    before = (out / "plan.json").read_bytes()
    detect(monkeypatch, replace(TINY, memory_bytes=1_000_000))  # nothing would fit any more
    assert train(out, "resume=true") == 0
    assert (out / "plan.json").read_bytes() == before
    expected, resumed = parameters(finished), parameters(out)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def test_a_pin_of_the_beginning_stays_and_another_is_refused(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "native"
    detect(monkeypatch, CPU)
    assert choices_of(finished)["schedule"] != "native"
    assert train(out, "updates=1", "schedule=native") == 0
    assert train(out, "resume=true", "updates=2") == 0
    assert choices_of(out)["schedule"] == "native" and plan_of(out)["pinned"] == {"schedule": "native"}
    assert train(out, "resume=true", "schedule=retain") == 2
    assert "schedule=retain: the run in" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["missing", "cut", "of other choices"])
def test_a_damaged_plan_loses_no_choice(
    damage: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    path, text = run / "plan.json", (run / "plan.json").read_text()
    path.write_text(text[:100] if damage == "cut" else text.replace("retain", "native"))
    if damage == "missing":
        path.unlink()
    before = choices_of(run)
    detect(monkeypatch, SLOW_OPERATORS)
    with caplog.at_level("INFO", "leangrpo"):
        assert train(run, "resume=true") == 0
    warning = next(record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "plan.json" in warning and "keeps the choices of its config.yaml" in warning
    assert choices_of(run) == before == plan_of(run)["choice"] == plan_of(run)["pinned"]
    assert plan_of(run)["hardware"]["operator_seconds"] == 1.0


def test_other_ranks_choose_again_what_was_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("digits_flowgrpo_lora", ["backend=fsdp2"])
    monkeypatch.setattr(
        leangrpo.engine.planning, "detect_hardware", lambda ranks, device: replace(CPU, ranks_per_node=ranks)
    )
    first = choose(config, World(0, 1, 0, 1))
    begun = Begun(vars(first.candidate), first.hardware, {"schedule": "native", "buffer_dtype": "float32"})
    monkeypatch.setattr(World, "broadcast", lambda self, value: value)  # no other process answers
    again = choose(config, World(0, 2, 0, 2), begun)
    assert first.candidate.samples_per_forward == 8 and again.candidate.samples_per_forward <= 4
    assert first.candidate.schedule != again.candidate.schedule == "native"
    assert again.hardware.ranks == 2 and again.pinned == begun.pinned


def test_a_folder_without_a_run_has_begun_nothing(finished: Path, tmp_path: Path) -> None:
    assert read_begun(tmp_path) is None
    begun = read_begun(finished)
    assert begun is not None and begun.keeps_plan(1) and not begun.keeps_plan(2)


def test_the_engine_itself_takes_no_auto() -> None:
    policy = small_policy(small_config())
    for name in CHOICES:
        config = small_config(**{name: "auto"})
        with pytest.raises(ConfigError, match=rf"^{name}=auto: nothing has been chosen yet; plan first: .*engine.plan"):
            Engine(config, policy, engine.Rewards([("none", lambda images, prompts: images, 1.0)]))


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_a_policy_in_memory_is_planned_as_its_configuration(weights: str) -> None:
    config = load_config("digits_flowgrpo_lora", [f"policy.weights={weights}"])
    policy = engine.DigitsPolicy.pretrained(config.policy, config.sampler, seed=0)
    workload, hardware = workload_of(config), "1xRTX4090"
    found = engine.plan(policy, workload, hardware, pinned={"schedule": "reweight"})
    expected = engine.plan(config, hardware=hardware, pinned={"schedule": "reweight"})
    assert replace(found.trace, name="digits") == trace_of(config)
    assert found.candidate == expected.candidate and found.candidate.schedule == "reweight"
    assert not policy.module._forward_pre_hooks
    with pytest.raises(ConfigError, match="workload: is missing"):
        engine.plan(policy)


@pytest.mark.distributed
def test_all_ranks_follow_the_plan_of_rank_0() -> None:
    base = ["prompts_per_update=2", "group_size=4"]
    cases = (["backend=fsdp2"], ["backend=replicated"], ["backend=fsdp2", "buffer_dtype=bfloat16"])
    configs = [load_config("digits_flowgrpo_lora", [*base, *case]) for case in cases]
    first, second = on_ranks(2, rank_jobs.choose_and_train, configs)
    assert first == second
    assert all(candidate.samples_per_forward == 2 for candidate in first[:2])
    assert first[2].startswith("buffer_dtype=bfloat16: nothing can be executed")
