"""A run's folder: damaged, shared, mixed up; always one line, status 2, and nothing overwritten."""

import shutil
from pathlib import Path

import pytest

from leangrpo.configs.loader import load_config
from leangrpo.engine.run_folder import take
from leangrpo.tools.cli import main

SMALL = [
    "updates=2",
    "prompts_per_update=1",
    "group_size=2",
    "samples_per_forward=2",
    "checkpoint.every=1",
    "evaluation.samples=4",
    "logging.tensorboard=false",
]


def train(out: Path, *overrides: str) -> int:
    return main(["train", "digits_flowgrpo_lora", *SMALL, f"out_dir={out}", *overrides])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert train(out) == 0
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def refused(capsys: pytest.CaptureFixture[str], status: int, *words: str) -> None:
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert status == 2 and line.startswith("error: ") and all(word in line for word in words), line


@pytest.mark.parametrize("name", ["parameters.safetensors", "optimizer.pt", "generators_0.pt", "state.json"])
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_checkpoint(run: Path, capsys: pytest.CaptureFixture[str], name: str, damage: str) -> None:
    path = run / "checkpoints" / "update_000002" / name
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif name != "generators_0.pt":  # a rank that is new has none, and needs none
        path.unlink()
    else:
        return
    refused(capsys, train(run, "resume=true", "updates=3"), "update_000002", "remove this folder")
    shutil.rmtree(path.parent)
    assert train(run, "resume=true", "updates=3") == 0


def test_traces_of_a_run_without_its_configuration(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "config.yaml").unlink()
    before = (run / "metrics.jsonl").read_bytes()
    for resume in ("resume=false", "resume=true"):
        refused(capsys, train(run, resume), "out_dir=", "no config.yaml")
    assert (run / "metrics.jsonl").read_bytes() == before


def test_only_one_process_trains_in_a_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(str(run / "config.yaml"), [f"out_dir={run}"])
    lock = take(config, [f"{word}" for word in (run / "prompts.txt").read_text().split()], None)
    refused(capsys, train(run, "resume=true", "updates=3"), "out_dir=", "another process")
    lock.close()
    assert train(run, "resume=true", "updates=3") == 0


def test_fewer_updates_than_done(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, train(run, "resume=true", "updates=1"), "updates=1", "use 2 or more")


def test_prompts_that_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "run"
    prompts.write_text("three\nseven\n")
    assert train(out, f"prompts={prompts}") == 0
    prompts.write_text("one\n")
    refused(capsys, train(out, f"prompts={prompts}", "resume=true", "updates=3"), "prompts=", "have changed")
    prompts.write_bytes(b"three\xff\n")
    refused(capsys, train(out, f"prompts={prompts}", "resume=true", "updates=3"), "prompts=", "UTF-8")


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        refused(capsys, train(out), "out_dir=", "choose another")


def test_drawing_and_plotting_into_the_wrong_place(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "file").write_text("")
    sample = ["sample", str(run), "--prompt", "three", "--number", "1", "--out"]
    refused(capsys, main([*sample, str(run / "file")]), "--out=", "give a folder")
    refused(capsys, main([*sample, str(run / "drawn"), "--seed", "-1"]), "--seed=-1")
    refused(capsys, main(["plot", str(run), "--out", str(run / "images")]), "--out=", "PNG")
    with (run / "metrics.jsonl").open("a") as file:
        file.write("garbage\n")
    refused(capsys, main(["plot", str(run), "--out", str(run / "x.png")]), "metrics.jsonl", "remove that line")
