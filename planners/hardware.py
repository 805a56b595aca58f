"""What a plan is made for: presets of accelerators, `8xA6000-48GB`, and detection of this machine.

Data-sheet figures: dense bfloat16 with float32 accumulation and float32 without tensor cores, memory as nvidia-smi
shows it, memory and link bandwidth. What is sustained of them (`efficiency`, collectives) are estimates until
`leangrpo.planners.calibrate` has measured a machine, except for A6000: there they are fitted to the paper, see
docs/planner.md.
"""

import dataclasses
import json
import os
import platform
import re
from pathlib import Path

from leangrpo.configs.checks import ConfigError
from leangrpo.configs.help import nearest
from leangrpo.planners.model_trace import cache_folder
from leangrpo.planners.types import HardwareSpec

MIB, GIB = 2**20, 2**30
MEASURED = (
    "flops",
    "float32_flops",
    "efficiency",
    "backward_efficiency",
    "operator_seconds",
    "backward_operator_seconds",
    "operator_bandwidth",
    "backward_operator_bandwidth",
    "graph_operator_seconds",
    "checkpoint_block_seconds",
    "checkpoint_operator_seconds",
    "memory_bandwidth",
    "host_bandwidth",
    "host_memory_bandwidth",
    "all_gather_bandwidth",
    "reduce_scatter_bandwidth",
    "collective_latency",
)  # what a calibration replaces
PCIE, NVLINK = False, True


def _gpu(
    name: str,
    source: str,
    *,
    memory_mib: int,
    tflops: float,
    float32_tflops: float,
    memory_bandwidth: float,
    efficiency: float,
    collective_bandwidth: float,
    node_bandwidth: float,
    nvlink: bool,
    host_bandwidth: float,
) -> HardwareSpec:
    """A preset; bandwidths in 1e9 bytes per second."""
    return HardwareSpec(
        name=name,
        memory_bytes=memory_mib * MIB,
        flops=tflops * 1e12,
        float32_flops=float32_tflops * 1e12,
        efficiency=efficiency,
        backward_efficiency=efficiency,
        operator_seconds=5e-6,
        backward_operator_seconds=5e-6,
        asynchronous=True,
        memory_bandwidth=memory_bandwidth * 1e9,
        all_gather_bandwidth=collective_bandwidth * 1e9,
        reduce_scatter_bandwidth=collective_bandwidth * 1e9,
        node_bandwidth=node_bandwidth * 1e9,
        collective_latency=30e-6,
        overlaps_reduce=nvlink,
        host_bandwidth=host_bandwidth * 1e9,
        host_memory_bytes=512 * GIB,
        host_memory_bandwidth=20e9,
        reserved_bytes=700 * MIB,
        fragmentation=0.03,
        source=source,
    )


PRESETS: dict[str, HardwareSpec] = {
    spec.name: spec
    for spec in (
        _gpu(
            "RTX4090",
            "NVIDIA Ada GPU architecture whitepaper; PCIe 4.0 without peer to peer",
            memory_mib=24564,
            tflops=165.2,
            float32_tflops=82.6,
            memory_bandwidth=1008,
            efficiency=0.40,
            collective_bandwidth=9,
            node_bandwidth=12.5,
            nvlink=PCIE,
            host_bandwidth=22,
        ),
        _gpu(
            "A6000-48GB",
            "NVIDIA RTX A6000 data sheet and GA102 whitepaper; efficiency and collectives fitted to the paper",
            memory_mib=49140,
            tflops=154.8,
            float32_tflops=38.7,
            memory_bandwidth=768,
            efficiency=0.2605,
            collective_bandwidth=9.39,
            node_bandwidth=12.5,
            nvlink=PCIE,
            host_bandwidth=22,
        ),
        _gpu(
            "L40S",
            "NVIDIA L40S data sheet; PCIe 4.0",
            memory_mib=46068,
            tflops=362.0,
            float32_tflops=91.6,
            memory_bandwidth=864,
            efficiency=0.30,
            collective_bandwidth=12,
            node_bandwidth=25,
            nvlink=PCIE,
            host_bandwidth=22,
        ),
        _gpu(
            "A100-40GB",
            "NVIDIA A100 data sheet (SXM4), NVLink 3",
            memory_mib=40960,
            tflops=312.0,
            float32_tflops=19.5,
            memory_bandwidth=1555,
            efficiency=0.45,
            collective_bandwidth=220,
            node_bandwidth=100,
            nvlink=NVLINK,
            host_bandwidth=22,
        ),
        _gpu(
            "A100-80GB",
            "NVIDIA A100 data sheet (SXM4), NVLink 3",
            memory_mib=81920,
            tflops=312.0,
            float32_tflops=19.5,
            memory_bandwidth=2039,
            efficiency=0.45,
            collective_bandwidth=220,
            node_bandwidth=100,
            nvlink=NVLINK,
            host_bandwidth=22,
        ),
        _gpu(
            "H100-80GB",
            "NVIDIA H100 data sheet (SXM5), NVLink 4",
            memory_mib=81559,
            tflops=989.4,
            float32_tflops=66.9,
            memory_bandwidth=3350,
            efficiency=0.38,
            collective_bandwidth=350,
            node_bandwidth=350,
            nvlink=NVLINK,
            host_bandwidth=45,
        ),
        _gpu(
            "H200-141GB",
            "NVIDIA H200 data sheet (SXM5), NVLink 4",
            memory_mib=143771,
            tflops=989.4,
            float32_tflops=66.9,
            memory_bandwidth=4800,
            efficiency=0.38,
            collective_bandwidth=350,
            node_bandwidth=350,
            nvlink=NVLINK,
            host_bandwidth=45,
        ),
        HardwareSpec(
            name="CPU",
            memory_bytes=16 * GIB,
            flops=60e9,
            float32_flops=60e9,
            efficiency=0.7,
            backward_efficiency=0.7,
            operator_seconds=7e-6,
            backward_operator_seconds=5e-6,
            operator_bandwidth=20e9,
            backward_operator_bandwidth=10e9,
            graph_operator_seconds=3e-6,
            checkpoint_block_seconds=5e-4,
            checkpoint_operator_seconds=4e-6,
            asynchronous=False,
            memory_bandwidth=8e9,
            all_gather_bandwidth=1e9,
            reduce_scatter_bandwidth=0.6e9,
            node_bandwidth=1e9,
            collective_latency=300e-6,
            overlaps_reduce=False,
            host_bandwidth=8e9,
            host_memory_bytes=16 * GIB,
            host_memory_bandwidth=8e9,
            reserved_bytes=0,
            fragmentation=0.01,
            source="one core with 256-bit vectors, gloo; calibrate for better",
        ),
    )
}
PATTERN = re.compile(
    r"(?:(?P<nodes>\d+)x)?(?:(?P<ranks>\d+)x)?(?P<name>[A-Za-z][A-Za-z0-9]*?)(?:-(?P<memory>\d+)(?:GB)?)?"
)


def parse_hardware(text: str) -> HardwareSpec:
    """`[NODESx][RANKSx]NAME[-MEMORY[GB]]`, e.g. 8xA6000-48GB, 2x8xH100, RTX4090; one number counts ranks.

    A memory that no preset of that name has replaces the preset's. ConfigError names the nearest known one.
    """
    match = PATTERN.fullmatch(text.strip().replace("_", "").replace(" ", ""))
    if match is None:
        raise ConfigError(f"hardware={text}: is not [NODESx]RANKSxNAME[-MEMORYGB]; write for example 8xA6000-48GB")
    nodes, ranks = (int(match[part]) if match[part] else 1 for part in ("nodes", "ranks"))
    if match["nodes"] and not match["ranks"]:
        nodes, ranks = 1, nodes
    if not nodes or not ranks:
        raise ConfigError(f"hardware={text}: no ranks; write for example 8x{match['name']}")
    preset = _find_preset(text, match["name"], match["memory"])
    return dataclasses.replace(preset, nodes=nodes, ranks_per_node=ranks)


def _find_preset(text: str, name: str, memory: str | None) -> HardwareSpec:
    named = [spec for spec in PRESETS.values() if spec.name.split("-")[0].lower() == name.lower()]
    if not named:
        bare = sorted({spec.name.split("-")[0] for spec in PRESETS.values()})
        close = nearest(name, bare) or nearest(name.lower(), [one.lower() for one in bare])
        hint = f"; did you mean {' or '.join(close).upper()}?" if close else ""
        raise ConfigError(f"hardware={text}: unknown device; known are {', '.join(PRESETS)}{hint}")
    exact = [spec for spec in named if spec.name.endswith(f"-{memory}GB")]
    if exact or (len(named) == 1 and memory is None):
        return (exact or named)[0]
    if memory is None:
        names = " or ".join(spec.name for spec in named)
        raise ConfigError(f"hardware={text}: which memory? Write {names}")
    if int(memory) == 0:
        raise ConfigError(f"hardware={text}: no memory; write for example {named[0].name}")
    return dataclasses.replace(
        named[0], name=f"{named[0].name.split('-')[0]}-{memory}GB", memory_bytes=int(memory) * GIB
    )


def calibration_file(spec: HardwareSpec) -> Path:
    """Where a calibration of this machine is kept."""
    return cache_folder() / "calibrations" / f"{platform.node()}-{spec.title}.json"


def detect_hardware(ranks: int = 1, device: str = "auto") -> HardwareSpec:
    """This machine, with all its GPUs, or `ranks` processes that share its CPU; calibrated if it has been.

    `device`: "cpu" leaves GPUs out. ConfigError for an unknown GPU, and for a calibration that cannot be read.
    """
    spec = _detect(ranks, device)
    path = calibration_file(spec)
    if not path.is_file():
        return spec
    try:
        measured = json.loads(path.read_text(encoding="utf-8"))
        if set(measured) != set(MEASURED):  # of another version: measured again, or the preset
            return spec
        if not all(value is None or float(value) >= 0 for value in measured.values()):
            raise ValueError("a value is below 0")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: is no calibration ({error}); remove it, or run leangrpo calibrate") from None
    return dataclasses.replace(spec, **measured, source=f"{spec.source}; calibrated")


def _detect(ranks: int, device: str) -> HardwareSpec:
    gpus = [] if device == "cpu" else _nvidia_gpus()
    if gpus:
        name, memory = gpus[0]
        alike = [spec for spec in PRESETS.values() if _names(spec, name)]
        if not alike:
            raise ConfigError(
                f"hardware: {name} is not among {', '.join(PRESETS)}; name the one most like it, "
                f"for example hardware={len(gpus)}xL40S"
            )
        preset = min(alike, key=lambda spec: abs(spec.memory_bytes - memory))
        return dataclasses.replace(preset, ranks_per_node=len(gpus), memory_bytes=memory, source=f"detected: {name}")
    import psutil

    memory, cores = psutil.virtual_memory().total, psutil.cpu_count(logical=False) or os.cpu_count() or 1
    cpu = PRESETS["CPU"]
    return dataclasses.replace(
        cpu,
        ranks_per_node=ranks,
        memory_bytes=memory // ranks,
        host_memory_bytes=memory,
        flops=cpu.flops * max(1.0, cores / ranks),
        float32_flops=cpu.float32_flops * max(1.0, cores / ranks),
        source=f"detected: {cores} cores, {memory / GIB:.0f} GiB",
    )


def _names(spec: HardwareSpec, detected: str) -> bool:
    """Whether a preset is the device that the driver calls `detected`, e.g. "NVIDIA H100 80GB HBM3"."""
    return spec.name.split("-")[0].lower() in detected.lower().replace(" ", "")


def _nvidia_gpus() -> list[tuple[str, int]]:
    """Name and bytes of every GPU that this process may use, through NVML: no CUDA context is made."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = pynvml.nvmlDeviceGetCount()
    chosen = range(count) if visible is None else range(min(count, len([v for v in visible.split(",") if v.strip()])))
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in chosen]
    found = [(str(pynvml.nvmlDeviceGetName(h)), int(pynvml.nvmlDeviceGetMemoryInfo(h).total)) for h in handles]
    pynvml.nvmlShutdown()
    return found
