#!/bin/sh
# Builds and runs the GPU tests and benchmarks on a CUDA machine that has no network.
#   tools/gpu_check.sh --prepare     where there is a network: packs .gpu/ (carry it along)
#   tools/gpu_check.sh --out DIR     on the GPU machine: writes DIR/gpu_check.json and logs
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu_check.py" "$@"
