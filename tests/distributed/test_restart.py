"""A rank dies: the others end, torchrun starts all of them again, and the run ends in the same bits."""

import json
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import rank_jobs
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

from leangrpo.engine.rendezvous import agree_on_attempt

TRAIN = Path(__file__).parents[2] / "tools" / "train.py"
SMALL = [
    "digits_flowgrpo_lora",
    "backend=fsdp2",
    "updates=5",
    "prompts_per_update=1",
    "group_size=4",
    "samples_per_forward=1",
    "sampler.denoising_steps=4",
    "algorithm.selected_steps=2",
    "checkpoint.every=2",
    "evaluation.samples=10",
    "evaluation.denoising_steps=2",
    "logging.tensorboard=false",
    "timeout=60",
]


def launch(out: Path, *overrides: str, restarts: int = 0) -> "subprocess.Popen[bytes]":
    """torchrun on two ranks, as the README says it."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", str(restarts), str(TRAIN), *SMALL, f"out_dir={out}", *overrides]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=(out.parent / "log").open("wb"))


def kill_rank_1(launcher: int) -> None:
    """SIGKILL, as the out-of-memory killer does it."""
    ranks = [child for child in psutil.Process(launcher).children() if child.environ().get("RANK") == "1"]
    assert len(ranks) == 1
    ranks[0].kill()


def wait_for(path: Path, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, path
        time.sleep(0.01)


def test_a_killed_rank_is_restarted_and_the_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    """One launch without restarts ends with an error, one with goes on; both are killed after a checkpoint."""
    whole, stopped, restarted = (tmp_path / name for name in ("whole", "stopped", "restarted"))
    assert launch(whole).wait(300) == 0
    for out, restarts in ((stopped, 0), (restarted, 1)):
        process = launch(out, "resume=true", restarts=restarts)
        wait_for(out / "checkpoints" / "update_000002", process)
        kill_rank_1(process.pid)
        assert (process.wait(300) == 0) == bool(restarts), (tmp_path / "log").read_text()[-4000:]
    assert not (stopped / "policy").exists()
    expected, resumed = (load_file(next((out / "policy").glob("*.safetensors"))) for out in (whole, restarted))
    assert expected.keys() == resumed.keys() and all(torch.equal(expected[key], resumed[key]) for key in expected)
    for a, b in zip(read_metrics(whole), read_metrics(restarted), strict=True):
        assert (a["update"], a["reward_mean"], a["grad_norm"]) == (b["update"], b["reward_mean"], b["grad_norm"])


def read_metrics(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("late", [0, 1, 2])
def test_attempts_on_one_store_never_meet(late: int) -> None:
    """Three ranks join three times; what a dead attempt left, one that never finished among it, is not read."""
    store = dist.HashStore()
    store.set("leangrpo/ticket/1", uuid.uuid4().hex)  # of a rank that died before anybody answered

    def join(rank: int) -> str:
        time.sleep(0.1 * (rank == late))
        return agree_on_attempt(store, rank, 3, timedelta(seconds=20))

    names = []
    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            agreed = set(pool.map(join, range(3)))
        assert len(agreed) == 1
        names += agreed
    assert len(set(names)) == 3


def test_the_second_attempt_reads_no_key_of_the_first() -> None:
    """torchrun keeps one store for all attempts; a rank that meets an old key there is sent to a dead process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    keys = []
    for _ in range(2):
        mp.spawn(rank_jobs.join_and_leave, (store.port,), nprocs=2)
        keys.append(set(store.list_keys()) - {"leangrpo/ticket/1"})
    assert keys[0] < keys[1] and len(keys[1]) == 2 * len(keys[0])


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(RuntimeError, match="rank 1 has not joined the 2 ranks"):
        agree_on_attempt(dist.HashStore(), 0, 2, timedelta(seconds=0.2))
    with pytest.raises(RuntimeError, match="rank 0 has not answered"):
        agree_on_attempt(dist.HashStore(), 1, 2, timedelta(seconds=0.2))
