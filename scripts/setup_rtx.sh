#!/bin/sh
# NVIDIA's TensorRT-RTX in a folder of its own: make runs it when test-trt-rtx is called for the first time.
# It installs the parser, the builder and the Python API, beside the virtual environment.
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
echo "downloading TensorRT-RTX into $folder (150 MB)"
# Without dependencies: the wheel is wanted for its libraries alone, and the bindings' package would ask for others.
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$work" \
    tensorrt_rtx_cu13_bindings==1.7.1.116 onnxruntime-ep-nv-tensorrt-rtx-cu13==0.5.0 ||
    fail "the download failed; pip's message stands above (is the package registry reachable?)"

# The libraries lie there under their full version; the loader asks for the major one.
mkdir "$work/lib"
for file in "$work"/onnxruntime_ep_nv_tensorrt_rtx/lib*.so.*; do
    name=$(basename "$file")
    stem=${name%%.so.*}
    major=${name#*.so.}
    ln -s "../onnxruntime_ep_nv_tensorrt_rtx/$name" "$work/lib/$stem.so.${major%%.*}"
done

rm -rf "$folder"
mv "$work" "$folder"
LD_LIBRARY_PATH=$folder/lib PYTHONPATH=$folder "$python" -c \
    'import tensorrt_rtx_bindings as rtx; print(f"TensorRT-RTX {rtx.__version__}")' ||
    fail "TensorRT-RTX does not start; the message stands above"
