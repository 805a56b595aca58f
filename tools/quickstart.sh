#!/usr/bin/env bash
# Makes the environment if there is none, trains the digits example on the CPU and says where its
# pictures are. Run again after an interruption, it continues from the last checkpoint.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/tools/venv.sh"

use_environment "$root"
cd "$root"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the model is too small to gain from more
run=runs/digits_flowgrpo_lora
"$VENV/bin/leangrpo" train configs/digits_flowgrpo_lora.yaml "out_dir=$run" resume=true

cat <<EOM

The same prompts before and after training, and the reward over the updates:
  $root/$run/images/before.png
  $root/$run/images/after.png
  $root/$run/reward_curve.png
To train afresh, remove $root/$run.
EOM
