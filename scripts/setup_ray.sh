#!/bin/sh
# Makes the environment of the tests for Ray and WebDataset. It holds these libraries alone: torch and the rest come from
# the project's environment, whose packages stand behind its own.
# Usage: setup_ray.sh PROJECT_PYTHON FOLDER. Called by `make test-ray`.
set -eu
python=$1
folder=$2

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 1
}

version='import sys; print(sys.version_info[:2])'
if ! "$folder/bin/python" -m pip --version >/dev/null 2>&1 ||
    [ "$("$python" -c "$version")" != "$("$folder/bin/python" -c "$version")" ]; then
    echo "making $folder"
    "$python" -m venv --clear "$folder" || fail "could not make $folder"
fi
# A .pth file adds the folder behind the environment's own, so that its own versions win.
project=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
own=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n' "$project" >"$own/zz_project.pth"
echo "installing Ray and WebDataset into $folder (600 MB)"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check 'ray[data]>=2.40' 'webdataset>=0.2' ||
    fail "the installation failed; pip's message stands above (is the package registry reachable?)"
