#!/usr/bin/env bash
# Several machines, started by torchrun. Run the same command on every one of them; they meet at RENDEZVOUS, a host and
# free port of any one machine that all others reach. out_dir must be on a file system that all of them share.
#
#   NODES=2 RENDEZVOUS=node0:29400 bash configs/launch/torchrun_nodes.sh CONFIG backend=hsdp [key=value ...]
#
# JOB tells runs apart that use the same rendezvous. NPROC: processes per machine, by default one per GPU.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

exec torchrun \
  --nnodes "${NODES:?number of machines}" \
  --nproc-per-node "${NPROC:-gpu}" \
  --rdzv-backend c10d \
  --rdzv-endpoint "${RENDEZVOUS:?host:port of one machine}" \
  --rdzv-id "${JOB:-leangrpo}" \
  --max-restarts "${RESTARTS:-0}" \
  "$root/tools/train.py" "$@"
