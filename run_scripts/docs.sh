#!/usr/bin/env bash
# Build the documentation as a site in output/site; warnings, such as a link without target, are errors.
#   bash run_scripts/docs.sh            # build
#   bash run_scripts/docs.sh serve      # show it at http://127.0.0.1:8000, rebuilt when a page changes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-.venv/bin/python}"
[ -x "$python" ] || python=python

"$python" -c "import material, mkdocstrings_handlers.python" 2>/dev/null || {
  echo 'docs.sh: the generator is missing: pip install "mkdocs-material>=9.7" "mkdocstrings-python>=2.0"' >&2
  exit 1
}
if [ "${1:-build}" = build ]; then
  "$python" -m mkdocs build --strict "${@:2}"
else
  "$python" -m mkdocs "$@"
fi
