#!/usr/bin/env bash
# Visual grounding on the toy world, on a CPU. --options model.finetuned=CHECKPOINT
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
GPUS="${GPUS:-1}" exec bash "$ROOT/run_scripts/mafa/evaluate.sh" \
  --cfg-path "$ROOT/projects/mafa/eval/grounding_toy.yaml" "$@"
