#!/usr/bin/env bash
# VQA v2 by ALBEF fine-tuned on it, on all GPUs. Needs COCO's images (test2015/), an absolute path:
#   --options datasets.coco_vqa.build_info.images.storage=IMAGES
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
exec bash "$ROOT/run_scripts/mafa/evaluate.sh" \
  --cfg-path "$ROOT/projects/mafa/eval/vqa_ft.yaml" "$@"
