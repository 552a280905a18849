#!/bin/sh
# NVIDIA's TensorRT-RTX and Torch-TensorRT in a folder of their own: make runs it when test-trt-rtx is called for the
# first time. It installs the parser, the builder and the Python APIs, beside the virtual environment.
# Usage: setup_rtx.sh PYTHON FOLDER. Called by `make test-trt-rtx`; NVIDIA's licence applies to what it downloads.
set -eu
python=$1
folder=$2

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 1
}

case "$(uname -s) $(uname -m)" in
"Linux x86_64") ;;
*) fail "these packages of TensorRT-RTX are for Linux on x86_64, not $(uname -sm)" ;;
esac

# Made under another name and renamed: an interrupted download leaves no folder that looks complete.
work=$folder.tmp
rm -rf "$work"
echo "downloading TensorRT-RTX and Torch-TensorRT into $folder (100 MB)"
# Without dependencies: they would bring another torch.
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$work" \
    tensorrt-rtx-cu13-libs==1.7.1.116 tensorrt-rtx-cu13-bindings==1.7.1.116 torch-tensorrt-rtx==2.14.0 dllist==2.0.0 ||
    fail "the download failed; pip's message stands above (is the package registry reachable?)"
# Torch-TensorRT's own libraries need the torch that they were built for; without them it takes its Python runtime.
rm "$work"/torch_tensorrt/lib/*.so "$work"/torch_tensorrt/_C*.so

rm -rf "$folder"
mv "$work" "$folder"
PYTHONPATH=$folder "$python" -c 'import tensorrt_rtx_bindings as rtx; print(f"TensorRT-RTX {rtx.__version__}")' ||
    fail "TensorRT-RTX does not start; the message stands above"
