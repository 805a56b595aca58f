"""`python tools/train.py CONFIG key=value ...`: the same as `leangrpo train`, as a script that launchers can start."""

import os
import sys
from collections.abc import Sequence

from leangrpo.tools.cli import main


def without_local_rank(arguments: Sequence[str]) -> list[str]:
    """The deepspeed launcher puts --local_rank=N first; the same number is in the environment."""
    return [argument for argument in arguments if not argument.startswith("--local_rank=")]


if __name__ == "__main__":
    status = main(["train", *without_local_rank(sys.argv[1:])])
    sys.stdout.flush()
    sys.stderr.flush()
    # Sharding libraries keep the process group, so gloo's threads outlive it; one that lets go of a tensor while the
    # interpreter shuts down aborts the process, and the launcher takes a finished run for a failed one.
    os._exit(status)
