#!/usr/bin/env bash
# Builds libpipeline_nccl.so, by which ranks on several GPUs talk to each other. Needs a Python `torch` 2.11.0 with its CUDA 13
# packages (the one that LIBTORCH_CUDA points into) and a C++ compiler; no GPU.
#   scripts/build-nccl.sh SITE_PACKAGES [OUT]     OUT: libtorch/lib by default
set -euo pipefail
cd "$(dirname "$0")/.."
site=${1:?the site-packages folder that holds torch and nvidia} out=${2:-libtorch/lib}
torch=$site/torch nvidia=$site/nvidia
for needed in "$torch/lib/libtorch_cuda.so" "$nvidia/nccl/include/nccl.h" "$nvidia/cu13/include/cuda_runtime_api.h"; do
  [ -e "$needed" ] || { echo "\`$needed\` is missing: install torch==2.11.0 with its CUDA packages" >&2; exit 1; }
done
# Headers that torch's own dependencies leave out.
headers=$(mktemp -d)
trap 'rm -rf "$headers"' EXIT
python3 -m pip install --quiet --no-deps --target "$headers" nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85
g++ -shared -fPIC -O1 -std=c++17 -D_GLIBCXX_USE_CXX11_ABI=1 -DUSE_DISTRIBUTED -DUSE_C10D_NCCL -Wno-deprecated-declarations \
  -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include" -isystem "$nvidia/cu13/include" \
  -isystem "$headers/nvidia/cu13/include" -isystem "$nvidia/nccl/include" \
  crates/torch/cc/nccl/group.cc -o "$out/libpipeline_nccl.so" \
  -L"$torch/lib" -Wl,--no-as-needed -ltorch_cuda -lc10_cuda -Wl,--as-needed -ltorch_cpu -lc10 -Wl,--allow-shlib-undefined
echo "$out/libpipeline_nccl.so"
