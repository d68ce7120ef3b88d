#!/usr/bin/env bash
# Makes .venv if there is none, then runs the main job: MAFA and GRIT-VLP trained and compared on
# the toy world. Results: output/demo/ in the current folder. Options go to the program (--help).
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$ROOT/run_scripts/setup_env.sh"
exec "$ROOT/.venv/bin/python" -m lavis_mafa.studies.demo "$@"
