"""What hardware is called, and what is found here."""

import pytest

from leangrpo.configs import ConfigError
from leangrpo.planners import hardware
from leangrpo.planners.hardware import GIB, PRESETS, detect_hardware, parse_hardware


@pytest.mark.parametrize(
    "text, name, nodes, ranks",
    [
        ("8xA6000-48GB", "A6000-48GB", 1, 8),
        ("8xA6000", "A6000-48GB", 1, 8),
        ("8xa100-80", "A100-80GB", 1, 8),
        ("2x8xH100-80GB", "H100-80GB", 2, 8),
        ("RTX4090", "RTX4090", 1, 1),
        ("4x RTX 4090", "RTX4090", 1, 4),
        ("8xH200", "H200-141GB", 1, 8),
        ("2xCPU", "CPU", 1, 2),
    ],
)
def test_names(text: str, name: str, nodes: int, ranks: int) -> None:
    spec = parse_hardware(text)
    assert (spec.name, spec.nodes, spec.ranks_per_node, spec.ranks) == (name, nodes, ranks, nodes * ranks)
    assert parse_hardware(spec.title) == spec


def test_another_memory_keeps_the_speeds() -> None:
    spec = parse_hardware("8xA6000-24GB")
    assert spec.memory_bytes == 24 * GIB
    assert spec.flops == PRESETS["A6000-48GB"].flops


@pytest.mark.parametrize(
    "text, words",
    [
        ("8xA600", "unknown device; known are .*did you mean A6000"),
        ("8xB300", "unknown device"),
        ("8xA100", "which memory.*A100-40GB or A100-80GB"),
        ("0xA6000", "no ranks"),
        ("8xA6000-0GB", "no memory"),
        ("eight", "unknown device"),
        ("8x", "is not .*8xA6000-48GB"),
        ("", "is not"),
    ],
)
def test_bad_names(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"hardware={text}.*{words}"):
        parse_hardware(text)


def test_presets_are_sustained_rates() -> None:
    for spec in PRESETS.values():
        assert spec.source
        assert 0 < spec.efficiency < 1
        assert spec.reduce_scatter_bandwidth <= spec.all_gather_bandwidth
        assert spec.title == f"1x{spec.name}"


def test_this_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_nvidia_gpus", lambda: [])
    one, two = detect_hardware(), detect_hardware(ranks=2)
    assert one.memory_bytes == pytest.approx(2 * two.memory_bytes, rel=1e-6)
    assert one.memory_bytes == one.host_memory_bytes > 0
    assert (one.ranks, two.ranks) == (1, 2)


def test_this_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_nvidia_gpus", lambda: [("NVIDIA A100-SXM4-40GB", 40 * GIB)] * 4)
    assert (detect_hardware().name, detect_hardware().ranks) == ("A100-40GB", 4)
    assert (detect_hardware(2, "cpu").name, detect_hardware(2, "cpu").ranks) == ("CPU", 2)
    monkeypatch.setattr(hardware, "_nvidia_gpus", lambda: [("NVIDIA RTX A6000", 48 * GIB)])
    assert detect_hardware().name == "A6000-48GB"
    monkeypatch.setattr(hardware, "_nvidia_gpus", lambda: [("Quadro 1", GIB)])
    with pytest.raises(ConfigError, match="Quadro 1 is not among"):
        detect_hardware()
