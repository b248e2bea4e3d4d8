#!/usr/bin/env bash
# System packages that the build needs: FFmpeg's libraries with their headers, and libclang, which reads the headers.
# Installs what is missing when root on Debian or Ubuntu; else says what to run.
set -euo pipefail

libraries="libavcodec libavformat libavutil libswscale"
packages="pkg-config clang libclang-dev libavcodec-dev libavformat-dev libavutil-dev libswscale-dev"

# shellcheck disable=SC2086
missing() {
  ! command -v pkg-config >/dev/null || ! pkg-config --exists $libraries || ! command -v clang >/dev/null
}

missing || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing $packages" >&2
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  # shellcheck disable=SC2086
  apt-get install -y -qq --no-install-recommends $packages >/dev/null
  missing || exit 0
fi
echo "FFmpeg's development files and clang are missing. On Debian or Ubuntu:" >&2
echo "    sudo apt-get install $packages" >&2
exit 1
