#!/usr/bin/env bash
# Run the tests that need a GPU: mixed precision (also of run.cached_batch, of every form of ITC and
# of every soft label), no launcher, resuming, the memory estimate, run.compile,
# group ids, thresholds of anchors, a learned hardness, what ranks exchange for both, grouping on its
# own stream, how often a step waits for the GPU, and all downstream tasks. All options are passed to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash run_scripts/setup_env.sh --dev
exec .venv/bin/python -m pytest tests/training/test_gpu.py tests/training/test_simulated_gpu.py \
  tests/algorithm/grit/test_grouping_on_gpu.py tests/downstream/test_tasks_on_a_gpu.py \
  tests/downstream/test_stage2.py::test_mixed_precision_on_a_gpu "$@"
