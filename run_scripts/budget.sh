#!/usr/bin/env bash
# Print the size of the project beside its limits; see budget.py. Fails above a limit.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$ROOT/run_scripts/setup_env.sh" --dev
exec "$ROOT/.venv/bin/python" "$ROOT/run_scripts/budget.py" "$@"
