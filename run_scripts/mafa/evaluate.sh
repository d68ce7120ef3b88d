#!/usr/bin/env bash
# Evaluates on this machine, launched as train.sh does. Everything goes to evaluate.py:
#
#   bash run_scripts/mafa/evaluate.sh --cfg-path CONFIG.yaml --options model.finetuned=MODEL.pth
set -euo pipefail
SCRIPT=evaluate.py exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" "$@"
