#!/usr/bin/env bash
# Build the source distribution and the wheel into output/dist, and check their metadata. Nothing is
# uploaded: a maintainer does that with `twine upload output/dist/*`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
rm -rf output/dist build
"$python" -m build --outdir output/dist .
"$python" -m twine check --strict output/dist/*
rm -rf build lavis_mafa.egg-info
ls -l output/dist
