#!/usr/bin/env bash
# Several machines, started by DeepSpeed's launcher from one of them. It needs pdsh, password-free ssh to all of them,
# and the repository, its environment and out_dir under the same paths everywhere.
#
#   HOSTFILE=hostfile bash configs/launch/deepspeed_hostfile.sh CONFIG backend=zero3 residency=resharded [key=value ...]
#
# A hostfile has a line for each machine: its name, and how many processes it takes.
#
#   node0 slots=8
#   node1 slots=8
#
# Variables that the processes need (NCCL_SOCKET_IFNAME=eth0, ...) go into a file .deepspeed_env, a line each.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

exec deepspeed --hostfile "${HOSTFILE:?file with a line for each machine}" "$root/tools/train.py" "$@"
