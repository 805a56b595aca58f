"""`python tools/train.py CONFIG key=value ...`: the same as `leangrpo train`, as a script that launchers can start."""

import sys
from collections.abc import Sequence

from leangrpo.tools.cli import main


def without_local_rank(arguments: Sequence[str]) -> list[str]:
    """The deepspeed launcher puts --local_rank=N first; the same number is in the environment."""
    return [argument for argument in arguments if not argument.startswith("--local_rank=")]


if __name__ == "__main__":
    sys.exit(main(["train", *without_local_rank(sys.argv[1:])]))
