"""What the zero backends refuse before the first step, and the DeepSpeed settings that a run's configuration gives."""

import json
from typing import Any

import pytest
from zero_ranks import config_for

from leangrpo.configs.checks import ConfigError, check_config
from leangrpo.engine.sharding.deepspeed import MAX_BUCKET, settings_for
from leangrpo.tools.train import without_local_rank

BACKENDS = ("zero1", "zero2", "zero3")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_possible_configuration_passes(backend: str) -> None:
    check_config(config_for(backend))


@pytest.mark.parametrize(
    ("backend", "changes", "message"),
    [
        ("zero1", {"residency": "resharded"}, "residency"),
        ("zero2", {"residency": "resharded"}, "residency"),
        ("zero3", {"residency": "resident"}, "residency"),
        ("zero1", {"sync": "every_group"}, "one reduction per optimizer step"),
        ("zero2", {"sync": "every_backward", "schedule": "native"}, "one reduction per optimizer step"),
        ("zero3", {"sync": "every_backward", "schedule": "retain"}, "one reduction per optimizer step"),
        ("zero3", {"algorithm": {"beta": 0.1}}, "second backward"),
    ],
)
def test_what_cannot_be_exact_is_refused(backend: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(config_for(backend, **changes))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_run_fills_in_what_is_left_open(backend: str, precision: str) -> None:
    settings = settings_for(config_for(backend, precision=precision), trainable=1234)
    assert "auto" not in json.dumps(settings)
    assert settings["bf16"]["enabled"] == (precision == "bfloat16")
    assert settings["gradient_clipping"] == 2e-3
    assert settings["zero_optimization"]["stage"] == int(backend[-1])
    assert settings["zero_optimization"]["reduce_bucket_size"] == 1234


def test_the_bucket_of_a_large_model_is_bounded() -> None:
    settings = settings_for(config_for("zero2"), trainable=10**10)
    assert settings["zero_optimization"]["reduce_bucket_size"] == MAX_BUCKET


def test_what_the_deepspeed_launcher_adds_is_no_override() -> None:
    assert without_local_rank(["--local_rank=1", "CONFIG", "backend=zero2"]) == ["CONFIG", "backend=zero2"]
