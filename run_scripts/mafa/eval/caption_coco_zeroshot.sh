#!/usr/bin/env bash
# Zero-shot captions of COCO on all GPUs. Needs COCO's images (val2014/), an absolute path:
#   --options datasets.coco_caption.build_info.images.storage=IMAGES
# and Java for METEOR and SPICE, which are left out without it.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
exec bash "$ROOT/run_scripts/mafa/evaluate.sh" \
  --cfg-path "$ROOT/projects/mafa/eval/caption_coco_zeroshot.yaml" "$@"
