#!/usr/bin/env bash
# Zero-shot retrieval on Flickr30k by ALBEF, on all GPUs. Needs its images (flickr30k-images/), an
# absolute path:
#   --options datasets.flickr30k.build_info.images.storage=IMAGES
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
exec bash "$ROOT/run_scripts/mafa/evaluate.sh" \
  --cfg-path "$ROOT/projects/mafa/eval/retrieval_zeroshot_flickr.yaml" "$@"
