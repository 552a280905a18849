#!/bin/sh
# An environment for one part of the project: make runs it when that part's environment is missing or old.
# It holds that part's libraries alone: torch and the rest come from the project's environment, whose packages stand
# behind its own.
# Usage: setup_beside.sh PROJECT_PYTHON FOLDER site|ray|runtimes. Called by `make site`, `make test-site`, `make test-ray`
# and `make test-runtimes`.
set -eu
python=$1
folder=$2
part=$3

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 1
}

case $part in
site)
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "the site needs Python 3.11 or newer; $("$python" --version) runs the rest of the project"
    what="the site's and the app's libraries into $folder (350 MB)"
    set -- 'sphinx>=8' 'myst-nb>=1.2' 'pydata-sphinx-theme>=0.16' 'gradio>=6.0' 'playwright>=1.50' \
        'fastapi>=0.115' 'uvicorn>=0.30' 'python-multipart>=0.0.18' 'nbclient>=0.10' 'ipykernel>=6'
    ;;
ray)
    what="Ray and WebDataset into $folder (600 MB)"
    set -- 'ray[data]>=2.40' 'webdataset>=0.2'
    ;;
runtimes)
    what="OpenVINO, onnxsim, coremltools, ExecuTorch, transformers, Triton's server and the robustness toolbox"
    what="$what into $folder (900 MB)"
    set -- 'openvino>=2026.0' 'onnxsim>=0.6' 'coremltools>=9.0' 'executorch>=1.5' 'transformers>=5.0' \
        'adversarial-robustness-toolbox>=1.18'
    ;;
*) fail "unknown part '$part': site, ray or runtimes" ;;
esac

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
echo "installing $what"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@" ||
    fail "the installation failed; pip's message stands above (is the package registry reachable?)"
if [ "$part" = runtimes ]; then
    # a folder of its own: the server's Python backend needs numpy 1
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
        --target "$folder/triton" 'nvidia-pytriton==0.7.0' 'numpy<2' ||
        fail "the installation failed; pip's message stands above (is the package registry reachable?)"
fi
