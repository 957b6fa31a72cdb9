#!/usr/bin/env bash
# Runs the tests with this clone's environment, or with $PYTHON; see scripts/run_tests.py.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=${PYTHON:-$repo/.venv/bin/python}
if ! command -v "$python" >/dev/null; then
    echo "run_tests: $python is missing; run \`make env\` first" >&2
    exit 2
fi
exec "$python" "$repo/scripts/run_tests.py" "$@"
