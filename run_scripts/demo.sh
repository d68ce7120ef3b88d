#!/usr/bin/env bash
# Create .venv if needed, then train and compare MAFA and GRIT-VLP on the toy world. Results go to
# output/demo/ in the current folder. All options are passed to the program (see --help).
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$ROOT/run_scripts/setup_env.sh"
exec "$ROOT/.venv/bin/python" -m lavis_mafa demo "$@"
