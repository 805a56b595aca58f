"""Traces of the model families in `leangrpo.planners.models`, made once per machine and then read from disk."""

import contextlib
import dataclasses
import gc
import hashlib
import json
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from leangrpo.configs.checks import ConfigError
from leangrpo.configs.help import nearest
from leangrpo.planners.models import MODELS, ModelSpec, Shape, input_shapes
from leangrpo.planners.types import BlockTrace, PolicyTrace

FORMAT = 9  # of the stored traces; raise it when their meaning changes


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """Adapters as peft makes them."""

    rank: int
    target_modules: tuple[str, ...]


def find_model(name: str) -> ModelSpec:
    """The family of that name; ConfigError names the nearest."""
    if name in MODELS:
        return MODELS[name]
    close = nearest(name, list(MODELS))
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise ConfigError(f"policy.name={name}: unknown model; known are {', '.join(MODELS)}{hint}")


def cache_folder() -> Path:
    """Where traces and calibrations are kept: $XDG_CACHE_HOME/leangrpo, by default ~/.cache/leangrpo."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leangrpo"


def trace_model(
    name: str,
    *,
    lora: LoraSpec | None = None,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    guided: bool = False,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    cache: bool = True,
) -> PolicyTrace:
    """The trace of one denoising step of one sample; sizes in pixels, by default the family's.

    `guided`: classifier-free guidance, which doubles the batch where guidance is no input of the model. ConfigError for
    an unknown name, a size the model cannot take, or adapters that fit no layer.
    """
    spec = find_model(name)
    rows = 2 if guided and not spec.guidance_embedded else 1
    try:
        shapes = input_shapes(spec, height or spec.height, width or spec.width, frames or spec.frames, rows)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    key = _key(spec, shapes, lora, dtype)
    path = cache_folder() / "traces" / f"{name}-{key}.json"
    if cache and path.is_file():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # damaged: made again
            return trace_from_dict(json.loads(path.read_text(encoding="utf-8")))
    with _garbage_collector_paused():
        trace = _trace(name, spec, shapes, lora, rows, dtype)
    if cache:
        with contextlib.suppress(OSError):  # a folder that cannot be written costs time, and no run
            _store(trace, path)
    return trace


@contextlib.contextmanager
def _garbage_collector_paused() -> Iterator[None]:
    """Importing torch and diffusers makes a million objects that stay; walking them again and again takes a second."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _store(trace: PolicyTrace, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(dataclasses.asdict(trace)), encoding="utf-8")
    temporary.replace(path)  # two processes that plan at the same time must not read half a file


def trace_from_dict(stored: dict[str, Any]) -> PolicyTrace:
    """The inverse of dataclasses.asdict, from JSON."""
    lists = {key: tuple(value) for key, value in stored.items() if isinstance(value, list)}
    blocks = tuple(BlockTrace(**block) for block in stored["blocks"])
    return PolicyTrace(**{**stored, **lists, "blocks": blocks})


def _key(spec: ModelSpec, shapes: dict[str, Shape], lora: LoraSpec | None, dtype: str) -> str:
    what = {
        "format": FORMAT,
        "model": [spec.class_name, dict(spec.config)],
        "inputs": shapes,
        "lora": dataclasses.asdict(lora) if lora else None,
        "dtype": dtype,
        "versions": [version(package) for package in ("torch", "diffusers", "peft")],
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def _trace(
    name: str,
    spec: ModelSpec,
    shapes: dict[str, Shape],
    lora: LoraSpec | None,
    rows: int,
    dtype: Literal["float32", "bfloat16"],
) -> PolicyTrace:
    import torch  # seconds; a stored trace needs none of it

    from leangrpo.planners.trace import DTYPES, trace_module

    module = build_on_meta(spec, lora)
    inputs = {
        key: torch.empty(shape, dtype=DTYPES[dtype] if kind == "policy" else DTYPES[kind], device="meta")
        for key, (shape, kind) in shapes.items()
    }
    return trace_module(module, inputs, dtype=dtype, batch=rows, name=name)


def build_on_meta(spec: ModelSpec, lora: LoraSpec | None) -> Any:
    """The module without storage, with its adapter. ConfigError if a target fits no layer."""
    import diffusers
    import torch

    with torch.device("meta"):
        module = getattr(diffusers, spec.class_name)(**spec.config)
        if lora is None:
            return module
        from peft import LoraConfig

        module.requires_grad_(False)
        names = [name for name, _ in module.named_modules()]
        for target in lora.target_modules:
            if not any(name == target or name.endswith(f".{target}") for name in names):
                raise ConfigError(
                    f"policy.lora.target_modules={target}: matches no layer of {spec.class_name}; "
                    "attention layers are to_q, to_k, to_v, to_out.0"
                )
        module.add_adapter(LoraConfig(r=lora.rank, target_modules=list(lora.target_modules)))
    return module
