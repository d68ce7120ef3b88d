#!/usr/bin/env bash
# Create the environment if needed, then run the formatter, the linter, the type checker and the
# tests. A failure does not stop the others; the exit status is 0 if all passed.
#
#   --modern   the tests only, in the modern set of packages (.venv-modern)
#   --strict   the tests only, in the strict set of packages (.venv-strict)
#   --quick    formatter, linter, type checker, and of the tests: the algorithm against slow loops,
#              a training, resuming, two ranks, mine and count; a few minutes
#   --fast     the tests only
#   --slow     also the tests marked slow
#   --faults   only the faults: kills, full disks, bad data and numbers, wrong configs
#   --core     the tests only, with lavis_mafa/downstream moved away
#   --research only the tests of research/, also those that run studies and benchmarks
# All other options are passed to pytest: bash run_scripts/test.sh --fast tests/algorithm/grit -k sampler -n 0
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
setup_options=(--dev)
linters=true
core=false
pytest_options=()
quick_tests=(
  tests/algorithm
  tests/training/{test_training,test_resume,test_distributed}.py
  tests/tools/{test_mine,test_count}.py
)
for argument in "$@"; do
  case "$argument" in
    --modern | --strict) venv=".venv-${argument#--}" setup_options+=("$argument") linters=false ;;
    --quick) pytest_options+=("${quick_tests[@]}") ;;
    --fast) linters=false ;;
    --core) core=true linters=false ;;
    --slow) pytest_options+=(-m "not faults and not research") ;; # for that of pyproject.toml
    --research) pytest_options+=(-m "" tests/research) linters=false ;;
    --faults) pytest_options+=(-m "" tests/faults) linters=false ;;
    *) pytest_options+=("$argument") ;;
  esac
done

bash run_scripts/setup_env.sh "${setup_options[@]}"
python="$venv/bin/python"
cores="$("$python" -c 'import os; print(len(os.sched_getaffinity(0)))' 2>/dev/null || echo 1)"
export OMP_NUM_THREADS=1 # the tests' models are tiny: more threads only compete

if $core; then
  # Nothing outside lavis_mafa/downstream may need it.
  trap 'mv .downstream-away lavis_mafa/downstream' EXIT
  mv lavis_mafa/downstream .downstream-away
fi

failed=()
# check NAME COMMAND...
check() {
  local name="$1" start=$SECONDS
  shift
  printf '\n== %s\n' "$name"
  if "$@" </dev/null; then
    printf '== %s: passed in %d s\n' "$name" $((SECONDS - start))
  else
    printf '== %s: FAILED after %d s\n' "$name" $((SECONDS - start))
    failed+=("$name")
  fi
}

if $linters; then
  check "ruff format" "$python" -m ruff format --check .
  check "ruff check" "$python" -m ruff check .
  check "mypy" "$python" -m mypy
fi
check "pytest" "$python" -m pytest -n "$((cores < 4 ? cores : 4))" --dist loadfile \
  --durations 10 ${pytest_options[@]+"${pytest_options[@]}"}

if [ "${#failed[@]}" -gt 0 ]; then
  printf '\nfailed: %s\n' "$(IFS=,; echo "${failed[*]}")"
  exit 1
fi
printf '\nall passed\n'
