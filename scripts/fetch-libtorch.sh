#!/usr/bin/env bash
# Lays out libtorch (CPU part, headers) in DEST from hash-checked wheels; pip is only the downloader.
# The same binary drives CUDA: libtorch_cuda.so of a full torch 2.11.0 is loaded at run time by `--device cuda`.
# usage: scripts/fetch-libtorch.sh [DEST]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dest=${1:-$here/../libtorch}
version=2.11.0
[ "$(cat "$dest/build-version" 2>/dev/null || true)" = "$version" ] && exit 0
command -v python3 >/dev/null && python3 -m pip --version >/dev/null 2>&1 ||
  { echo "fetch-libtorch: python3 with pip is needed to download libtorch; on Debian: apt-get install python3-pip" >&2; exit 1; }

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
echo "fetching libtorch $version (545 MB, once)"
python3 -m pip download --quiet --disable-pip-version-check --no-deps --no-cache-dir --only-binary=:all: \
  --python-version 3.11 --platform manylinux_2_28_x86_64 --platform manylinux_2_25_x86_64 --platform manylinux2014_x86_64 \
  --require-hashes -r "$here/libtorch.txt" -d "$tmp"

rm -rf "$dest.part"
mkdir -p "$dest.part/lib"
python3 - "$tmp" "$dest.part" <<'PY'
import glob, os, shutil, sys, zipfile

source, dest = sys.argv[1:]
libraries = {"torch/lib/libtorch_cpu.so", "torch/lib/libc10.so", "torch/lib/libgomp.so.1"}
for wheel in glob.glob(source + "/*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            base = os.path.basename(name)
            if name in libraries or (name.startswith("nvidia/") and "/lib/" in name and base.startswith(("libcudart.so", "libcupti.so"))):
                out = f"{dest}/lib/{base}"
            elif name.startswith("torch/include/") and not name.endswith("/"):
                out = dest + "/" + name[len("torch/"):]
            else:
                continue
            os.makedirs(os.path.dirname(out), exist_ok=True)
            with archive.open(name) as src, open(out, "wb") as dst:
                shutil.copyfileobj(src, dst, 1 << 20)
PY
# torch-sys always links -ltorch; the wheel's own libtorch.so needs libtorch_cuda.so, so a linker script that pulls in nothing stands in.
echo 'INPUT ( libtorch_cpu.so )' > "$dest.part/lib/libtorch.so"
echo "$version" > "$dest.part/build-version"
rm -rf "$dest"
mv "$dest.part" "$dest"
