#!/usr/bin/env bash
# Retrieval on COCO by a pre-trained ALBEF, on all GPUs. Needs COCO's images (val2014/), an absolute path:
#   --options datasets.coco_retrieval.build_info.images.storage=IMAGES
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
exec bash "$ROOT/run_scripts/mafa/evaluate.sh" \
  --cfg-path "$ROOT/projects/mafa/eval/retrieval_zeroshot_coco.yaml" "$@"
