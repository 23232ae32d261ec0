#!/usr/bin/env bash
# Run what needs a GPU, on a machine that has torch but no network: install from a folder of wheels, download nothing.
#   scripts/test_gpu.sh PYTHON VENV WHEELS
set -euo pipefail
python=$1 venv=$2 wheels=$3
[ -f "$wheels/requirements.txt" ] || { echo "$wheels has no wheels; run \`make wheels-gpu\` on a machine with a network and copy the folder here" >&2; exit 1; }
"$python" - <<'CHECK'
import sys
if sys.version_info[:2] != (3, 12):
    sys.exit("the wheels are for Python 3.12; run make with GPU_PYTHON=<its path>")
try:
    import torch
except ImportError:
    sys.exit("this Python has no torch; install torch 2.11 or newer, or run make with GPU_PYTHON=<one that has it>")
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11) or not torch.cuda.is_available():
    sys.exit(f"torch 2.11 or newer and a GPU are required; found torch {torch.__version__} and {torch.cuda.device_count()} GPUs")
CHECK
[ -x "$venv/bin/python" ] || "$python" -m venv --system-site-packages "$venv"
install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-index --find-links "$wheels" --no-deps)
"${install[@]}" -r "$wheels/requirements.txt"
"${install[@]}" --upgrade --target "$venv/trl" -r requirements/bench.txt
"$venv/bin/python" scripts/gen_protos.py
"${install[@]}" --no-build-isolation --editable .
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
# Report why vLLM cannot be loaded before its tests fail.
"$venv/bin/python" -c "import vllm._C_stable_libtorch" \
    || { echo "vLLM's libraries do not load with this torch; requirements/gpu.txt names the torch that they are built for" >&2; exit 1; }
"$venv/bin/python" -m pytest -m gpu tests/gpu
"$venv/bin/python" -m bench.train --device cuda
