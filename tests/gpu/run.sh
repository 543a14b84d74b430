#!/usr/bin/env bash
# The checks of weight sync, and of FP8, on a machine with one NVIDIA GPU, in a few minutes.
#
#   tests/gpu/run.sh [--gigabytes 15] [--cycles 20] [--only ipc,export,checksum,quantize,fp8,copies,cycle,offload,engines]
#   tests/gpu/run.sh --dry       all that needs no GPU, on a CPU over a pretended one
#
# PYTHON names the interpreter (python3). If its torch sees the GPU, it is used as it is: nothing is
# installed and no network is needed. Else a virtual environment gets the GPU set, with Python 3.12.
# One GPU holds either a learner or a server, not both: the whole loop needs two and is not in here.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

python=${PYTHON:-python3}
if [ "${1:-}" = --dry ]; then
    export TRITON_INTERPRET=1 # where Triton is installed, its kernel runs on the CPU
    exec "$python" -m tests.gpu.check "$@"
fi

command -v nvidia-smi >/dev/null || { echo "no nvidia-smi: this script is for a machine with a GPU" >&2; exit 2; }
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader

if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    exec "$python" -m tests.gpu.check "$@"
fi

python=${PYTHON:-python3.12}
venv=${VENV:-.venv-gpu}
if [ ! -e "$venv/.done" ]; then
    "$python" -m venv "$venv"
    "$venv/bin/pip" install -r requirements/gpu.txt -r requirements/dev.txt
    "$venv/bin/pip" install --no-deps --no-build-isolation -e .
    touch "$venv/.done"
fi
exec "$venv/bin/python" -m tests.gpu.check "$@"
