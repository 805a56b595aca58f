"""DeepSpeed ZeRO 1, 2 and 3 through `deepspeed.initialize`: DeepSpeed's buckets, partitions, masters, clip and step.

During an update torch.autograd.grad runs on the module itself (engine/gradients.py), so that none of DeepSpeed's hooks
fires. `reduce` then makes one backward of DeepSpeed's engine over a surrogate graph: a node per parameter whose
gradient is the finished one. What is public in DeepSpeed does the rest.
"""

import itertools
import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from leangrpo.configs.checks import ConfigError
from leangrpo.configs.loader import PACKAGED
from leangrpo.configs.schema import Config
from leangrpo.engine.distributed import World
from leangrpo.engine.policies.base import DTYPES, PolicyAdapter
from leangrpo.engine.sharding.base import (
    NonFiniteGradientError,
    ShardingBackend,
    first_difference,
    optimizer_states,
)
from leangrpo.engine.sharding.replicated import make_optimizer, refuse_other_parameters, save_parameters
from leangrpo.engine.sharding.zero3_trace import record_before_first_forward

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
MAX_BUCKET = 500_000_000
"""elements of one gradient collective, DeepSpeed's default; stages 1 and 2 allocate a buffer of the bucket's size"""
TAG = "deepspeed"
"""sub-folder of a checkpoint with DeepSpeed's own files"""


class DeepSpeedZero(ShardingBackend):
    """A DeepSpeed engine around `policy.module`, which stays the module that the policy runs.

    In stage 3 parameters are empty between uses: only `full_parameters` shows them. `policy.base`, the frozen copy for
    the KL term of full fine-tuning, stays whole on every rank.
    """

    uses_accumulation = False

    def __init__(self, policy: PolicyAdapter, config: Config, world: World):
        self.world, self.stage = world, STAGES[config.backend]
        named = [(name, p) for name, p in policy.module.named_parameters() if p.requires_grad]
        self.names, self.parameters = [name for name, _ in named], [p for _, p in named]
        self.shapes = [p.shape for p in self.parameters]
        masters = {}
        if config.precision != "float32":
            masters = {name: p.detach().cpu().clone() for name, p in named}
            policy.to(dtype=DTYPES[config.precision])
        deepspeed = import_deepspeed(policy.device, world)
        self.engine, *_ = deepspeed.initialize(
            model=policy.module,
            model_parameters=self.parameters,
            optimizer=make_optimizer(config.optimizer, list(self.parameters)),
            config=settings_for(config, sum(shape.numel() for shape in self.shapes)),
        )
        assert self.engine.module is policy.module
        self.is_partitioned = self.stage == 3
        holders = [m for m in policy.module.modules() if any(True for _ in m.parameters(recurse=False))]
        self.parameter_groups = len(holders) if self.is_partitioned else 1
        self.trainable_parameter_groups = -(-sum(shape.numel() for shape in self.shapes) // MAX_BUCKET)
        if self.is_partitioned:
            record_before_first_forward(policy.module, self.parameters, self.after_backward)
        if masters:  # DeepSpeed has made its float32 masters from rounded parameters
            self.load_parameters(masters)

    def after_backward(self) -> None:
        """A module whose inputs need no gradient is not told that its backward is over, and would stay gathered."""
        if self.is_partitioned:
            self.engine.optimizer.parameter_offload.release_backward_leftovers()

    def reduce(self, total: Tensor) -> None:
        """One reduction per step: a second call replaces the first."""
        # [Note: instead of a forward of the engine] Stage 3 adds to the gradient of the last backward unless it is told
        # that a new step begins; engine.forward and engine.step would say so, but an update may end without them.
        self.engine.optimizer.zero_grad()
        self.engine.optimizer.clear_backward_seen_flag()
        ends = list(itertools.accumulate(shape.numel() for shape in self.shapes))
        with self._ready_for_injection(), torch.enable_grad():
            chain = torch.zeros((), device=self.parameters[0].device, requires_grad=True)
            for parameter, shape, end in zip(self.parameters, self.shapes, ends, strict=True):
                piece = total[end - shape.numel() : end].view(shape)
                chain = _Inject.apply(chain, parameter, partial(self._share, parameter, piece))  # type: ignore[no-untyped-call]
            self.engine.backward(chain, scale_wrt_gas=False)

    def _share(self, parameter: nn.Parameter, piece: Tensor) -> Tensor:
        """DeepSpeed averages over the ranks; the sum is wanted."""
        return piece.to(parameter.device, torch.float32) * self.world.size

    @contextmanager
    def _ready_for_injection(self) -> Iterator[None]:
        """Let the parameters take float32 gradients of their whole shapes, without gathering them."""
        data = [p.data for p in self.parameters]
        for parameter, shape in zip(self.parameters, self.shapes, strict=True):
            if parameter.shape != shape:  # stage 3; autograd compares shapes, nobody reads the values
                parameter.data = parameter.new_empty(1).expand(shape)
            parameter.grad_dtype = torch.float32
        try:
            yield
        finally:
            for parameter, before in zip(self.parameters, data, strict=True):
                parameter.grad = None
                parameter.data = before
                parameter.grad_dtype = before.dtype

    def full_gradients(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_grad

        return {name: safe_get_full_grad(p).detach() for name, p in zip(self.names, self.parameters, strict=True)}

    def step(self) -> float:
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm())
        if not math.isfinite(norm):  # DeepSpeed has skipped the step
            raise NonFiniteGradientError(norm)
        return norm

    def full_parameters(self) -> dict[str, Tensor]:
        return dict(self._whole_parameters())

    def _whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_fp32_param

        for name, parameter in zip(self.names, self.parameters, strict=True):
            yield name, safe_get_full_fp32_param(parameter).detach()

    @torch.no_grad()
    def load_parameters(self, parameters: dict[str, Tensor]) -> None:
        own = {name: torch.empty(shape, device="meta") for name, shape in zip(self.names, self.shapes, strict=True)}
        refuse_other_parameters(own, parameters)
        for name, parameter in zip(self.names, self.parameters, strict=True):
            self._set(parameter, parameters[name].to(parameter.device, torch.float32))

    def _set(self, parameter: nn.Parameter, value: Tensor) -> None:
        """The parameter, and the part of its master that this rank owns."""
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        if not self.is_partitioned:
            parameter.data.copy_(value)
            safe_set_full_fp32_param(parameter, value)
            return
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(value)
        size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        padded = nn.functional.pad(value.flatten(), (0, size * self.world.size - value.numel()))
        safe_set_local_fp32_param(parameter, padded[size * self.world.rank : size * (self.world.rank + 1)])

    def save(self, directory: Path) -> None:
        """DeepSpeed's files, and the whole parameters in a file that one process can read without running code."""
        self.engine.save_checkpoint(str(directory), tag=TAG, save_latest=False, exclude_frozen_parameters=True)
        whole = {}
        for name, value in self._whole_parameters():
            if self.world.is_main:
                whole[name] = value.cpu()
        if self.world.is_main:
            save_parameters(whole, directory)

    def load(self, directory: Path) -> None:
        """ConfigError if the checkpoint is of another number of ranks."""
        saved = len(list((directory / TAG).glob("*_optim_states.pt")))
        if saved != self.world.size:
            raise ConfigError(
                f"resume=true: {directory} was written by {saved} ranks, there are {self.world.size}, and a ZeRO "
                f"checkpoint cannot be split anew; start {saved} ranks (those of backend=fsdp2 fit any number)"
            )
        path, _ = self.engine.load_checkpoint(str(directory), tag=TAG, load_module_strict=False)
        assert path is not None, directory

    def owned(self) -> dict[str, list[Tensor]]:
        """Under "parameters" also stage 3's shards in the working precision."""
        zero = self.engine.optimizer
        masters = zero.fp32_partitioned_groups_flat if self.is_partitioned else zero.single_partition_of_fp32_groups
        modules = list(self.engine.module.parameters())
        shards = [p.ds_tensor for p in modules] if self.is_partitioned else []
        averaged = [t for t in tree_leaves(zero.averaged_gradients) if isinstance(t, Tensor)]
        return {
            "gathered_parameters": modules,
            "parameters": [
                *masters,
                *shards,
                *self.engine.module.buffers(),
            ],  # a parameter that stage 3 keeps whole is its own shard
            "gradients": averaged + [master.grad for master in masters if master.grad is not None],
            "optimizer_states": optimizer_states(zero.optimizer),
        }

    def drift(self) -> str:
        """Stage 3 has no copies."""
        if self.is_partitioned or self.world.size == 1:
            return ""
        return first_difference(self.names, self.parameters, None)


class _Inject(torch.autograd.Function):
    """Identity on `chain`; its backward gives `parameter` the gradient `make()`, made no earlier than needed."""

    @staticmethod
    def forward(ctx: Any, chain: Tensor, parameter: Tensor, make: Callable[[], Tensor]) -> Tensor:
        ctx.make = make
        return chain.clone()

    @staticmethod
    def backward(ctx: Any, grad_chain: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad_chain, ctx.make(), None


def settings_for(config: Config, trainable: int) -> dict[str, Any]:
    """configs/deepspeed/BACKEND.json with every "auto" filled in; the README beside it lists them."""
    settings: dict[str, Any] = json.loads((PACKAGED / "deepspeed" / f"{config.backend}.json").read_text())
    settings["gradient_clipping"] = config.optimizer.max_grad_norm
    settings["bf16"]["enabled"] = config.precision == "bfloat16"
    settings["zero_optimization"]["reduce_bucket_size"] = min(trainable, MAX_BUCKET)
    return settings


def import_deepspeed(device: torch.device, world: World) -> Any:
    """The library, told where it runs; slow to import, and it looks for its device while it is imported."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))
    os.environ.setdefault("LOCAL_SIZE", str(world.local_size))
    import deepspeed
    from deepspeed.ops import __compatible_ops__
    from deepspeed.utils import logger

    # Only inference uses this operator, but every start would compile it, and wait for ever at the lock that a killed
    # compilation leaves behind.
    __compatible_ops__["deepspeed_shm_comm"] = False
    logger.setLevel(logging.WARNING)
    return deepspeed
