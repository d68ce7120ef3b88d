#!/usr/bin/env bash
# Methods against false negatives in three worlds, each with three seeds: the clustered and the dense toy world, and
# UCM-Captions if its folder is given. Rerun the command to resume; further arguments go to every study (such as --seeds 0).
#   bash run_scripts/compare_methods.sh [--ucm FOLDER] [ARGUMENT ...]
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
[ -x "$python" ] || python=python

ucm=
if [ "${1:-}" = --ucm ]; then
  ucm=${2:?"--ucm needs the folder of the data, as research/picture_data.py describes it"}
  shift 2
fi
"$python" -m research study methods --results docs/results/methods_clustered.md "$@"
"$python" -m research study methods --at dense --output output/study/dense --results docs/results/methods_dense.md "$@"
if [ -n "$ucm" ]; then
  "$python" -m research study methods_ucm --set "data=$ucm" --results docs/results/methods_ucm.md "$@"
fi
