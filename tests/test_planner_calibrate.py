"""Calibration: of a policy whose speed is known, of two ranks, and that it is kept and used."""

from dataclasses import replace
from pathlib import Path

import pytest
import rank_jobs
import torch
from ranks import run_ranks
from torch import Tensor, nn

from leangrpo.planners import calibrate as calibration
from leangrpo.planners.calibrate import calibrate, measure_copy, measure_policy, store
from leangrpo.planners.costs import STREAM
from leangrpo.planners.hardware import detect_hardware
from leangrpo.planners.trace import trace_module


def policy() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def inputs(batch: int) -> dict[str, Tensor]:
    return {"input": torch.zeros(batch, 64)}


def test_rates_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances 1 ms per operator, 1 us per FLOP of a forward, 2 us of a backward."""
    trace = trace_module(policy(), inputs(1), dtype="float32")
    issue = 1e-3 * trace.forward_operators
    forward, backward = trace.forward_flops * 1e-6, trace.backward_flops * 2e-6
    both = 1e-3 * trace.backward_operators
    seconds = iter([issue + forward, issue + 4 * forward, issue + 4 * forward + both + 4 * backward])
    monkeypatch.setattr(calibration, "seconds_of", lambda work, device: next(seconds))
    rates = measure_policy(policy(), inputs, dtype="float32", batch=4)
    assert rates.operator_seconds == pytest.approx(1e-3)
    assert rates.forward == pytest.approx(1e6)
    assert rates.backward == pytest.approx(0.5e6)


def test_calibration_is_stored_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("leangrpo.planners.hardware._nvidia_gpus", lambda: [])
    before = detect_hardware()
    measured = calibrate(before, policy(), inputs, dtype="float32")
    assert 1e6 < measured.rate("float32") < 1e12
    assert measured.rate("float32", backward=True) > 0
    assert measured.float32_flops / measured.flops == pytest.approx(before.float32_flops / before.flops)
    store(measured)
    assert detect_hardware() == replace(measured, source=f"{before.source}; calibrated")
    assert detect_hardware(ranks=2).source == detect_hardware(ranks=2).source.replace("; calibrated", "")


def test_copy_bandwidth_is_that_of_a_memory() -> None:
    assert 1e8 < measure_copy(torch.device("cpu")) < 1e12
    assert STREAM <= 1


def test_collectives_of_two_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(2, rank_jobs.collective_bandwidths, folder=tmp_path)
    assert first == second
    assert all(1e6 < bandwidth < 1e12 for bandwidth in first)
