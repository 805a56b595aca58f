"""Whole runs through the command line: files, resuming after a kill, refusals, sampling."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel
from PIL import Image
from safetensors.torch import load_file

from leangrpo.tools.cli import main

SMALL = [
    "updates=4",
    "prompts_per_update=2",
    "group_size=4",
    "schedule=reweight",
    "buffers=streaming",
    "samples_per_forward=4",
    "checkpoint.every=1",
    "evaluation.every=2",
    "evaluation.samples=20",
    "logging.progress=false",
    "logging.tensorboard=false",
]


def train(out: Path, *overrides: str, config: str = "digits_flowgrpo_lora") -> int:
    return main(["train", config, *SMALL, f"out_dir={out}", *overrides])


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def parameters(run: Path) -> dict[str, torch.Tensor]:
    latest = sorted((run / "checkpoints").glob("update_*"))[-1]
    assert json.loads((latest / "state.json").read_text())["update"] == 4
    return load_file(latest / "parameters.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert train(out) == 0
    return out


def test_a_run_leaves_what_it_promises(finished: Path) -> None:
    metrics, evaluations = lines(finished / "metrics.jsonl"), lines(finished / "evaluations.jsonl")
    assert [line["update"] for line in metrics] == [1, 2, 3, 4]
    assert all({"reward_mean", "grad_norm", "seconds", "samples_per_second"} <= line.keys() for line in metrics)
    assert ["eval_accuracy" in line for line in metrics] == [False, True, False, True]
    assert [line["update"] for line in evaluations] == [0, 2, 4]
    assert evaluations[0].keys() >= {"reward", "accuracy", "judge_accuracy", "diversity"}
    for name in ("images/before.png", "images/update_000002.png", "images/after.png", "reward_curve.png"):
        with Image.open(finished / name) as image:
            assert image.width > 500
    assert [path.name for path in sorted((finished / "checkpoints").iterdir())] == ["update_000003", "update_000004"]
    assert "schedule: reweight" in (finished / "config.yaml").read_text()


def test_the_adapter_moved_and_loads_in_diffusers(finished: Path) -> None:
    saved = parameters(finished)
    still = [name for name in saved if "lora_B" in name and saved[name].abs().max() == 0]
    # the last block has no text output, so nothing depends on its text queries
    assert still == ["transformer_blocks.3.attn.add_q_proj.lora_B.default.weight"]
    base = Path(sys.modules["leangrpo.engine.policies.digits"].__file__ or "").parents[1] / "assets/digits/transformer"
    module = SD3Transformer2DModel.from_pretrained(base, torch_dtype=torch.float32)
    module.load_lora_adapter(finished / "policy", adapter_name="default", use_safetensors=True)
    loaded = {name: p for name, p in module.named_parameters() if "lora" in name}
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def test_full_weights_export_loads_in_diffusers(tmp_path: Path) -> None:
    assert train(tmp_path / "full", "updates=1", config="digits_flowgrpo_full") == 0
    module = SD3Transformer2DModel.from_pretrained(tmp_path / "full" / "policy")
    saved = load_file(tmp_path / "full" / "checkpoints" / "update_000001" / "parameters.safetensors")
    assert all(torch.equal(p, saved[name]) for name, p in module.named_parameters())


@pytest.mark.parametrize("schedule", ["native", "retain", "reweight"])
def test_a_run_stopped_anywhere_ends_as_if_it_had_not_been(finished: Path, tmp_path: Path, schedule: str) -> None:
    whole = finished
    if schedule != "reweight":
        whole = tmp_path / "whole"
        assert train(whole, f"schedule={schedule}") == 0
    out = tmp_path / "stopped"
    assert train(out, f"schedule={schedule}", "updates=1") == 0
    assert train(out, f"schedule={schedule}", "updates=3", "resume=true") == 0
    assert train(out, f"schedule={schedule}", "resume=true") == 0
    expected, resumed = parameters(whole), parameters(out)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    keys = ("update", "reward_mean", "grad_norm", "eval_accuracy")
    for a, b in zip(lines(whole / "metrics.jsonl"), lines(out / "metrics.jsonl"), strict=True):
        assert [a.get(key) for key in keys if key in a] == [b.get(key) for key in keys if key in a]


def test_killed_in_the_middle_of_an_update(finished: Path, tmp_path: Path) -> None:
    """SIGKILL between two checkpoints, and a line of metrics cut short: resuming ends in the same bits."""
    out = tmp_path / "killed"
    arguments = ["train", "digits_flowgrpo_lora", *SMALL, "checkpoint.every=2", f"out_dir={out}"]
    process = subprocess.Popen([sys.executable, "-m", "leangrpo.tools.cli", *arguments], env=environment())
    deadline = time.monotonic() + 300
    while not (out / "metrics.jsonl").exists() or len(lines(out / "metrics.jsonl")) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"update": 4, "rew')
    (out / "checkpoints" / ".update_000004.tmp").mkdir()
    assert main([*arguments, "resume=true"]) == 0
    expected, resumed = parameters(finished), parameters(out)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    assert [line["update"] for line in lines(out / "metrics.jsonl")] == [1, 2, 3, 4]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def test_an_existing_run_is_not_overwritten(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    assert train(finished) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: out_dir=") and "resume=true" in message and "update 4" in message
    assert train(finished, "resume=true", "optimizer.learning_rate=1e-3") == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: optimizer.learning_rate=0.001") and "0.002" in message
    assert (finished / "metrics.jsonl").read_bytes() == before
    assert train(finished, "resume=true") == 0  # nothing left to do is no error
    assert lines(finished / "metrics.jsonl") == [json.loads(line) for line in before.splitlines()]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["updaets=3"], "updaets=3 (command line): unknown key; did you mean updates?"),
        (["algorithm.selected_steps=0"], "algorithm.selected_steps=0"),
        (["prompts=/nowhere"], "prompts=/nowhere"),
        (["device=cuda"], "device=cuda"),
        (["checkpointing=9"], "checkpointing=9"),
        (["policy.lora.target_modules=[to_x]"], "policy.lora.target_modules=to_x"),
        (["logging.wandb_project=x"], "logging.wandb_project=x"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    expected: str,
) -> None:
    if "device=cuda" in overrides and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # as if wandb were not installed
    assert train(tmp_path / "run", *overrides) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"error: {expected}")
    assert not (tmp_path / "run").exists()


def test_unreadable_prompts_are_refused_before_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_text("three\n\neleventeen\n")
    assert train(tmp_path / "run", f"prompts={tmp_path / 'prompts.txt'}") == 2
    assert "eleventeen" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_sample(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sample", str(finished), "--prompt", "three", "--prompt", "seven", "--number", "2"]
    assert main([*arguments, "--out", str(tmp_path / "trained")]) == 0
    assert main([*arguments, "--out", str(tmp_path / "base"), "--base"]) == 0
    names = ["grid.png", "seven_00.png", "seven_01.png", "three_00.png", "three_01.png"]
    assert sorted(path.name for path in (tmp_path / "trained").iterdir()) == names
    trained, base = (Image.open(tmp_path / which / "three_00.png") for which in ("trained", "base"))
    assert trained.size == (16, 16) and trained.tobytes() != base.tobytes()
    assert main(["sample", str(tmp_path), "--prompt", "three", "--out", str(tmp_path)]) == 2
    assert main(["sample", str(finished), "--prompt", "drei!", "--out", str(tmp_path)]) == 2
    assert "drei!" in capsys.readouterr().err


def test_plot(finished: Path, tmp_path: Path) -> None:
    assert main(["plot", str(finished), str(finished), "--out", str(tmp_path / "curves.png")]) == 0
    assert Image.open(tmp_path / "curves.png").width > 500
    assert main(["plot", str(tmp_path), "--out", str(tmp_path / "nothing.png")]) == 2
