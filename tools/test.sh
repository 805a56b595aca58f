#!/usr/bin/env bash
# Makes the environment if there is none, then runs the tests:
#   bash tools/test.sh [--slow] [pytest arguments]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/tools/venv.sh"

selection="not slow and not gpu"
if [ "${1:-}" = --slow ]; then
  selection="not gpu"
  shift
fi

use_environment "$root"
cd "$root"
export OMP_NUM_THREADS=1 # the tests compare bits, and several ranks share the cores
# Not "python -m pytest": it puts the repository on sys.path, where "kernels" and "tools" are folders.
"$VENV/bin/pytest" -m "$selection" "$@"
