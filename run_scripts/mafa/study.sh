#!/usr/bin/env bash
# Run all rows of a paper's table; write a table of our results next to the paper's, and a figure.
# Rerun it to resume. Options: --help, --list, --dry-run.
#
#   bash run_scripts/mafa/study.sh projects/mafa/studies/table_4.yaml             # the toy world, on a CPU
#   bash run_scripts/mafa/study.sh projects/mafa/studies/table_4.yaml --at paper  # ViT-B/16 on 4M, 4 GPUs
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
[ -x "$ROOT/.venv/bin/python" ] && PYTHON="${PYTHON:-$ROOT/.venv/bin/python}"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python}" -W ignore::FutureWarning -m lavis_mafa study "$@"
