"""`leangrpo plan CONFIG [key=value] [--json] [--all]`: predict memory and time, choose how an update is executed."""

import json
import sys
from collections.abc import Sequence

from leangrpo.configs.loader import load_config
from leangrpo.planners.report import describe_plan
from leangrpo.planners.search import plan


def plan_command(
    config_name_or_path: str, overrides: Sequence[str] = (), *, as_json: bool = False, show_all: bool = False
) -> int:
    """Print the plan of a configuration; returns the exit status. Raises ConfigError."""
    result = plan(load_config(config_name_or_path, overrides))
    if as_json:
        json.dump(result.to_dict(), sys.stdout, indent=1)
        print()
    else:
        print(describe_plan(result, everything=show_all))
    return 0
