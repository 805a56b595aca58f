"""Optimizer states in host memory: on the device they exist during a step only, when activations and buffers are gone.

The storages are emptied and filled again in place, so the optimizer, DTensors around them and checkpoints never notice.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class HostStates:
    """Keeps the state of `optimizer` on the host, outside of steps, saving and loading.

    All copies are on the current stream, which orders them with the step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.away: list[tuple[torch.UntypedStorage, Tensor]] = []
        """emptied storages, and where their bytes are meanwhile"""
        optimizer.register_step_pre_hook(self._fetch)
        optimizer.register_step_post_hook(self.store)
        optimizer.register_state_dict_pre_hook(self._fetch)  # whoever reads them calls `store` at the end

    def store(self, *_: Any) -> None:
        """Move to the host what is on the device; the arguments are those of hooks."""
        for storage in self._storages():
            pinned = storage.device.type == "cuda"
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            host.copy_(_bytes(storage), non_blocking=True)
            storage.resize_(0)
            self.away.append((storage, host))

    def _fetch(self, *_: Any) -> None:
        while self.away:  # one by one: on a CPU both copies are in the same memory
            storage, host = self.away.pop()
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)

    def loaded(self) -> None:
        """After the optimizer has taken over other states."""
        self.away.clear()
        for state in self.optimizer.state.values():  # storages that come from a file cannot be emptied
            state |= {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}
        self.store()

    def _storages(self) -> list[torch.UntypedStorage]:
        """Each once: 8-bit optimizers share tables among parameters."""
        tensors = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        storages = [(v.to_local() if isinstance(v, DTensor) else v).untyped_storage() for v in tensors]
        return list({storage._cdata: storage for storage in storages if storage.nbytes()}.values())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
