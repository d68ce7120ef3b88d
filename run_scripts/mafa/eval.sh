#!/usr/bin/env bash
# Evaluate by a config of projects/mafa/eval on all GPUs, or on the CPU for the toy world. The header
# of the config lists the options that it needs, such as the folder of the images.
#
#   bash run_scripts/mafa/eval.sh retrieval_coco --options model.finetuned=MODEL.pth
#   bash run_scripts/mafa/eval.sh --list
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
name="${1:---list}"
config="$ROOT/projects/mafa/eval/$name.yaml"
if [ ! -f "$config" ]; then
  for file in "$ROOT"/projects/mafa/eval/*.yaml; do basename "$file" .yaml; done
  [ "$name" = --list ] && exit
  echo "eval.sh: no evaluation is named '$name'; the names are above" >&2
  exit 2
fi
shift
case "$name" in *_toy) GPUS="${GPUS:-1}"; export GPUS ;; esac
exec bash "$ROOT/run_scripts/mafa/evaluate.sh" --cfg-path "$config" "$@"
