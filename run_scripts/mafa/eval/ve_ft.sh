#!/usr/bin/env bash
# SNLI-VE by ALBEF fine-tuned on it, on all GPUs. Needs Flickr30k's images and the annotations,
# absolute paths:
#   --options datasets.snli_ve.build_info.images.storage=IMAGES datasets.snli_ve.build_info.annotations.train.url=ve_train.json datasets.snli_ve.build_info.annotations.val.url=ve_dev.json datasets.snli_ve.build_info.annotations.test.url=ve_test.json
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
exec bash "$ROOT/run_scripts/mafa/evaluate.sh" \
  --cfg-path "$ROOT/projects/mafa/eval/ve_ft.yaml" "$@"
