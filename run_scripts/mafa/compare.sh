#!/usr/bin/env bash
# Trains and evaluates many systems with several seeds on the toy world, on a CPU, and writes means
# and spreads. An hour or more; rerun it to resume. Options: --help, --list.
#
#   bash run_scripts/mafa/compare.sh --results docs/results/compare_toy.md
#   bash run_scripts/mafa/compare.sh --rows grit s_itc mafa --seeds 0 1 --set epochs=4 --output output/few
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
[ -x "$ROOT/.venv/bin/python" ] && PYTHON="${PYTHON:-$ROOT/.venv/bin/python}"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python}" -W ignore::FutureWarning -m lavis_mafa study "$ROOT/projects/mafa/studies/compare.yaml" "$@"
