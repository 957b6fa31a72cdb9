#!/usr/bin/env bash
# Recorded FlashInfer plans on a real GPU: bits against stock, error against float64, times.
#
#   scripts/gpu_check.sh prepare [DIR]   here: record the plans, fetch FlashInfer's wheels,
#                                        for the Python there (GPU_PYTHON=3.12)
#   scripts/gpu_check.sh run [DIR]       there: NVIDIA GPU, PyTorch and nvcc; no network
#
# DIR (build/gpu, 30 MB) is carried along with the repository. `run` writes DIR/out/gpu_check.json and
# prints a table last. Exit: 0 all right, 1 a check is wrong, 2 something is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    echo "gpu_check: $1" >&2
    exit 2
}

verb=${1:-}
dir=$(realpath -m "${2:-build/gpu}")
case $verb in
prepare)
    mkdir -p "$dir/wheels"
    .venv/bin/python -P -m pagealign.parity.gpu_prepare "$dir"
    # Kernels are compiled there, for its GPU and its PyTorch; here only what imports them.
    packages=()
    for name in flashinfer-python apache-tvm-ffi certifi charset-normalizer idna ninja \
        nvidia-ml-py packaging requests tqdm urllib3; do
        packages+=("$(grep "^$name==" constraints.txt)") || fail "constraints.txt pins no $name"
    done
    .venv/bin/python -m pip download --quiet --no-deps --only-binary=:all: \
        --python-version "${GPU_PYTHON:-3.12}" --dest "$dir/wheels" "${packages[@]}"
    # As one archive the wheels are a third of their size.
    mkdir -p "$dir/site"
    for wheel in "$dir"/wheels/*.whl; do
        .venv/bin/python -m zipfile -e "$wheel" "$dir/site"
    done
    tool=$PWD/.venv/bin/python
    (cd "$dir" && "$tool" -m tarfile -c site.tar.xz site)
    rm -r "$dir/site" "$dir/wheels"
    du -sh "$dir"
    ;;
run)
    python=${PYTHON:-python3}
    command -v nvcc >/dev/null || fail "no nvcc on PATH: add CUDA's bin folder"
    "$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null ||
        fail "no PyTorch that sees a GPU in $python: set PYTHON"
    for file in stock.zip aligned.zip site.tar.xz; do
        [[ -f $dir/$file ]] || fail "no $dir/$file: run scripts/gpu_check.sh prepare first"
    done
    mkdir -p "$dir/out"
    "$python" -m tarfile -e "$dir/site.tar.xz" "$dir"
    if ! command -v ninja >/dev/null; then
        tools=("$dir"/site/ninja-*.data/scripts)
        chmod +x "${tools[0]}"/*
        PATH=${tools[0]}:$PATH
    fi
    # Kernels are compiled on first use, in as many processes as there are cores.
    export FLASHINFER_WORKSPACE_BASE=$dir MAX_JOBS=${MAX_JOBS:-$(nproc)}
    PYTHONPATH=$dir/site:$PWD exec timeout 470 "$python" -m pagealign.parity.gpu_check \
        "$dir/stock.zip" "$dir/aligned.zip" --out "$dir/out/gpu_check.json"
    ;;
*)
    sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
