#!/usr/bin/env bash
# Evaluate on this machine, launched as by train.sh. All options are passed to evaluate.py:
#
#   bash run_scripts/mafa/evaluate.sh --cfg-path CONFIG.yaml --options model.finetuned=MODEL.pth
set -euo pipefail
SCRIPT=evaluate.py exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" "$@"
