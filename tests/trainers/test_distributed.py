"""Two processes train to the parameters of one; and one's death ends the other with a message.

Run as a script it is one of the processes.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from gymllm.errors import ConfigError, RunError
from gymllm.ledger import NO_VERSION, Segment
from gymllm.task import Task
from gymllm.trajectory import Ending, Group, Trajectory
from gymllm_trainers.distributed import (
    LeadingLearner,
    ProcessConfig,
    follow,
    is_leader,
    join_processes,
)
from gymllm_trainers.learner import Learner, LearnerConfig
from gymllm_trainers.mesh import MeshConfig, open_mesh, place_decoder
from gymllm_trainers.models import Decoder, DecoderConfig
from gymllm_trainers.optimizer import OptimizerConfig

SHAPE = DecoderConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)


def make_learner(mesh: jax.sharding.Mesh | None) -> Learner:
    decoder = Decoder(SHAPE, rngs=nnx.Rngs(0))
    place_decoder(decoder, mesh)
    return Learner(
        decoder,
        LearnerConfig(rows=4, smaller_shapes=0, head_chunk=16),
        optimizer=OptimizerConfig(learning_rate=1e-2, eps=1e-3),
        row_tokens=32,
        temperature=1.0,
        max_lag=9,
        mesh=mesh,
    )


def make_groups(count: int) -> list[Group]:
    draw = np.random.default_rng(0)
    groups: list[Group] = []
    for index in range(count):
        task = Task(index=index, id=f"t{index}", seed=index)
        trajectories: list[Trajectory] = []
        for member in range(4):
            size = int(draw.integers(6, 20))
            mask = (np.arange(size) > 2).astype(np.int32)
            segment = Segment(
                ids=draw.integers(64, size=size).astype(np.int32),
                mask=mask,
                logprobs=np.where(mask, -4.0, 0.0).astype(np.float32),
                versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
            )
            trajectories.append(
                Trajectory(
                    task=task,
                    member=member,
                    attempt=0,
                    segments=(segment,),
                    turns=(),
                    messages=(),
                    ending=Ending.TERMINATED,
                    reward=float(member),
                )
            )
        groups.append(Group(task=task, trajectories=tuple(trajectories)))
    return groups


def train(learner: Learner | LeadingLearner) -> None:
    """Two steps of two groups."""
    for number, group in enumerate(make_groups(4)):
        learner.add_group(group)
        if number % 2:
            learner.step()


# ------------------------------------------------------------------ one of two processes


def run(number: int, port: int, task: str, folder: Path) -> None:
    join_processes(
        ProcessConfig(
            coordinator=f"localhost:{port}",
            num_processes=2,
            process_id=number,
            start_timeout_s=120,
            heartbeat_timeout_s=10,
        )
    )
    mesh = open_mesh(MeshConfig(fsdp=2, data=2))
    assert mesh is not None
    learner = make_learner(mesh)
    try:
        if is_leader():
            lead(LeadingLearner(learner, mesh), task, folder)
        else:
            if task == "die":
                (folder / "follower").write_text(str(os.getpid()))
            follow(learner, mesh)
    except RunError as error:
        print(f"RunError: {error}", flush=True)  # noqa: T201
        # Not by way of JAX's own farewell, which waits for the one that is dead.
        os._exit(1)


def lead(learner: LeadingLearner, task: str, folder: Path) -> None:
    if task == "train":
        train(learner)
        weights = jax.device_get(learner.weights())
        (folder / "weights").write_bytes(pickle.dumps(jax.tree.leaves(weights)))
        learner.end()
        return
    train(learner)
    (folder / "trained").write_text("")
    while True:  # until the other one's death is noticed
        train(learner)


def start(number: int, port: int, task: str, folder: Path) -> subprocess.Popen[str]:
    flags = "--xla_force_host_platform_device_count=2"
    return subprocess.Popen(
        [sys.executable, __file__, str(number), str(port), task, str(folder)],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@pytest.mark.slow
def test_two_processes_train_to_the_parameters_of_one(tmp_path: Path) -> None:
    port = free_port()
    processes = [start(number, port, "train", tmp_path) for number in range(2)]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    found = pickle.loads((tmp_path / "weights").read_bytes())
    alone = make_learner(None)
    start_leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(alone.state.trainable)]
    train(alone)
    expected = [np.asarray(leaf) for leaf in jax.tree.leaves(alone.state.trainable)]
    for left, right, before in zip(found, expected, start_leaves, strict=True):
        assert np.abs(left - right).max() < 1e-5
        assert np.abs(right - before).max() > 1e-4


@pytest.mark.slow
def test_the_death_of_one_process_ends_the_other_with_a_message(tmp_path: Path) -> None:
    port = free_port()
    leader, follower = (start(number, port, "die", tmp_path) for number in range(2))
    try:
        deadline = time.monotonic() + 600
        while not (tmp_path / "trained").exists():
            assert leader.poll() is None, leader.communicate()[1][-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)  # another process's file: there is nothing to wait on
        follower.kill()
        killed = time.monotonic()
        output, errors = leader.communicate(timeout=60)
        assert time.monotonic() - killed < 60
        assert leader.returncode != 0
        assert "another of the 2 processes has died" in output, errors[-3000:]
    finally:
        for process in (leader, follower):
            process.kill()
            process.communicate()


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coordinator": "here"}, r"processes\.coordinator must be HOST:PORT, .* got 'here'"),
        ({"coordinator": "a:1"}, r"process_id must be from 0 to num_processes - 1 .* -1 of 0"),
        (
            {"coordinator": "a:1", "num_processes": 2, "process_id": 2},
            r"process_id must be .* 2 of 2",
        ),
        ({"heartbeat_timeout_s": 0}, r"processes\.heartbeat_timeout_s must be >= 1, got 0"),
    ],
)
def test_settings_that_make_no_group_are_refused(
    settings: dict[str, int | str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ProcessConfig(**settings)  # type: ignore[arg-type]  # of both kinds


def test_one_process_joins_nobody() -> None:
    join_processes(ProcessConfig())
    assert is_leader()


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
