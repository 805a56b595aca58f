#!/usr/bin/env bash
# One machine, started by torchrun: a process per GPU, or as many as NPROC says (without a GPU it must say).
#
#   bash configs/launch/torchrun_one_node.sh CONFIG [key=value ...]
#   NPROC=2 bash configs/launch/torchrun_one_node.sh digits_flowgrpo_lora backend=fsdp2
#
# --max-restarts: after a process dies, all are started again; with resume=true they go on from the last checkpoint.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

exec torchrun --nproc-per-node "${NPROC:-gpu}" --max-restarts "${RESTARTS:-0}" "$root/tools/train.py" "$@"
