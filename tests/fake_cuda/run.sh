#!/usr/bin/env bash
# The tests of this folder over a CUDA runtime without a GPU. Needs nvcc 13.0 ($CUDA_HOME) and 7 GB of disk for torch's
# CUDA build and FlashInfer, installed once into $FAKE_GPU_VENV; FlashInfer's kernels are compiled at first use (5 min).
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${FAKE_GPU_VENV:-.venv-fake-gpu}
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
test -x "$CUDA_HOME/bin/nvcc" || { echo "needs nvcc 13.0: set CUDA_HOME"; exit 1; }
if [ ! -e "$venv/.installed" ]; then
    ${PYTHON:-python3} -m venv "$venv"
    # the CUDA build: PyPI's own torch; a numpy that Triton's interpreter knows
    "$venv/bin/pip" install -q 'torch==2.11.0' '.[cuda]' 'numpy<2.3' pytest pytest-asyncio pytest-timeout hypothesis
    "$venv/bin/pip" uninstall -q -y kvrelay # tests import this checkout
    touch "$venv/.installed"
fi
out=$(realpath "$venv")/fake-cuda
mkdir -p "$out"
# a folder for each version of the sources, so that checkouts that share $FAKE_GPU_VENV leave each other alone
lib=$out/lib-$(cat tests/fake_cuda/*.c | sha256sum | head -c 12)
if [ ! -e "$lib" ]; then
    new=$(mktemp -d -p "$out")
    gcc -w -O1 -shared -fPIC -I"$CUDA_HOME/include" tests/fake_cuda/runtime.c -o "$new/runtime.so" -lpthread
    gcc -w -shared -fPIC -Wl,-soname,libcuda.so.1 tests/fake_cuda/driver.c -o "$new/libcuda.so.1" -ldl
    ln -s libcuda.so.1 "$new/libcuda.so"
    mv -T "$new" "$lib" || rm -r "$new" # another process was faster
fi
make -s links
export PATH=$(realpath "$venv")/bin:$PATH PYTHONPATH=$PWD/.imports:$PWD PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=2
export FLASHINFER_WORKSPACE_BASE=$out FLASHINFER_CUDA_ARCH_LIST=9.0a TRITON_CACHE_DIR=$out/triton TRITON_LIBCUDA_PATH=$lib
export LD_LIBRARY_PATH=$lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} LIBRARY_PATH=$lib
# kernels never run: device code need not be good
export NVCC_APPEND_FLAGS="-Xcicc -O0 -Xptxas -O0"
export LD_PRELOAD=$lib/runtime.so
if [ "${1-}" = --run ]; then shift && exec "$venv/bin/python" -W ignore -m "$@"; fi # a module, with its arguments
exec "$venv/bin/python" -m pytest -p no:cacheprovider -W ignore --timeout 900 "$@" tests/fake_cuda tests/kernels/cuda/test_sampling_triton.py tests/kernels/cuda/test_quantized_triton.py tests/kvtransfer/mover/test_device_checksums.py tests/kvtransfer/transports/test_cuda_ipc.py
