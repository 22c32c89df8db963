"""The learner on eight simulated devices beside one: the largest difference of a parameter after some steps.

Devices are simulated in a process of its own, as their number is settled when JAX starts:
python trainer_meshes.py [--quick] prints one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from table import Table
from trainer_claims import (
    LEARNING_RATE,
    STEPS,
    TINY,
    largest_difference,
    recorded,
    tiny_policy,
)
from trainer_ours import new_learner

from gymllm.trajectory import Group
from gymllm_trainers.mesh import MeshConfig, open_mesh, place_decoder
from gymllm_trainers.models import Decoder, random_decoder

DEVICES = 8
MESHES = {
    "data 8": {"data": 8, "fsdp": 1},
    "fsdp 8": {"fsdp": 8},
    "tensor 2, fsdp 4": {"tensor": 2, "fsdp": 4},
    "context 2, fsdp 4": {"context": 2, "fsdp": 4},
    "data 2, fsdp 2, tensor 2": {"data": 2, "fsdp": 2, "tensor": 2},
    "fsdp 2, tensor 2, context 2": {"fsdp": 2, "tensor": 2, "context": 2},
    "expert 2, data 2, fsdp 2: a mixture": {"expert": 2, "data": 2, "fsdp": 2},
    "fsdp 4, tensor 2: adapters": {"fsdp": 4, "tensor": 2},
}
QUICK = ("fsdp 2, tensor 2, context 2",)
LIMIT_S = 1800


def mesh_rows(table: Table, *, quick: bool) -> None:
    """A row of each mesh."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    done = subprocess.run(
        [sys.executable, __file__, *(["--quick"] if quick else [])],
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        table.add(f"{DEVICES} simulated devices", f"not measured: {last}")
        return
    for name, found in json.loads(done.stdout.splitlines()[-1]).items():
        what = f"{DEVICES} devices to one after {STEPS} steps: {name}"
        value = found if isinstance(found, float) else f"refused: {found}"
        table.add(what, value, "", "<= 1e-5")


def policy(name: str) -> Decoder:
    """The model that a mesh is tried with."""
    if "mixture" in name:
        shape = dataclasses.replace(TINY, num_experts=4, experts_per_token=2, expert_size=16)
        return random_decoder(shape, seed=0)
    decoder = tiny_policy()
    if "adapters" in name:
        decoder.add_adapters(rank=4, alpha=8.0, rngs=nnx.Rngs(0))
    return decoder


def after_steps(decoder: Decoder, groups: list[Group], sizes: dict[str, int]) -> list[np.ndarray]:
    """The trained parameters, on one device where there are no sizes."""
    mesh = open_mesh(MeshConfig(**sizes)) if sizes else None
    place_decoder(decoder, mesh)
    learner = new_learner(
        decoder, rows=DEVICES, row_tokens=1152, mesh=mesh, learning_rate=LEARNING_RATE
    )
    for _ in range(STEPS):
        for group in groups:
            learner.add_group(group)
        learner.step()
    return [np.asarray(leaf) for leaf in jax.tree.leaves(learner.state.trainable)]


def main(quick: bool) -> dict[str, object]:
    """Differences by mesh; where one can't be had, why."""
    groups = recorded(2, tiny_policy())
    found: dict[str, object] = {}
    for name in QUICK if quick else MESHES:
        try:
            one = after_steps(policy(name), groups, {})
            many = after_steps(policy(name), groups, MESHES[name])
            found[name] = largest_difference(one, many)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    print(json.dumps(main("--quick" in sys.argv[1:])))
