#!/usr/bin/env bash
# Zero-shot GQA (test-dev) on all GPUs. Needs GQA's images, an absolute path:
#   --options datasets.gqa.build_info.images.storage=IMAGES
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
exec bash "$ROOT/run_scripts/mafa/evaluate.sh" \
  --cfg-path "$ROOT/projects/mafa/eval/gqa_zeroshot.yaml" "$@"
