#!/usr/bin/env bash
# Checks that need a GPU: mixed precision, no launcher, resumption, the estimate of memory,
# grouping on a stream of its own.
# Options go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash run_scripts/setup_env.sh --dev
exec .venv/bin/python -m pytest tests/runners/test_gpu.py tests/algorithm/grit/test_grouping_on_gpu.py "$@"
