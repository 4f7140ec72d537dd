#!/bin/sh
# Create a virtual environment and install hotpass into it, editable, with the tools that tests and lint need.
# usage: PYTHON=python3 TORCH_INDEX= scripts/install.sh .venv
set -eu
venv=$1
python=${PYTHON:-python3}
[ -n "$python" ] || { echo "install: no Python of version 3.11 or newer found; install one, or name it with PYTHON=/path/to/python3" >&2; exit 2; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "install: $python is older than 3.11; name a newer one with PYTHON=/path/to/python3" >&2
    exit 2
}
echo "install: $("$python" --version) into $venv" >&2
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check --no-input"
$pip install --quiet --upgrade "pip>=24"
# torch first and by itself, so that its index can be chosen and nothing else draws in another build of it.
if ! "$venv/bin/python" -c 'import torch' >/dev/null 2>&1; then
    echo "install: torch" >&2
    # shellcheck disable=SC2086
    $pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==2.13.0"
fi
echo "install: hotpass and its libraries" >&2
$pip install --quiet --editable ".[dev,agents,mcp]"
if command -v c++ >/dev/null 2>&1 || command -v g++ >/dev/null 2>&1 || command -v clang++ >/dev/null 2>&1; then
    echo "install: a C++ compiler is here: parts in C++ can be built" >&2
else
    echo "install: no C++ compiler found: parts in C++ are left out (install g++ or clang++ to have them)" >&2
fi
