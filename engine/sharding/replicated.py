"""One rank that holds everything: float32 master weights, AdamW, clipping."""

from typing import Any

import torch
from torch import Tensor, nn

from leangrpo.configs.schema import OptimizerConfig


class NonFiniteGradientError(FloatingPointError):
    """The gradient norm is NaN or infinite; the optimizer step was not made."""


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


class Replicated:
    """Applies a finished flat gradient to `module`.

    The optimizer steps float32 masters: the module's own parameters or, with `keep_masters`, copies of them that are
    taken now, so that the module can be cast to a lower precision; it then gets the rounded masters after every step.
    """

    def __init__(self, module: nn.Module, config: OptimizerConfig, *, keep_masters: bool):
        self.named_parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        working = [parameter for _, parameter in self.named_parameters]
        self.has_copies = keep_masters
        masters: list[Tensor] = [p.detach().clone() for p in working] if self.has_copies else list(working)
        self.masters = masters
        self.max_grad_norm = config.max_grad_norm
        self.optimizer = make_optimizer(config, self.masters)

    @torch.no_grad()
    def step(self, gradient: Tensor) -> float:
        """Clip the flat gradient [N], step, return its norm before clipping. NonFiniteGradientError: no step made."""
        start = 0
        gradient = gradient.to(self.masters[0].device, torch.float32)
        for master in self.masters:
            master.grad = gradient[start : start + master.numel()].view_as(master)
            start += master.numel()
        norm = torch.nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm).item()
        if not torch.isfinite(torch.tensor(norm)):
            self.optimizer.zero_grad()
            raise NonFiniteGradientError(
                f"gradient norm {norm}: no step was made; check the reward's range, lower optimizer.learning_rate, "
                "or set precision=float32"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.has_copies:
            self._copy_masters()
        return norm

    def parameters(self) -> dict[str, Tensor]:
        """The float32 masters by name."""
        return {name: master.detach() for (name, _), master in zip(self.named_parameters, self.masters, strict=True)}

    @torch.no_grad()
    def load(self, parameters: dict[str, Tensor], optimizer_state: dict[str, Any] | None) -> None:
        """Take over saved masters and optimizer state. ValueError names what does not fit."""
        names = {name for name, _ in self.named_parameters}
        if names != parameters.keys():
            different = sorted(names ^ parameters.keys())
            raise ValueError(f"saved parameters do not fit the policy: {different[0]} (and {len(different) - 1} more)")
        for (name, _), master in zip(self.named_parameters, self.masters, strict=True):
            if master.shape != parameters[name].shape:
                raise ValueError(
                    f"saved parameter {name} has shape {list(parameters[name].shape)}, the policy {list(master.shape)}"
                )
            master.copy_(parameters[name])
        if optimizer_state is not None:
            self.optimizer.load_state_dict(optimizer_state)
        if self.has_copies:
            self._copy_masters()

    def _copy_masters(self) -> None:
        for (_, parameter), master in zip(self.named_parameters, self.masters, strict=True):
            parameter.copy_(master)
