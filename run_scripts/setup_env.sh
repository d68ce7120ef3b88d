#!/usr/bin/env bash
# Create a virtual environment in this repository and install lavis_mafa into it.
#
#   bash run_scripts/setup_env.sh            .venv: the today set of packages, Python 3.11 to 3.14
#   bash run_scripts/setup_env.sh --modern   .venv-modern: an older one, Python 3.10 to 3.13
#   bash run_scripts/setup_env.sh --strict   .venv-strict: LAVIS's own pins, Python 3.10 or 3.11
#   bash run_scripts/setup_env.sh --dev      also what the tests and linters need
#
# Rerun, it does nothing unless a requirement file, pyproject.toml or the Python changed.
# PYTHON=/path/to/python chooses the Python of a new environment.
set -euo pipefail

LAVIS="salesforce-lavis==1.0.2"
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
REQUIREMENTS="$ROOT/run_scripts/requirements"

set_name=today
dev=false
for argument in "$@"; do
  case "$argument" in
    --modern | --strict) set_name="${argument#--}" ;;
    --dev) dev=true ;;
    *)
      echo "setup_env.sh: unknown option '$argument' (known: --modern, --strict, --dev)" >&2
      exit 2
      ;;
  esac
done
venv="$ROOT/.venv-$set_name"
case "$set_name" in # versions: in order of preference
  today) venv="$ROOT/.venv" range="3.11 to 3.14" versions=(3.12 3.13 3.11 3.14) ;;
  modern) range="3.10 to 3.13" versions=(3.12 3.11 3.13 3.10) ;;
  strict) range="3.10 or 3.11" versions=(3.11 3.10) ;;
esac
python="$venv/bin/python"
log="$venv/install.log"

die() { printf 'setup_env.sh: %s\n' "$@" >&2; exit 1; }

# Check that a command is one of the supported Pythons and can create an environment.
usable() {
  "$1" -c 'import sys, venv, ensurepip
sys.exit("%d.%d" % sys.version_info[:2] not in sys.argv[1:])' "${versions[@]}" >/dev/null 2>&1
}

find_python() {
  local version candidate
  if [ -n "${PYTHON:-}" ]; then
    usable "$PYTHON" && { echo "$PYTHON"; return; }
    die "\$PYTHON is '$PYTHON', which cannot make the $set_name environment." \
      "It needs Python $range with venv and ensurepip (Debian: python3-venv)."
  fi
  for version in "${versions[@]}"; do
    # A pyenv shim on PATH may fail although pyenv has that Python installed.
    for candidate in "python$version" \
      "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*"/bin/python"; do
      usable "$candidate" && { echo "$candidate"; return; }
    done
  done
  usable python3 && { echo python3; return; }
  die "no Python found for the $set_name environment." \
    "It needs Python $range with venv and ensurepip (Debian: python3-venv)." \
    "Name one with PYTHON=/path/to/python."
}

# stage LABEL COMMAND...: run a command with its output in the log, and print the elapsed time.
stage() {
  local label="$1" start=$SECONDS ticker status=0
  shift
  (
    while sleep 1 && kill -0 $$ 2>/dev/null; do
      seconds=$((SECONDS - start))
      if [ -t 1 ]; then
        printf '\r  %s ... %d s ' "$label" "$seconds"
      elif [ $((seconds % 30)) -eq 0 ]; then
        printf '  %s ... %d s\n' "$label" "$seconds"
      fi
    done
  ) 9>&- &
  ticker=$!
  "$@" >>"$log" 2>&1 </dev/null || status=$?
  kill "$ticker" 2>/dev/null || true
  wait "$ticker" 2>/dev/null || true
  [ -t 1 ] && printf '\r'
  if [ "$status" -ne 0 ]; then
    printf '  %s: failed after %d s. The end of %s:\n' "$label" $((SECONDS - start)) "$log" >&2
    tail -n 30 "$log" >&2
    exit "$status"
  fi
  printf '  %s: done in %d s\n' "$label" $((SECONDS - start))
}

pip() { "$python" -m pip install --no-input "$@"; }

# fingerprint FILE...: a hash of the files, the Python and the path of this repository.
fingerprint() {
  "$python" -c 'import hashlib, sys
parts = [sys.version, sys.argv[1], *(open(name).read() for name in sys.argv[2:])]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())' "$ROOT" "$@"
}

# once NAME FILE... -- FUNCTION: call a function unless it succeeded before with the same files.
once() {
  local stamp="$venv/.installed-$1" files=() wanted
  shift
  while [ "$1" != "--" ]; do files+=("$1"); shift; done
  wanted="$(fingerprint "${files[@]}")"
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && return
  "$2"
  echo "$wanted" >"$stamp"
}

install_packages() {
  local packages="packages of the $set_name set (several GB, a few minutes)"
  if [ "$set_name" = strict ]; then
    stage "$packages" pip -c "$REQUIREMENTS/strict.txt" -e "$ROOT[lavis]" "$LAVIS"
  else
    stage "$packages" pip -r "$REQUIREMENTS/$set_name.txt"
    stage "$LAVIS" pip --no-deps "$LAVIS"
    stage "lavis_mafa" pip --no-deps --no-build-isolation -e "$ROOT"
  fi
  stage "import of LAVIS" "$python" -W ignore -c \
    "import lavis_mafa, lavis.models, lavis.tasks, lavis.runners"
}

install_dev() {
  stage "test tools and linters" pip -r "$REQUIREMENTS/dev.txt"
  [ "$set_name" != today ] || stage "optional packages, for their tests" \
    pip -c "$REQUIREMENTS/today.txt" -r "$REQUIREMENTS/integrations.txt"
}

if command -v flock >/dev/null; then # commands started at the same time take turns
  exec 9<"${BASH_SOURCE[0]}"
  flock -n 9 || { echo "waiting for another set-up"; flock 9 || true; }
fi

if ! "$python" -c "" 2>/dev/null; then
  base="$(find_python)"
  echo "creating $venv with $("$base" --version) ($base)"
  rm -rf "$venv"
  mkdir "$venv"
  stage "empty environment" "$base" -m venv "$venv"
elif ! usable "$python"; then
  die "$venv holds $("$python" --version); the $set_name set needs $range." \
    "Remove that folder and run this again."
fi

once "$set_name" "$ROOT/pyproject.toml" "$REQUIREMENTS/$set_name.txt" -- install_packages
if $dev; then
  once dev "$REQUIREMENTS/dev.txt" "$REQUIREMENTS/integrations.txt" -- install_dev
fi
echo "environment ready: $venv ($("$python" --version), $set_name set, ${SECONDS} s)"
# The caller may have activated it already, and a script may not care.
if [ -t 1 ] && [ "${VIRTUAL_ENV:-}" != "$venv" ]; then
  echo "activate it: source $venv/bin/activate"
fi
