#!/usr/bin/env bash
# Train on this machine, one process per GPU. GPUS=2 sets the number of processes (on a machine
# without GPUs: of CPU processes). All options are passed to train.py:
#
#   bash run_scripts/mafa/train.sh --cfg-path projects/mafa/train/albef_4m.yaml \
#     --options run.max_epoch=20 run.output_dir=output/albef_4m
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
[ -x "$ROOT/.venv/bin/python" ] && PYTHON="${PYTHON:-$ROOT/.venv/bin/python}"
PYTHON="${PYTHON:-python}"
GPUS="${GPUS:-$("$PYTHON" -c 'import torch; print(max(1, torch.cuda.device_count()))')}"
exec "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node="$GPUS" \
  "$ROOT/${SCRIPT:-train.py}" "$@"
