"""Calibration: of a policy whose speed is known, of two ranks, and that it is kept and used."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import rank_jobs
import torch
from torch import Tensor, nn

from leangrpo.configs.checks import ConfigError
from leangrpo.planners import calibrate as calibration
from leangrpo.planners.calibrate import (
    REPEATS,
    calibrate,
    fit,
    measure_added,
    measure_copy,
    measure_hidden,
    seconds_of_checkpointing,
    store,
)
from leangrpo.planners.costs import STREAM
from leangrpo.planners.hardware import detect_hardware
from leangrpo.planners.trace import trace_module
from leangrpo.tools.launch import on_ranks


def policy() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def inputs(batch: int) -> dict[str, Tensor]:
    return {"input": torch.zeros(batch, 64)}


def test_rates_of_a_gpu_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances 1 ms per operator, 1 us per FLOP of a forward, 2 us of a backward."""
    trace = trace_module(policy(), inputs(1), dtype="float32")
    issue = 1e-3 * trace.forward_operators
    forward, backward = trace.forward_flops * 1e-6, trace.backward_flops * 2e-6
    both = 1e-3 * trace.backward_operators

    def seconds(module: nn.Module, arguments: dict[str, Tensor]) -> tuple[float, float]:
        batch = len(arguments["input"])
        return issue + batch * forward, both + batch * backward

    monkeypatch.setattr(calibration, "seconds_of_passes", seconds)
    *found, checkpointing = measure_hidden([policy()], inputs, dtype="float32")
    assert [rates.operator_seconds for rates in found] == pytest.approx([1e-3, 1e-3])
    assert [rates.flops for rates in found] == pytest.approx([1e6, 0.5e6])
    assert [rates.operator_bandwidth for rates in found] == [None, None]
    assert checkpointing == (0.0, 0.0)


class Blocks(nn.Module):
    """Two blocks, each with as many activations in it."""

    def __init__(self, width: int, activations: int):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, width), *(nn.GELU() for _ in range(activations)), nn.Linear(width, 64))
            for _ in range(2)
        )

    def forward(self, input: Tensor) -> Tensor:
        for layer in self.layers:
            input = layer(input)
        return input


def test_rates_of_a_cpu_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And 5 us per byte, 3 in a backward, 4 ms of graph; 70 ms per checkpointed block and 6 ms per operator in it."""
    modules = [Blocks(64, 1), Blocks(512, 20), Blocks(8, 5)]
    traces = {id(module): trace_module(module, inputs(1), dtype="float32") for module in modules}

    def seconds(module: nn.Module, arguments: dict[str, Tensor]) -> tuple[float, float]:
        trace, batch = traces[id(module)], len(arguments["input"])
        forward = trace.forward_traffic[0] + batch * trace.forward_traffic[1]
        backward = trace.backward_traffic[0] + batch * trace.backward_traffic[1]
        graph = 4e-3 * trace.forward_operators
        return (
            1e-3 * trace.forward_operators + 1e-6 * batch * trace.forward_flops + 5e-6 * forward,
            1e-3 * trace.backward_operators + 2e-6 * batch * trace.backward_flops + 3e-6 * backward + graph,
        )

    def checkpointed(module: nn.Module, arguments: dict[str, Tensor]) -> float:
        alone, more = seconds(module, arguments)
        return 2 * alone + more + 2 * 70e-3 + 6e-3 * traces[id(module)].forward_operators

    monkeypatch.setattr(calibration, "seconds_of_passes", seconds)
    monkeypatch.setattr(calibration, "seconds_of_checkpointing", checkpointed)
    *found, checkpointing = measure_added(modules, inputs, dtype="float32")
    assert [rates.operator_seconds for rates in found] == pytest.approx([1e-3, 1e-3])
    assert [rates.flops for rates in found] == pytest.approx([1e6, 0.5e6])
    assert [rates.operator_bandwidth for rates in found] == pytest.approx([1 / 5e-6, 1 / 3e-6])
    assert [rates.graph_operator_seconds for rates in found] == pytest.approx([0.0, 4e-3])
    assert checkpointing == pytest.approx((70e-3, 6e-3))


def test_checkpointed_blocks_run_again_and_are_left_as_they_were() -> None:
    module, calls = Blocks(64, 1), []
    before = [layer.forward for layer in module.layers]
    module.layers[0][0].register_forward_hook(lambda *_: calls.append(1))
    seconds_of_checkpointing(module, inputs(2))
    assert len(calls) == 2 * (REPEATS + 1)
    assert [layer.forward for layer in module.layers] == before


def test_what_would_cost_less_than_nothing_costs_nothing() -> None:
    """3 a - b, with b >= 0, is closest to 2 a where b is small."""
    found = fit([[1.0, 1.0], [2.0, 1.0], [4.0, 1.0]], [2.0, 5.0, 11.0])
    assert found[1] == 0.0
    assert 2 < found[0] < 3
    assert fit([[1.0, 1.0], [2.0, 1.0], [4.0, 1.0]], [5.0, 8.0, 14.0]) == pytest.approx([3.0, 2.0])


def test_calibration_is_stored_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("leangrpo.planners.hardware._nvidia_gpus", lambda: [])
    before = detect_hardware()
    modules = [nn.Sequential(nn.Linear(64, n), nn.GELU(), nn.Linear(n, 64)) for n in (64, 4096)]
    measured = calibrate(before, modules, inputs, dtype="float32")
    assert measured.rate("float32") > 1e6
    assert measured.rate("float32", backward=True) > 0
    assert measured.float32_flops / measured.flops == pytest.approx(before.float32_flops / before.flops)
    store(measured)
    assert detect_hardware() == replace(measured, source=f"{before.source}; calibrated")
    assert detect_hardware(ranks=2).source == detect_hardware(ranks=2).source.replace("; calibrated", "")


def test_copy_bandwidth_is_that_of_a_memory() -> None:
    assert 1e8 < measure_copy(torch.device("cpu")) < 1e12
    assert STREAM <= 1


def test_calibration_of_another_version_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("leangrpo.planners.hardware._nvidia_gpus", lambda: [])
    before = detect_hardware()
    store(replace(before, flops=1e9)).write_text('{"flops": 1e9}')
    assert detect_hardware() == before


@pytest.mark.parametrize(
    "change", [lambda text: text[:40], lambda text: text.replace(": ", ": -"), lambda text: text.replace(": ", ': "x')]
)
def test_a_damaged_calibration_is_named(
    change: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("leangrpo.planners.hardware._nvidia_gpus", lambda: [])
    path = store(detect_hardware())
    detect_hardware()
    path.write_text(change(path.read_text()))
    with pytest.raises(ConfigError, match=r"is no calibration .* remove it, or run leangrpo calibrate"):
        detect_hardware()


def test_collectives_of_two_ranks() -> None:
    first, second = on_ranks(2, rank_jobs.collective_bandwidths)
    assert first == second
    assert all(1e6 < bandwidth < 1e12 for bandwidth in first[:2])
    assert 0 < first[2] < 1
