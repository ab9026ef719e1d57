#!/usr/bin/env bash
# What a machine with one GPU is asked, in less than 8 minutes and without a network: does the GPU say what the CPU says,
# and how fast is it. Writes gpu.json into $OUT (a temporary folder by default). `--device cpu` is a reduced form.
set -euo pipefail
cd "$(dirname "$0")/../.."
device=cuda
[ "${1:-}" = --device ] && device=$2
out=${OUT:-$(mktemp -d)}
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

code=0
limit=330
[ "$device" = cpu ] && limit=0
timeout "$limit" python3 tests/gpu/agreement.py --device "$device" --out "$out/gpu.json" || code=$?
if [ "$device" != cpu ]; then
  if python3 -c 'import pytest, hypothesis, jaxtyping, beartype, gguf' 2> /dev/null; then
    timeout 120 python3 -m pytest -o addopts='' -q -m gpu tests/gpu || code=$?
  else
    echo 'what the tests need is not installed: tests/gpu is left out'
  fi
fi
echo "$out/gpu.json"
exit "$code"
