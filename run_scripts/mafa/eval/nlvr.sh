#!/usr/bin/env bash
# NLVR2, dev and test-P, on all GPUs. Needs NLVR2's images, an absolute path:
#   --options datasets.nlvr_mafa.build_info.images.storage=IMAGES
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
exec bash "$ROOT/run_scripts/mafa/evaluate.sh" \
  --cfg-path "$ROOT/projects/mafa/eval/nlvr.yaml" "$@"
