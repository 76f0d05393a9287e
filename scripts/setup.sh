#!/usr/bin/env bash
# Makes .venv ready for development: Python, pinned packages, kvstrata itself (editable).
# `make` calls it when pyproject.toml or constraints.txt changed since the last time.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\033[1m[set-up]\033[0m %s\n' "$*"; }

debian_package() {
  say "installing the Debian package $1"
  local sudo=""
  [ "$(id -u)" -eq 0 ] || sudo="sudo"
  $sudo apt-get update -qq
  $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$1"
}

debian_command() {
  command -v "$1" >/dev/null || debian_package "$2"
}

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  say "kvstrata needs Python 3.11 or later; '$python' is not. Set PYTHON=/path/to/python3.11"
  exit 1
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  debian_package python3-venv
fi

# What the native calls are built with; without it kvstrata works as well, only slower.
debian_command cc gcc
[ -e /usr/include/xxhash.h ] || debian_package libxxhash-dev
if ! "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' \
  2>/dev/null; then
  debian_package python3-dev
fi

# Servers that the tests start.
debian_command redis-server redis-server
debian_command openssl openssl
# What they injure real components with: file systems, networks, files that cannot be deleted.
debian_command fusermount3 fuse3
debian_command ip iproute2
debian_command chattr e2fsprogs

if [ ! -x .venv/bin/python ]; then
  say "making the virtual environment .venv"
  "$python" -m venv .venv
fi

say "installing kvstrata and its tools into .venv (about two minutes the first time)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check \
  --constraint constraints.txt --editable '.[dev]' 2> >(grep -v "is ignored" >&2)
say "ready"
