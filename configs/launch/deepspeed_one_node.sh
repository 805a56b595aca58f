#!/usr/bin/env bash
# One machine, started by DeepSpeed's launcher; any backend, not only zero1, zero2 and zero3.
#
#   NPROC=8 bash configs/launch/deepspeed_one_node.sh CONFIG backend=zero2 [key=value ...]
#   NPROC=2 bash configs/launch/deepspeed_one_node.sh digits_flowgrpo_lora backend=zero2
#
# Without NPROC the launcher takes all GPUs; without a GPU it would start a single process, so give NPROC there.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

exec deepspeed ${NPROC:+--num_gpus "$NPROC"} "$root/tools/train.py" "$@"
