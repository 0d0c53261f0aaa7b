#!/usr/bin/env bash
# Makes the tested CPU environment: requirements/install.sh [FOLDER]   (default .venv)
#   PYTHON   the interpreter to build it from (default python3.11)
# Running it again brings an existing environment up to the locks.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv}
python=${PYTHON:-python3.11}
torch_wheels=https://download.pytorch.org/whl/cpu

fail() {
    echo "requirements/install.sh: $1" >&2
    exit 2
}

[ "$(uname -sm)" = "Linux x86_64" ] ||
    fail "the locked set is for Linux x86-64, this is $(uname -sm). Install from the ranges instead: pip install '.[cpu]' or '.[gpu]'."
found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>&1) ||
    fail "'$python' does not run ($found). Install Python 3.11, or name it: make PYTHON=/path/to/python3.11 ..."
[ "$found" = 3.11 ] ||
    fail "the locked set is for Python 3.11, '$python' is $found. Name a Python 3.11: make PYTHON=/path/to/python3.11 ..."

if [ ! -x "$venv/bin/pip" ]; then
    "$python" -m venv "$venv" ||
        fail "'$python -m venv' failed. On Debian and Ubuntu: apt-get install python3.11-venv; then remove $venv and try again."
fi
say() {
    echo "requirements/install.sh: $1"
}

install=("$venv/bin/python" -m pip install -qq --no-deps --no-compile --disable-pip-version-check)

say "1/4 torch"
# The index in use may or may not hold the CPU build of torch; PyTorch's own index does.
torch=$(grep '^torch==' requirements/cpu-py311.txt)
"${install[@]}" "$torch" || {
    echo "requirements/install.sh: the configured index has no $torch (the error above), asking $torch_wheels" >&2
    "${install[@]}" --index-url "$torch_wheels" "$torch"
}

say "2/4 everything else, the longest part"
# One package (pycosat) is compiled, so the interpreter's headers and a C compiler are needed.
"${install[@]}" -r requirements/cpu-py311.txt -r requirements/dev-py311.txt
"${install[@]}" --no-build-isolation --editable .

# pip compiles byte code on one core, which takes longer than the installation itself; this uses all of them.
say "3/4 byte code"
"$venv/bin/python" -W ignore -m compileall -qq -j 0 "$venv/lib" || true  # a few packages ship templates that are not Python

say "4/4 database of the orchestrator"
# Prefect's database is migrated once per machine, not at the start of the first run.
"$venv/bin/python" -m tasks.embedded_server template
