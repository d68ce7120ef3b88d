#!/usr/bin/env bash
# Retrieval on the toy world by a fine-tuned ALBEF, on a CPU. --options model.finetuned=CHECKPOINT
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
GPUS="${GPUS:-1}" exec bash "$ROOT/run_scripts/mafa/evaluate.sh" \
  --cfg-path "$ROOT/projects/mafa/eval/retrieval_ft_toy.yaml" "$@"
