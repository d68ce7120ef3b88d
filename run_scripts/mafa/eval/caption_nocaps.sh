#!/usr/bin/env bash
# Captions of NoCaps on all GPUs. Needs its images (val/), an absolute path, and people's captions:
#   --options datasets.nocaps.build_info.images.storage=IMAGES run.annotation_file=CAPTIONS.json
# and Java for METEOR and SPICE, which are left out without it.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
exec bash "$ROOT/run_scripts/mafa/evaluate.sh" \
  --cfg-path "$ROOT/projects/mafa/eval/caption_nocaps.yaml" "$@"
