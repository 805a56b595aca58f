"""A key-value store that nobody has written to before, for processes that may have been restarted.

torchrun restarts failed workers on the store of the attempt before, whose keys are still there: gloo then reads
addresses of processes that are dead ("Connection refused"), or waits for them. The number of restarts is no way out:
every node counts its own. So rank 0 draws a name, and each rank asks for it under a name of its own.
"""

import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

POLL_SECONDS = 0.01


def fresh_store(rank: int, size: int, timeout: timedelta) -> Any:
    """The `dist.Store` that MASTER_ADDR and MASTER_PORT name in the environment, below a prefix of this attempt.

    Collective. RuntimeError if a rank has not come within `timeout`.
    """
    store, _, _ = next(rendezvous("env://", rank, size, timeout=timeout))
    return dist.PrefixStore(agree_on_attempt(store, rank, size, timeout), store)  # type: ignore[attr-defined]


def agree_on_attempt(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """The same new name on all ranks, whatever earlier attempts have left in `store`. Collective."""
    if rank > 0:
        ticket = uuid.uuid4().hex
        store.set(f"leangrpo/ticket/{rank}", ticket)
        attempt = _wait_for(store, f"leangrpo/attempt/{ticket}", timeout)  # a key that is ours alone: never a stale one
        store.set(f"leangrpo/joined/{attempt}/{rank}", "")
        return attempt
    attempt = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    for other in range(1, size):
        # the ticket may be one of the attempt before: answer what is there until its owner has joined
        while not store.check([f"leangrpo/joined/{attempt}/{other}"]):
            if store.check([f"leangrpo/ticket/{other}"]):
                store.set(f"leangrpo/attempt/{store.get(f'leangrpo/ticket/{other}').decode()}", attempt)
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {other} has not joined the {size} ranks within {timeout}")
            time.sleep(POLL_SECONDS)
    return attempt


def _wait_for(store: Any, key: str, timeout: timedelta) -> str:
    try:
        store.wait([key], timeout)
    except dist.DistStoreError as error:
        raise RuntimeError(f"rank 0 has not answered within {timeout}") from error
    return str(store.get(key).decode())
