"""Every rank holds everything: float32 master weights, AdamW, one all-reduce of the gradient per reduction."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from leangrpo.configs.schema import Config, OptimizerConfig
from leangrpo.engine.distributed import World
from leangrpo.engine.policies.base import DTYPES, PolicyAdapter
from leangrpo.engine.sharding.base import NonFiniteGradientError, ShardingBackend, first_difference, optimizer_states
from leangrpo.engine.sharding.host_states import HostStates


def make_optimizer(config: OptimizerConfig, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """AdamW over `parameters`, in torch's fused form or with bitsandbytes' 8-bit states."""
    settings: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.beta1, config.beta2),
        "eps": config.epsilon,
        "weight_decay": config.weight_decay,
    }
    if config.name == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit  # slow to import, so only where it is used

        optimizer: torch.optim.Optimizer = AdamW8bit(parameters, **settings)
        return optimizer
    return torch.optim.AdamW(parameters, fused=True, **settings)


class Replicated(ShardingBackend):
    """The optimizer steps float32 masters: the module's own parameters or, in lower precision, copies of them.

    `policy` comes in float32 and is cast here; after every step it gets the rounded masters.
    """

    def __init__(self, policy: PolicyAdapter, config: Config, world: World):
        self.module, self.world, self.max_grad_norm = policy.module, world, config.optimizer.max_grad_norm
        named = [(name, p) for name, p in policy.module.named_parameters() if p.requires_grad]
        self.names, self.parameters = [name for name, _ in named], [p for _, p in named]
        dtype = DTYPES[config.precision]
        self.has_copies = dtype != torch.float32
        self.masters: list[Tensor] = list(self.parameters)
        if self.has_copies:
            self.masters = [p.detach().clone() for p in self.parameters]
            policy.to(dtype=dtype)
        self.parameter_groups = self.trainable_parameter_groups = 1
        self.gradient: Tensor | None = None
        self.optimizer = make_optimizer(config.optimizer, self.masters)
        self.host_states = HostStates(self.optimizer) if config.optimizer.states == "host" else None

    @torch.no_grad()
    def reduce(self, total: Tensor) -> None:
        summed = total.to(self.masters[0].device)
        if self.world.size > 1:
            torch.distributed.all_reduce(summed)
        self.gradient = summed.float() if self.gradient is None else self.gradient.add_(summed)

    def full_gradients(self) -> dict[str, Tensor]:
        assert self.gradient is not None, "no gradient was reduced"
        pieces = self.gradient.split([master.numel() for master in self.masters])
        return {n: piece.view_as(m) for n, piece, m in zip(self.names, pieces, self.masters, strict=True)}

    @torch.no_grad()
    def step(self) -> float:
        for master, gradient in zip(self.masters, self.full_gradients().values(), strict=True):
            master.grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm)
        self.gradient = None
        if norm.isfinite():
            self.optimizer.step()
        self.optimizer.zero_grad()
        if not norm.isfinite():
            raise NonFiniteGradientError(norm.item())
        if self.has_copies:
            self._copy_masters()
        return norm.item()

    def full_parameters(self) -> dict[str, Tensor]:
        return {name: master.detach() for name, master in zip(self.names, self.masters, strict=True)}

    @torch.no_grad()
    def load_parameters(self, parameters: dict[str, Tensor]) -> None:
        refuse_other_parameters(self.full_parameters(), parameters)
        for name, master in self.full_parameters().items():
            master.copy_(parameters[name])
        if self.has_copies:
            self._copy_masters()

    def save(self, directory: Path) -> None:
        if self.world.is_main:
            save_parameters(self.full_parameters(), directory)
            torch.save(self.optimizer.state_dict(), directory / "optimizer.pt")
        if self.host_states:
            self.host_states.store()

    def load(self, directory: Path) -> None:
        self.load_parameters(load_file(directory / PARAMETERS))
        state: dict[str, Any] = torch.load(directory / "optimizer.pt", map_location="cpu", weights_only=True)
        self.optimizer.load_state_dict(state)
        if self.host_states:
            self.host_states.loaded()

    def owned(self) -> dict[str, list[Tensor]]:
        frozen = [p for p in self.module.parameters() if not p.requires_grad]
        gradients = [master.grad for master in self.masters if master.grad is not None]
        return {
            "parameters": [*self.masters, *frozen, *self.module.buffers()],
            "gathered_parameters": list(self.parameters) if self.has_copies else [],
            "gradients": gradients + ([] if self.gradient is None else [self.gradient]),
            "optimizer_states": optimizer_states(self.optimizer),
        }

    def drift(self) -> str:
        return first_difference(self.names, self.masters, None) if self.world.size > 1 else ""

    def _copy_masters(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)


PARAMETERS = "parameters.safetensors"


def save_parameters(parameters: dict[str, Tensor], directory: Path) -> None:
    """Write the whole trainable parameters as one safetensors file."""
    save_file({name: p.contiguous().cpu() for name, p in parameters.items()}, directory / PARAMETERS)


def refuse_other_parameters(own: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """ValueError if names or shapes differ."""
    if own.keys() != saved.keys():
        different = sorted(own.keys() ^ saved.keys())
        raise ValueError(f"saved parameters do not fit the policy: {different[0]} (and {len(different) - 1} more)")
    for name, parameter in own.items():
        if parameter.shape != saved[name].shape:
            shapes = f"{list(saved[name].shape)}, the policy {list(parameter.shape)}"
            raise ValueError(f"saved parameter {name} has shape {shapes}")
