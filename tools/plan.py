"""`leangrpo plan CONFIG [key=value] [--json] [--all]`: predict memory and time, choose how an update is executed."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import yaml

from leangrpo.configs.loader import load_config
from leangrpo.planners.hardware import parse_hardware
from leangrpo.planners.report import describe_plan
from leangrpo.planners.search import plan
from leangrpo.planners.types import CHOICES


def plan_command(
    config_name_or_path: str,
    overrides: Sequence[str] = (),
    *,
    hardware: str | None = None,
    as_json: bool = False,
    show_all: bool = False,
) -> int:
    """Print the plan of a configuration; returns the exit status.

    Overrides of the eight choices pin them; all others are overrides of the configuration. Raises ConfigError.
    """
    pinned: dict[str, Any] = {}
    others = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if key in CHOICES and equals:
            pinned[key] = yaml.safe_load(value)
        else:
            others.append(text)
    config = load_config(config_name_or_path, others)
    result = plan(config, hardware=parse_hardware(hardware) if hardware else None, pinned=pinned)
    if as_json:
        json.dump(result.to_dict(), sys.stdout, indent=1)
        print()
    else:
        print(describe_plan(result, everything=show_all))
    return 0
