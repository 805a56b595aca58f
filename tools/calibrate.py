"""`leangrpo calibrate [CONFIG] [--ranks N]`: measure this machine and keep the result for later plans.

What is run are two blocks, with random weights, of the model that CONFIG names, in its precision. Without --ranks all
GPUs of this machine, or one process on its CPU. Nothing else should be running.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from leangrpo.configs.loader import load_config
from leangrpo.configs.schema import LoraConfig
from leangrpo.engine.distributed import World
from leangrpo.engine.policies.base import DTYPES
from leangrpo.engine.policies.digits import add_lora
from leangrpo.planners.calibrate import calibrate, store
from leangrpo.planners.hardware import MEASURED, detect_hardware
from leangrpo.planners.model_trace import find_model
from leangrpo.planners.models import ModelSpec, input_shapes
from leangrpo.planners.types import HardwareSpec
from leangrpo.tools.launch import on_ranks

DEFAULT = "digits_flowgrpo_lora"
LAYERS = ("num_layers", "num_single_layers")
WIDTHS = (4, 16)  # attention heads of the digits policy: 64 and 256 channels
UNITS = {
    "flops": (1e12, "TFLOP/s, bfloat16"),
    "float32_flops": (1e12, "TFLOP/s, float32"),
    "efficiency": (1, "of them in a forward"),
    "backward_efficiency": (1, "of them in a backward"),
    "operator_seconds": (1e-6, "us to issue an operator"),
    "backward_operator_seconds": (1e-6, "us in a backward"),
    "operator_bandwidth": (1e9, "GB/s of operators, forward"),
    "backward_operator_bandwidth": (1e9, "GB/s of operators, backward"),
    "graph_operator_seconds": (1e-6, "us of graph per operator of a forward"),
    "checkpoint_block_seconds": (1e-6, "us per checkpointed block"),
    "checkpoint_operator_seconds": (1e-6, "us per operator in one"),
    "memory_bandwidth": (1e9, "GB/s of memory"),
    "host_bandwidth": (1e9, "GB/s between host and device"),
    "host_memory_bandwidth": (1e9, "GB/s of host memory"),
    "all_gather_bandwidth": (1e9, "GB/s, all-gather"),
    "reduce_scatter_bandwidth": (1e9, "GB/s, reduce-scatter"),
    "collective_latency": (1e-6, "us, smallest collective"),
}


def calibrate_command(config_name_or_path: str = DEFAULT, *, ranks: int | None = None) -> int:
    """Measure, store and print; returns the exit status. Raises ConfigError."""
    config = load_config(config_name_or_path)
    spec = calibrate_machine(ranks, model=config.policy.name, dtype=config.precision)
    path = store(spec)
    print(f"{spec.title}: {spec.source}\n")
    for name, (unit, text) in UNITS.items():
        value = getattr(spec, name)
        print(f"{text:32}" + ("contained in the efficiencies" if value is None else f"{value / unit:10.3g}"))
    print(f"\nkept in {path}")
    return 0


def calibrate_machine(
    ranks: int | None = None,
    *,
    model: str = "digits",
    dtype: Literal["float32", "bfloat16"] = "float32",
    device: str | None = None,
) -> HardwareSpec:
    """Measure with `ranks` processes at once, one per device; by default all GPUs, or one process on the CPU."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if ranks is None:
        ranks = torch.cuda.device_count() if device == "cuda" else 1
    spec = detect_hardware(ranks)
    return HardwareSpec(**on_ranks(ranks, _measure, spec, model, dtype, device, device=device)[0])


def _measure(
    world: World, spec: HardwareSpec, model: str, dtype: Literal["float32", "bfloat16"], device: str
) -> dict[str, Any]:
    if device == "cuda":
        torch.cuda.set_device(world.local_rank)
    family, kind = find_model(model), DTYPES[dtype]
    sizes = (
        [{"num_attention_heads": n, "caption_projection_dim": 16 * n} for n in WIDTHS] if model == "digits" else [{}]
    )
    modules = []
    for size in sizes:
        for adapters in (False, True)[: 1 + (device == "cpu")]:  # operators of unlike sizes
            module = build_blocks(family, {**family.config, **size})
            if adapters:
                add_lora(module, LoraConfig(), seed=0)
            modules.append(nn.Module.to(module, device, kind))

    def inputs(batch: int) -> Mapping[str, Tensor]:
        shapes = input_shapes(family, family.height, family.width, family.frames, batch)
        return {
            name: torch.randn(shape, device=device).to(kind if of == "policy" else torch.float32)
            for name, (shape, of) in shapes.items()
        }

    return dataclasses.asdict(calibrate(spec, modules, inputs, dtype=dtype))


def build_blocks(family: ModelSpec, config: Mapping[str, Any]) -> Any:
    """The model with two blocks of every kind, or whole where it has no such count."""
    import diffusers

    shallow = {name: 2 for name in LAYERS if name in config}
    module = getattr(diffusers, family.class_name)(**{**config, **shallow})
    return module.train()


assert set(UNITS) == set(MEASURED)
