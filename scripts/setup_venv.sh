#!/bin/sh
# The virtual environment with the project, editable, and its tools: make runs it when dependencies change.
# Usage: setup_venv.sh PYTHON VENV [anew]. Called by the Makefile when pyproject.toml or constraints.txt changed.
set -eu
python=$1
venv=$2

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 1
}

command -v "$python" >/dev/null 2>&1 ||
    fail "$python was not found: install Python 3.10 or newer (Debian: apt install python3 python3-venv), or name one: make PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$("$python" --version 2>&1) is too old: capszoo needs Python 3.10 or newer (make PYTHON=/path/to/python3)"
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$python cannot make virtual environments: install its venv module (Debian: apt install python3-venv)"

# An environment whose pip does not start (an interrupted set-up, a removed interpreter) is made anew.
if [ "${3:-}" = anew ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    echo "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv" || fail "could not make $venv"
fi
echo "installing capszoo and its tools into $venv (the first time this downloads PyTorch: some minutes)"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint constraints.txt --editable '.[dev]' ||
    fail "the installation failed; pip's message stands above (is the package registry reachable?)"
