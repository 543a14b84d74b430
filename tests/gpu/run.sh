#!/usr/bin/env bash
# For a machine with one NVIDIA GPU and Python 3.12: installs the GPU set and runs the tests marked gpu.
# One GPU holds either a learner or a server, not both: the whole loop on GPUs needs two and is not in here.
set -euo pipefail
cd "$(dirname "$0")/../.."

command -v nvidia-smi >/dev/null || { echo "no nvidia-smi: this script is for a machine with a GPU" >&2; exit 2; }
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader

python=${PYTHON:-python3.12}
venv=${VENV:-.venv-gpu}
if [ ! -e "$venv/.done" ]; then
    "$python" -m venv "$venv"
    "$venv/bin/pip" install -r requirements/gpu.txt -r requirements/dev.txt
    "$venv/bin/pip" install --no-deps --no-build-isolation -e .
    touch "$venv/.done"
fi

status=0
"$venv/bin/python" -m pytest -m gpu -rs "$@" || status=$?
# pytest ends with 5 where no test is marked: say so instead of calling it a success.
if [ "$status" = 5 ]; then echo "no test is marked gpu yet: nothing was shown on this GPU" >&2; fi
exit "$status"
