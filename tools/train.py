"""`python tools/train.py CONFIG key=value ...`: the same as `leangrpo train`, as a script that launchers can start."""

import sys

from leangrpo.tools.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
