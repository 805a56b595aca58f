"""FSDP2 and HSDP on public calls: parameters and optimizer states sharded, gradients local until one reduce-scatter.

Hooks on the unsharded parameters take every gradient away (engine/gradients.py), so FSDP2's own post-backward finds
nothing to reduce. `reduce` packs the finished flat gradient, group by group, into reduce-scatter order and leaves the
result as ordinary sharded gradients.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from leangrpo.configs.schema import Config
from leangrpo.engine.distributed import World, reduce_scatter_sum
from leangrpo.engine.policies.base import DTYPES, PolicyAdapter
from leangrpo.engine.sharding.base import (
    NonFiniteGradientError,
    ShardedSums,
    ShardingBackend,
    first_difference,
    optimizer_states,
)
from leangrpo.engine.sharding.host_states import HostStates
from leangrpo.engine.sharding.replicated import make_optimizer, refuse_other_parameters

TRAINABLE = StateDictOptions(ignore_frozen_params=True, strict=False)
IN_FLIGHT = 2
"""reduce-scatters under way at once: the next group is packed while one is on the wire"""


@dataclass
class ParameterGroup:
    """The trainable parameters of one FSDP module, packed as [ranks, width]: row w is what rank w receives.

    Each parameter takes ceil(dim 0 / ranks) of its rows in every row of the packing; the last ranks' are padded.
    """

    sharded: list[DTensor]
    columns: list[slice]
    width: int
    ranks: int

    @classmethod
    def of(cls, sharded: list[DTensor], ranks: int) -> "ParameterGroup":
        """Lay out `sharded`, all with placement Shard(0)."""
        columns, width = [], 0
        for parameter in sharded:
            rows = -(-parameter.shape[0] // ranks)
            size = rows * (parameter.numel() // parameter.shape[0])
            columns.append(slice(width, width + size))
            width += size
        return cls(sharded, columns, width, ranks)

    def pack(self, flat: Tensor) -> Tensor:
        """[ranks * width] from the group's part of a flat gradient."""
        packed = flat.new_zeros(self.ranks, self.width)
        start = 0
        for parameter, column in zip(self.sharded, self.columns, strict=True):
            piece, size = flat[start : start + parameter.numel()], column.stop - column.start
            start += parameter.numel()
            full, tail = divmod(len(piece), size)
            packed[:full, column] = piece[: full * size].view(full, size)
            if tail:
                packed[full, column.start : column.start + tail] = piece[full * size :]
        return packed.view(-1)

    def add_gradients(self, received: Tensor) -> None:
        """Add this rank's row [width] to the sharded gradients."""
        for parameter, column in zip(self.sharded, self.columns, strict=True):
            local = parameter.to_local()
            piece = received[column][: local.numel()].view(local.shape).to(local.device, local.dtype)
            if parameter.grad is not None:
                parameter.grad.to_local().add_(piece)  # type: ignore[attr-defined]
                continue
            parameter.grad = DTensor.from_local(
                piece,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )


class FSDP2(ShardingBackend, ShardedSums):
    """One shard of everything per rank; with `backend=hsdp` copies of the shards, one per group of `shard_ranks`."""

    def __init__(self, policy: PolicyAdapter, config: Config, world: World):
        self.world, self.max_grad_norm = world, config.optimizer.max_grad_norm
        self.resident = config.residency == "resident"
        self.mesh = make_mesh(policy.device.type, config, world)
        self._shard(policy, config)
        self.module = policy.module
        self.roots = [root for root in (policy.module, policy.base) if root is not None]
        self.modules = [m for root in self.roots for m in sharded_modules(root)]
        named = {name: p for name, p in policy.module.named_parameters() if p.requires_grad}
        self.names = {id(p): name for name, p in named.items()}
        self.groups: list[ParameterGroup] = []
        self.parameters: list[nn.Parameter] = []
        ranks = self.mesh.size(self.mesh.ndim - 1)
        for sharded, unsharded in trainable_groups(self.modules):
            self.groups.append(ParameterGroup.of(sharded, ranks))
            self.parameters += unsharded
        trainable: list[Tensor] = [p for group in self.groups for p in group.sharded]
        self.optimizer = make_optimizer(config.optimizer, trainable)
        self.host_states = HostStates(self.optimizer) if config.optimizer.states == "host" else None
        self.trainable = trainable
        self.parameter_groups, self.trainable_parameter_groups = len(self.modules), len(self.groups)

    def _shard(self, policy: PolicyAdapter, config: Config) -> None:
        dtype = DTYPES[config.precision]
        if dtype != torch.float32:
            for root in (policy.module, policy.base):
                for parameter in root.parameters() if root else ():
                    if not parameter.requires_grad:
                        parameter.data = parameter.data.to(dtype)  # only what is trained needs float32 masters
            policy.dtype = dtype
        settings: dict[str, Any] = {
            "mesh": self.mesh,
            "reshard_after_forward": not self.resident,
            # the inputs are cast by the policy: FSDP2 would round the timestep to BF16 as well
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False),
        }
        for root in (policy.module, policy.base):
            if root is None:
                continue
            for block in policy.blocks if root is policy.module else policy.base_blocks:
                fully_shard(block, **settings)
            fully_shard(root, **settings)
            for module in sharded_modules(root):
                module.set_reshard_after_backward(not self.resident)

    def begin_update(self) -> None:
        """Gather everything once, if it may stay."""
        if self.resident:
            for module in self.modules:
                module.unshard()

    def reduce(self, total: Tensor) -> None:
        self.add_gradients(self.reduce_scatter(total))

    @torch.no_grad()
    def reduce_scatter(self, flat: Tensor) -> list[Tensor]:
        waiting: deque[tuple[Tensor, Tensor, dist.Work]] = deque()
        parts: list[Tensor] = []
        start = 0
        for group in self.groups:
            size = sum(p.numel() for p in group.sharded)
            packed = group.pack(flat[start : start + size].to(group.sharded[0].device))
            start += size
            received = packed.new_empty(group.width)
            work = reduce_scatter_sum(received, packed, self.mesh.get_group(self.mesh.ndim - 1))
            waiting.append((received, packed, work))  # packed must outlive the collective
            if len(waiting) == IN_FLIGHT:
                parts.append(self._receive(*waiting.popleft()))
        parts += [self._receive(*waiting.popleft()) for _ in range(len(waiting))]
        return parts

    def _receive(self, received: Tensor, packed: Tensor, work: dist.Work) -> Tensor:
        work.wait()
        if self.mesh.ndim == 2:
            dist.all_reduce(received, group=self.mesh.get_group(0))
        return received

    @torch.no_grad()
    def add_gradients(self, shards: list[Tensor]) -> None:
        for group, received in zip(self.groups, shards, strict=True) if shards else ():
            group.add_gradients(received)

    def full_gradients(self) -> dict[str, Tensor]:
        gradients = {}
        for parameter in self._sharded():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert isinstance(gradient, DTensor)
            gradients[self.names[id(parameter)]] = gradient.full_tensor().detach()
        return gradients

    @torch.no_grad()
    def step(self) -> float:
        # [Note: reshard before the step] Clip and optimizer work on the sharded parameters. A module that is still
        # unsharded, as after any forward that keeps its parameters, would go on computing with the old weights.
        for module in self.modules:
            module.reshard()
        norm = torch.nn.utils.clip_grad_norm_(self.trainable, self.max_grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if norm.isfinite():
            self.optimizer.step()
        self.optimizer.zero_grad()
        if not norm.isfinite():
            raise NonFiniteGradientError(norm.item())
        return norm.item()

    def full_parameters(self) -> dict[str, Tensor]:
        return {self.names[id(p)]: p.full_tensor().detach() for p in self._sharded()}

    @torch.no_grad()
    def load_parameters(self, parameters: dict[str, Tensor]) -> None:
        refuse_other_parameters({self.names[id(p)]: p for p in self._sharded()}, parameters)
        for module in self.modules:
            module.reshard()
        for parameter in self._sharded():
            whole = parameters[self.names[id(parameter)]].to(parameter.device, parameter.dtype)
            rows = whole.chunk(self.mesh.size(self.mesh.ndim - 1))
            rank = self.mesh.get_local_rank(self.mesh.ndim - 1)
            if rank < len(rows):
                parameter.to_local().copy_(rows[rank])

    def save(self, directory: Path) -> None:
        save_distributed(self._state(), checkpoint_id=directory / "dcp")
        if self.host_states:
            self.host_states.store()

    def load(self, directory: Path) -> None:
        state = self._state()
        load_distributed(state, checkpoint_id=directory / "dcp")  # into the parameters themselves
        set_optimizer_state_dict(self.module, self.optimizer, state["optimizer"], options=TRAINABLE)
        if self.host_states:
            self.host_states.loaded()

    def owned(self) -> dict[str, list[Tensor]]:
        everything = [p for root in self.roots for p in root.parameters()]
        frozen = [p for p in self.module.parameters() if isinstance(p, DTensor) and not p.requires_grad]
        return {
            "parameters": [*self.trainable, *frozen, *self.module.buffers()],
            "gathered_parameters": [p for p in everything if not isinstance(p, DTensor)],
            "gradients": [p.grad for p in self.trainable if p.grad is not None],
            "optimizer_states": optimizer_states(self.optimizer),
        }

    def drift(self) -> str:
        """Only hsdp has copies: each shard is compared with its replicas."""
        if self.mesh.ndim == 1:
            return ""
        shards = [p.to_local() for p in self._sharded()]
        return first_difference([self.names[id(p)] for p in self._sharded()], shards, self.mesh.get_group(0))

    def _state(self) -> dict[str, Any]:
        """The trainable shards and the optimizer's; what was gathered is resharded, `begin_update` gathers again."""
        for module in self.modules:
            module.reshard()
        shards = {self.names[id(p)]: p.detach() for p in self._sharded()}
        optimizer = get_optimizer_state_dict(self.module, self.optimizer, options=TRAINABLE)
        return {"model": shards, "optimizer": optimizer}

    def _sharded(self) -> Iterator[DTensor]:
        for group in self.groups:
            yield from group.sharded


def sharded_modules(root: nn.Module) -> list[FSDPModule]:
    """The modules on which `fully_shard` was called, parents first."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def trainable_groups(modules: list[FSDPModule]) -> Iterator[tuple[list[DTensor], list[nn.Parameter]]]:
    """Per FSDP module with trainable parameters: the sharded ones, and the unsharded ones that stand in for them.

    FSDP2 makes the unsharded parameters once and keeps them; a test pins that.
    """
    taken: set[int] = set()
    for module in reversed(modules):  # children before parents: each parameter belongs to the innermost
        module.reshard()
        assert isinstance(module, nn.Module)
        own = {name: p for name, p in module.named_parameters() if p.requires_grad and id(p) not in taken}
        taken.update(id(p) for p in own.values())
        if own:
            module.unshard()
            whole = dict(module.named_parameters())
            yield [p for p in own.values() if isinstance(p, DTensor)], [whole[name] for name in own]
            module.reshard()


def make_mesh(device_type: str, config: Config, world: World) -> DeviceMesh:
    """All ranks in one dimension, or for hsdp (copies, shards)."""
    if config.backend == "fsdp2":
        return init_device_mesh(device_type, (world.size,), mesh_dim_names=("shard",))
    shard = config.shard_ranks or world.local_size
    return init_device_mesh(device_type, (world.size // shard, shard), mesh_dim_names=("replicate", "shard"))
