#!/usr/bin/env bash
# The engine's and the trainer's tables on one GPU, in under 8 minutes.
#
#   benchmarks/gpu.sh                            on the GPU; installs JAX for it if it must and can
#   benchmarks/gpu.sh --device cpu --size tiny   tries the script itself, in a minute
#
# PYTHON is the interpreter to use (python3). If it lacks what is needed, a virtual environment is made in
# VENV (~/.cache/gymllm/benchmarks/gpu) and filled by pip; without a package index it says what to install.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=${PYTHON:-python3}
venv=${VENV:-$HOME/.cache/gymllm/benchmarks/gpu}
device=gpu
previous=
for argument in "$@"; do
  case $argument in --device=*) device=${argument#*=} ;; esac
  [ "$previous" = --device ] && device=$argument
  previous=$argument
done
export PYTHONPATH=$root:$root/agents:$root/envs:$root/trainers${PYTHONPATH:+:$PYTHONPATH}
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}

serves() { # whether an interpreter has all that is needed, and JAX finds the device; else says why not
  "$1" - "$device" <<'PYTHON' >/dev/null
import sys
import jax
import gymllm_trainers.engine, gymllm_trainers.learner, gymllm_envs.frozen_lake
jax.devices({"gpu": "cuda"}.get(sys.argv[1], sys.argv[1]))
PYTHON
}

if ! serves "$python" 2>/dev/null; then
  python_of_venv=$venv/bin/python
  if ! { [ -x "$python_of_venv" ] && serves "$python_of_venv" 2>/dev/null; }; then
    jax=jax
    if [ "$device" = gpu ]; then
      if ! command -v nvidia-smi >/dev/null; then
        echo "gpu.sh: no nvidia-smi here, so no GPU that it knows; --device cpu --size tiny tries the script." >&2
        exit 1
      fi
      cuda=$(nvidia-smi | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p' | head -1)
      jax="jax[cuda$([ "${cuda:-12}" -ge 13 ] && echo 13 || echo 12)]"
    fi
    echo "gpu.sh: installing $jax and gymllm into $venv ..." >&2
    "$python" -m venv "$venv"
    if ! "$python_of_venv" -m pip install --quiet "$jax" "$root" "$root/agents" "$root/envs" "$root/trainers"; then
      echo "gpu.sh: pip can't install here. Give PYTHON=... an interpreter (3.11 or later) that has" >&2
      echo "  pip install \"$jax\" $root $root/agents $root/envs $root/trainers" >&2
      exit 1
    fi
    if ! serves "$python_of_venv"; then
      echo "gpu.sh: what was installed into $venv does not do, as said above." >&2
      exit 1
    fi
  fi
  python=$python_of_venv
fi
exec timeout "${LIMIT_S:-480}" "$python" benchmarks/gpu.py "$@"
