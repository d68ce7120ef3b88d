#!/usr/bin/env bash
# Evaluates on this machine, one process for each GPU (or GPUS of them). Everything else goes to
# evaluate.py:
#
#   bash run_scripts/mafa/evaluate.sh --cfg-path CONFIG.yaml --options model.pretrained=MODEL.pth
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
[ -x "$ROOT/.venv/bin/python" ] && PYTHON="${PYTHON:-$ROOT/.venv/bin/python}"
PYTHON="${PYTHON:-python}"
GPUS="${GPUS:-$("$PYTHON" -c 'import torch; print(max(1, torch.cuda.device_count()))')}"
exec "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node="$GPUS" \
  "$ROOT/evaluate.py" "$@"
