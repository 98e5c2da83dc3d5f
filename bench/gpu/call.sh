#!/usr/bin/env bash
# One call of docs/gpu.md's plan, on a machine with a GPU: bash bench/gpu/call.sh N [options of bench.gpu.gpu]
# Installs the carried wheels (.whl, .whl-ray) once, prints what the machine has, runs the sections of call N.
set -euo pipefail
cd "$(dirname "$0")/../.."
call=$1
shift
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# memory where there is enough of it: checkpoints take 30 GB
free_gb() { df -BG --output=avail "$1" 2>/dev/null | tail -1 | tr -dc 0-9; }
[ -w /dev/shm ] && [ "$(free_gb /dev/shm)" -ge 40 ] && export TMPDIR=/dev/shm
scratch=${GPU_SCRATCH:-${TMPDIR:-/tmp}/kvrelay-gpu}
mkdir -p "$scratch"
site=$scratch/site
for wheels in .whl .whl-ray; do
    if [ -d $wheels ] && [ ! -e "$scratch/$wheels" ]; then
        SECONDS=0
        python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site/$wheels" $wheels/*.whl
        touch "$scratch/$wheels"
        echo "wheels of $wheels installed in $SECONDS s" >&2
    fi
done
export PYTHONPATH=$site/.whl:$site/.whl-ray${PYTHONPATH:+:$PYTHONPATH}  # apart: both have parts of some packages
if [ "$call" = 1 ]; then
    nvidia-smi --query-gpu=name,memory.total,driver_version,clocks.max.sm --format=csv,noheader >&2 || true
    nvcc --version 2>/dev/null | tail -1 >&2 || true
    echo "scratch $scratch: $(free_gb "$scratch") GB free; $(nproc) cores; $(python3 --version)" >&2
fi
exec python3 -m bench.gpu.gpu --call "$call" --scratch "$scratch" "$@"
