"""Bytes that can be counted by hand: storages as they come, share, grow and go; then whole updates of an engine."""

import gc
from typing import Any

import pytest
import torch
from small import PROMPTS, small_config, small_engine
from torch import nn

from leangrpo.engine.memory_meter import MemoryMeter
from leangrpo.engine.storage_meter import StorageMeter

CPU = torch.device("cpu")


def meter(**settings: Any) -> StorageMeter:
    return StorageMeter(CPU, ("made", "known"), **settings)


def test_counts_storages_once_until_they_are_freed() -> None:
    with meter() as m:
        a = torch.zeros(100)
        view, transposed = a[50:], a.view(10, 10).t()
        assert m.current == 400
        b = a + 1
        assert m.current == 800
        del a
        assert m.current == 800  # the views hold it
        del view, transposed
        assert m.current == 400
        del b
        c = torch.zeros(50)
        assert m.current == 200
    assert m.peak_bytes == 800 and m.peak == {"made": 800, "known": 0}
    del c


def test_a_freed_tensor_does_not_add_to_the_next() -> None:
    """One at a time: the peak would be 4000 if frees went unseen."""
    with meter() as m:
        for _ in range(10):
            x = torch.zeros(100)
            del x
    assert m.peak_bytes == 400


def test_sees_storages_that_are_resized() -> None:
    with meter() as m:
        x = torch.zeros(100)
        x.untyped_storage().resize_(0)  # as FSDP2 frees
        assert m.current == 0
        x.untyped_storage().resize_(1200)
        assert m.current == 1200
        x.resize_(500)
        assert m.current == 2000
        x.untyped_storage().resize_(0)
    assert m.peak_bytes == 2000


def test_forward_and_backward_of_a_linear_layer() -> None:
    """x [8, 16], weight [4, 16], bias [4]: y and sum forward; dy, dx? no: x is no parameter."""
    layer, x = nn.Linear(16, 4), torch.ones(8, 16)
    with meter() as m:
        m.label([*layer.parameters(), x], "known")
        known = 4 * (4 * 16 + 4 + 8 * 16)
        assert m.current == known
        loss = layer(x).sum()
        assert m.current == known + 4  # y is freed: a sum does not need it
        assert m.peak_bytes == known + 4 * 8 * 4 + 4
        loss.backward()
        gc.collect()
        assert m.current == known + 4 + 4 * (4 * 16 + 4)  # the gradients
        assert m.held["known"] == known
        m.label([layer.weight.grad], "known")
        assert m.held == {"made": 4 + 4 * 4, "known": known + 4 * 64}
        layer.zero_grad()
        assert m.current == known + 4


def test_ends_with_storages_as_they_were() -> None:
    resize = torch.UntypedStorage.resize_
    with meter(), meter():
        pass
    assert torch.UntypedStorage.resize_ is resize


@pytest.mark.parametrize(
    "change", [{}, {"schedule": "retain"}, {"policy": {"weights": "lora"}, "precision": "bfloat16"}]
)
def test_update_of_an_engine_by_component(change: dict[str, Any]) -> None:
    """3 prompts x 4 samples, streaming at 2 per forward: pending [2, N], sums 0 and 1, and the total."""
    engine = small_engine(small_config(**change))
    engine.train_step(PROMPTS)
    with MemoryMeter(engine) as m:
        engine.train_step(PROMPTS)
    buffer = 4 * engine.gradients.numel
    module = [*engine.policy.module.parameters(), *engine.policy.module.buffers()]
    own = sum(t.nbytes for t in module)
    copies = sum(p.nbytes for p in engine.backend.parameters) if "precision" in change else 0
    assert sum(m.peak.values()) == m.peak_bytes
    assert m.peak["gradient_buffers"] == m.peaks_of["gradient_buffers"] == buffer * (1 if "schedule" in change else 5)
    assert m.peak["gathered_parameters"] == copies
    assert m.peak["parameters"] == own - copies + (buffer if copies else 0)
    assert m.peaks_of["gradients"] == buffer
    step_counters = 4 * len(engine.backend.parameters)
    assert m.peak["optimizer_states"] == 2 * buffer + step_counters
    assert m.peak_phase == ("rollout" if "schedule" in change else "backward")
    assert m.held["activations"] + m.held["temporaries"] < 100  # all is freed but the loss that metrics were made of
