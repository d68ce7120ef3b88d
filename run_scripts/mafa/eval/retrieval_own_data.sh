#!/usr/bin/env bash
# Retrieval on one's own images, on all GPUs. Needs
#   --options model.finetuned=CHECKPOINT datasets.image_text_json.build_info.images.storage=IMAGES \
#   datasets.image_text_json.build_info.annotations.test.storage=test.json
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
exec bash "$ROOT/run_scripts/mafa/evaluate.sh" \
  --cfg-path "$ROOT/projects/mafa/eval/retrieval_own_data.yaml" "$@"
