#!/usr/bin/env bash
# The whole check of a GPU (H100, H200): kernels, bandwidth, prefill, command buffers, the engine beside transformers.
#
#   bash benchmarks/device/gpu_check.sh [--json FILE] [--dry-run] [--only PART ...]
#
# Under 8 minutes in all; every part has its time, and what fails is written down and stops nothing else. It sets nothing
# up, fetches nothing, and leaves the card's settings alone. PYTHON names the interpreter (default python3); it needs jax,
# flax, numpy and what cbjax imports. PEER_PYTHON names one with torch and transformers (default: the same).
# --dry-run takes tiny sizes and a CPU, on which the kernels are interpreted.
set -eu
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -m benchmarks.device.check "$@"
