"""What the engine needs of a backend: where gradients are captured, how they are reduced, and the optimizer step."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn


class NonFiniteGradientError(FloatingPointError):
    """The gradient norm is NaN or infinite; the optimizer step was not made."""

    def __init__(self, norm: float):
        super().__init__(
            f"gradient norm {norm}: no step was made; check the reward's range, lower optimizer.learning_rate, "
            "or set precision=float32"
        )


class ShardingBackend(ABC):
    """Owns parameters, optimizer and their distribution. All methods but the properties are collective.

    Backends are made from (policy, config, world); the policy comes in float32 and on its device.
    """

    parameters: list[nn.Parameter]
    """the trainable parameters on which autograd accumulates, in the order of the flat gradient"""
    parameter_groups: int
    """units in which parameters are gathered"""
    trainable_parameter_groups: int
    """units in which gradients are reduced"""
    uses_accumulation = True
    """False: gradients must be caught before autograd accumulates them (DeepSpeed's own hooks sit there)"""

    def begin_update(self) -> None:  # noqa: B027 - most backends have nothing to prepare
        """Before the first forward of a rollout."""

    def after_backward(self) -> None:  # noqa: B027 - nor to tidy up
        """After each backward of the policy."""

    @abstractmethod
    def reduce(self, total: Tensor) -> None:
        """Sum the rank-local flat gradient [N] over the ranks into what `step` will use; adds up over calls."""

    @abstractmethod
    def full_gradients(self) -> dict[str, Tensor]:
        """What `step` would use: the reduced gradients before the clip, whole, in float32, by name."""

    @abstractmethod
    def step(self) -> float:
        """Clip, step, and return the global gradient norm before clipping.

        Raises NonFiniteGradientError, on all ranks, without making a step.
        """

    @abstractmethod
    def full_parameters(self) -> dict[str, Tensor]:
        """The trainable parameters, whole, in float32, by name."""

    @abstractmethod
    def load_parameters(self, parameters: dict[str, Tensor]) -> None:
        """Set the trainable parameters. ValueError names what does not fit."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write parameters and optimizer state into an existing folder."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Take over what `save` wrote."""

    @abstractmethod
    def owned(self) -> dict[str, list[Tensor]]:
        """What is held now for parameters, gradients and optimizer, by component of the planner's memory model."""

    @abstractmethod
    def drift(self) -> str:
        """Name of a parameter of which ranks that should agree hold different values; empty if there is none."""


class ShardedSums(ABC):
    """A backend that can reduce a gradient now and use its own part of the result later."""

    @abstractmethod
    def reduce_scatter(self, flat: Tensor) -> list[Tensor]:
        """This rank's part of the sum of `flat` [N] over the ranks, one tensor per parameter group. Collective."""

    @abstractmethod
    def add_gradients(self, shards: list[Tensor]) -> None:
        """Add parts as `reduce_scatter` returns them to what `step` will use; an empty list adds nothing."""


def optimizer_states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors that `optimizer` keeps from step to step."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def first_difference(names: Iterable[str], values: Iterable[Tensor], group: dist.ProcessGroup | None) -> str:
    """The first name whose value is not the same, to the bit, on all ranks of `group`. Collective."""
    names = list(names)
    sums = torch.stack([fingerprint(value) for value in values])
    low, high = sums.clone(), sums.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    different = (low != high).any(dim=1).nonzero().flatten()
    return names[int(different[0])] if len(different) else ""


def fingerprint(value: Tensor) -> Tensor:
    """Two integers [2] that change with any bit of a float32 tensor and with the places of its elements."""
    bits = value.detach().float().contiguous().view(torch.int32).flatten().long()
    places = torch.arange(1, bits.numel() + 1, device=bits.device)
    return torch.stack([bits.sum(), (bits * (places % 65521)).sum()]).cpu()
