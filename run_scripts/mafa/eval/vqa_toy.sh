#!/usr/bin/env bash
# Questions about the toy world, on a CPU. Needs a folder or a name on the hub as OPT:
#   --options model.opt_model=OPT
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
GPUS="${GPUS:-1}" exec bash "$ROOT/run_scripts/mafa/evaluate.sh" \
  --cfg-path "$ROOT/projects/mafa/eval/vqa_toy.yaml" "$@"
