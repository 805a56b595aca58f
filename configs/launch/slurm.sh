#!/usr/bin/env bash
# Slurm: one torchrun per machine, which starts a process per GPU. Any backend.
#
#   sbatch --nodes 2 configs/launch/slurm.sh CONFIG backend=hsdp resume=true [key=value ...]
#
# Submit from the repository, in the environment that training needs; Slurm hands both on. Adapt what follows to the
# cluster (partition, account, GPUs per machine); options of sbatch override it. With resume=true, a job that Slurm
# requeues goes on from its last checkpoint.
#SBATCH --job-name=leangrpo
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# The script that sbatch runs is a copy elsewhere, so the repository is where the job was submitted.
exec srun torchrun \
  --nnodes "$SLURM_JOB_NUM_NODES" \
  --nproc-per-node "${NPROC:-gpu}" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$first:29400" \
  --rdzv-id "$SLURM_JOB_ID" \
  "$SLURM_SUBMIT_DIR/tools/train.py" "$@"
