#!/usr/bin/env bash
# Visual grounding on RefCOCO+, on all GPUs. Needs the files that the config names, and COCO's images
# (train2014/):
#   --options datasets.refcoco_plus.build_info.images.storage=IMAGES
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
exec bash "$ROOT/run_scripts/mafa/evaluate.sh" \
  --cfg-path "$ROOT/projects/mafa/eval/grounding_refcoco.yaml" "$@"
