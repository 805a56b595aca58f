"""optimizer.states=host: the same bits, and no state on the device between steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small import PROMPTS, small_config, small_engine
from torch import Tensor

from leangrpo.engine.trainer import Engine

CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"precision": "bfloat16", "policy": {"weights": "lora"}},
    "8 bit": {"optimizer": {"name": "adamw_8bit"}},
}


def with_states(where: str, case: dict[str, Any]) -> Engine:
    return small_engine(small_config(**(case | {"optimizer": case.get("optimizer", {}) | {"states": where}})))


def bytes_on_device(engine: Engine) -> int:
    states = engine.backend.optimizer.state.values()  # type: ignore[attr-defined]
    assert all(states) and len(states) == len(engine.backend.parameters)
    return sum(v.untyped_storage().nbytes() for state in states for v in state.values() if isinstance(v, Tensor))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_same_bits_and_nothing_left_on_the_device(case: dict[str, Any], tmp_path: Path) -> None:
    device, host = with_states("device", case), with_states("host", case)
    for update in range(3):
        device.train_step(PROMPTS)
        host.train_step(PROMPTS)
        assert bytes_on_device(device) > 0 and bytes_on_device(host) == 0
        if update == 1:
            host.backend.save(tmp_path)
            assert bytes_on_device(host) == 0
    expected = device.backend.full_parameters()
    assert all(torch.equal(p, expected[name]) for name, p in host.backend.full_parameters().items())
    resumed = with_states("host", case)
    resumed.backend.load(tmp_path)
    resumed.update = 2
    assert bytes_on_device(resumed) == 0
    resumed.train_step(PROMPTS)
    assert all(torch.equal(p, expected[name]) for name, p in resumed.backend.full_parameters().items())
