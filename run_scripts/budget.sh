#!/usr/bin/env bash
# Print the size and structure of the project beside their limits; see budget.py. Fails above a limit.
set -euo pipefail
exec python3 "$(dirname "${BASH_SOURCE[0]}")/budget.py" "$@"
