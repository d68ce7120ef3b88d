#!/usr/bin/env bash
# Questions about the toy world by ALBEF, on a CPU. --options model.finetuned=CHECKPOINT
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
GPUS="${GPUS:-1}" exec bash "$ROOT/run_scripts/mafa/evaluate.sh" \
  --cfg-path "$ROOT/projects/mafa/eval/vqa_ft_toy.yaml" "$@"
