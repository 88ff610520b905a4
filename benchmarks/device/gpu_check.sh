#!/usr/bin/env bash
# The whole check of a GPU (H100, H200): kernels, bandwidth, prefill, command buffers, the engine beside transformers.
#
#   bash benchmarks/device/gpu_check.sh [--json FILE] [--dry-run] [--only PART ...]
#
# Under 8 minutes in all; every part has its time, and what fails is written down and stops nothing else. It sets nothing
# up, fetches nothing, and leaves the card's settings alone. Before it:
#
#   python3 -m venv .venv && .venv/bin/pip install -e '.[cuda13]'
#   python3 -m venv peer && peer/bin/pip install torch transformers accelerate
#   PYTHON=.venv/bin/python PEER_PYTHON=peer/bin/python bash benchmarks/device/gpu_check.sh
#
# PYTHON is python3 if nothing else is said, PEER_PYTHON the same; without a peer its steps are left out.
# Exit status: 0, everything ran and every limit holds; 1, something failed or a limit does not hold; 2, nothing was run.
# --dry-run takes tiny sizes and a CPU, on which the kernels are interpreted; no limit is looked at.
set -eu
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -m benchmarks.device.check "$@"
