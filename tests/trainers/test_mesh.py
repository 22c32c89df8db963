"""Training on eight devices gives the parameters that one gives; and meshes that can't be are refused.

Run as a script it is the process with eight devices: JAX takes their number when it starts.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from gymllm.errors import ConfigError, ModelError
from gymllm_trainers.algorithms.config import AlgorithmConfig
from gymllm_trainers.config import TrainConfig
from gymllm_trainers.engine import EngineConfig
from gymllm_trainers.learner import Learner, LearnerConfig
from gymllm_trainers.mesh import (
    MeshConfig,
    check_mesh,
    open_mesh,
    place_decoder,
    rows_for,
    sizes_for,
    split_devices,
    state_layout,
)
from gymllm_trainers.models import Decoder, DecoderConfig
from gymllm_trainers.models.sharding import MESH_AXES, MeshAxis, abstract_state
from gymllm_trainers.optimizer import OptimizerConfig, make_optimizer
from gymllm_trainers.packing import TrainingSequence

SHAPE = DecoderConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    qk_norm=True,
)
EXPERTS = replace(SHAPE, num_experts=4, experts_per_token=2, expert_size=16, norm_topk_prob=True)
ROWS, ROW_TOKENS = 8, 48

Case = tuple[str, dict[MeshAxis, int], int]
"""Which model, the mesh, and the rank of adapters."""
FAST: list[Case] = [("experts", {"fsdp": 2, "expert": 2, "context": 2}, 4)]
# Every axis alone, and together, with adapters and with experts.
SLOW: list[Case] = [
    ("dense", {"data": 2, "fsdp": 2, "context": 2}, 0),
    ("experts", {"fsdp": 2, "tensor": 2, "expert": 2}, 0),
    ("dense", {"fsdp": 4, "tensor": 2}, 4),
    ("dense", {"data": 8, "fsdp": 1}, 0),
    ("dense", {"fsdp": 8}, 0),
    ("dense", {"tensor": 4, "fsdp": 2}, 0),
    ("dense", {"context": 4, "fsdp": 2}, 0),
    ("dense", {"context": 2, "tensor": 2, "fsdp": 2}, 4),
    ("experts", {"expert": 4, "data": 2, "fsdp": 1}, 0),
    ("experts", {"expert": 2, "context": 2, "fsdp": 2}, 0),
]


def train(shape: DecoderConfig, mesh: jax.sharding.Mesh | None, rank: int) -> Learner:
    """Three steps on random sequences of several lengths."""
    decoder = Decoder(shape, rngs=nnx.Rngs(0), remat="full")
    if rank:
        decoder.add_adapters(rank=rank, alpha=8.0, rngs=nnx.Rngs(1))
    place_decoder(decoder, mesh)
    learner = Learner(
        decoder,
        LearnerConfig(rows=ROWS, smaller_shapes=0, head_chunk=16),
        algorithm=AlgorithmConfig(loss="reinforce"),
        # A large epsilon: Adam's first steps else have the size of the rate whatever the gradient is,
        # and where that is nearly 0 its sign is a matter of rounding.
        optimizer=OptimizerConfig(learning_rate=1e-2, eps=1e-3),
        row_tokens=ROW_TOKENS,
        temperature=1.0,
        max_lag=0,
        mesh=mesh,
    )
    draw = np.random.default_rng(0)
    for _ in range(3):
        learner.add_sequences([sequence(draw, size) for size in draw.integers(4, 40, size=12)])
        learner.step()
    return learner


def sequence(draw: np.random.Generator, size: int) -> TrainingSequence:
    mask = (draw.random(size) < 0.7).astype(np.float32)
    mask[0], mask[-1] = 0, 1
    return TrainingSequence(
        ids=draw.integers(SHAPE.vocab_size, size=size).astype(np.int32),
        mask=mask,
        behaviour=np.full(size, -4.5, np.float32),
        advantage=np.full(size, draw.normal(), np.float32),
    )


def moved(learner: Learner, start: Decoder) -> list[np.ndarray]:
    """How far each trained parameter is from where it started."""
    before = dict(nnx.to_flat_state(nnx.state(start, nnx.Param)))
    after = nnx.to_flat_state(learner.state.trainable)
    return [np.asarray(after_[...]) - np.asarray(before[path][...]) for path, after_ in after]


def measure(model: str, sizes: dict[MeshAxis, int], rank: int) -> dict[str, float]:
    """What a mesh's parameters differ from one device's by, and how much of them a device keeps."""
    shape = EXPERTS if model == "experts" else SHAPE
    mesh = open_mesh(MeshConfig(**{"fsdp": 1} | sizes))
    assert mesh is not None
    one, many = train(shape, None, rank), train(shape, mesh, rank)
    start = Decoder(shape, rngs=nnx.Rngs(0))
    if rank:
        start.add_adapters(rank=rank, alpha=8.0, rngs=nnx.Rngs(1))
    expected, found = (moved(learner, start) for learner in (one, many))
    differences = [
        float(np.abs(left - right).max()) for left, right in zip(expected, found, strict=True)
    ]
    state = jax.tree.leaves((many.state.trainable, many.state.optimizer))
    return {
        "difference": max(differences),
        "moved": max(float(np.abs(left).max()) for left in expected),
        "share": kept(state) / sum(leaf.nbytes for leaf in state),
    }


def kept(leaves: list[jax.Array]) -> int:
    """Most bytes that one device has of them."""
    bytes_of = dict.fromkeys(jax.devices(), 0)
    for leaf in leaves:
        for shard in leaf.addressable_shards:
            bytes_of[shard.device] += shard.data.nbytes
    return max(bytes_of.values())


def on_eight_devices(cases: list[Case]) -> list[dict[str, float]]:
    flags = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(cases)],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(cases: list[Case]) -> None:
    for case, result in zip(cases, on_eight_devices(cases), strict=True):
        assert result["difference"] < 1e-5, case
        assert result["moved"] > 1e-3, case
        # Parameters and moments are divided over everything but data and context; norms are whole, and
        # key-value heads where tensor doesn't divide them.
        whole = case[1].get("data", 1) * case[1].get("context", 1)
        if case[0] == "dense" and whole < 8 and not case[2]:
            assert result["share"] < 1.5 * whole / 8, case


def test_eight_devices_train_to_the_parameters_of_one() -> None:
    check(FAST)


@pytest.mark.slow
def test_every_axis_trains_to_the_parameters_of_one_device() -> None:
    check(SLOW)


# ------------------------------------------------------------------ meshes that can't be


def abstract(**sizes: int) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in MESH_AXES), MESH_AXES)


def test_one_device_needs_no_mesh() -> None:
    assert open_mesh(MeshConfig(), jax.devices()[:1]) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": 0}, r"mesh\.data must be >= 1, or -1"),
        ({"data": -1}, r"only one axis .* mesh\.data and mesh\.fsdp are -1"),
        ({"engine_devices": -1}, r"mesh\.engine_devices must be >= 0, got -1"),
    ],
)
def test_settings_that_make_no_mesh_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MeshConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "devices", "message"),
    [
        ({"tensor": 2}, 1, "mesh.tensor 2 takes a multiple of 2 devices, but the trainer has 1. The nearest "
         "mesh that works: --mesh.tensor 1."),
        ({"data": 3}, 8, "mesh.data 3 takes a multiple of 3 devices, but the trainer has 8. The nearest "
         "mesh that works: --mesh.data 4."),
        ({"data": 3, "fsdp": 1}, 8, "takes 3 devices, but the trainer has 8. The nearest mesh that works: "
         "--mesh.data 4 --mesh.fsdp 2."),
        ({"fsdp": 1}, 8, "all 1 takes 1 device, but the trainer has 8. The nearest mesh that works: "
         "--mesh.fsdp 8."),
        ({"fsdp": 4, "tensor": 4}, 8, "mesh.fsdp 4 x mesh.tensor 4 takes 16 devices"),
        ({"fsdp": -1, "tensor": 6, "data": 3}, 64, "--mesh.data 4 --mesh.tensor 8."),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_the_devices_are_answered_with_the_nearest_that_do(
    settings: dict[str, int], devices: int, message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        sizes_for(MeshConfig(**settings), devices)
    assert message in str(raised.value)
    flags = str(raised.value).partition("works: ")[2].rstrip(".").replace("--mesh.", "").split()
    near = dict(zip(flags[::2], map(int, flags[1::2]), strict=True))
    sizes = sizes_for(MeshConfig(**(settings | near)), devices)  # the answer works
    assert math.prod(sizes.values()) == devices


def test_a_cpu_is_told_how_to_have_more_devices() -> None:
    with pytest.raises(
        ConfigError, match=r"XLA_FLAGS=--xla_force_host_platform_device_count=3 makes 3"
    ):
        open_mesh(MeshConfig(data=3), jax.devices("cpu")[:1])


def test_the_engine_takes_the_first_devices_and_leaves_some() -> None:
    devices = [*"abcd"]
    shares = split_devices(MeshConfig(engine_devices=1), devices)  # type: ignore[arg-type]  # any will do
    assert shares == ([*"bcd"], [*"a"])
    with pytest.raises(
        ConfigError, match=r"engine_devices is 4, .* only 4 devices, .* most 3, or to 0"
    ):
        split_devices(MeshConfig(engine_devices=4), devices)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"only 1 device, .* left for training\. Set it to 0, which"
    ):
        split_devices(MeshConfig(engine_devices=1), devices[:1])  # type: ignore[arg-type]


def test_devices_that_the_engine_does_not_use_are_not_kept_for_it() -> None:
    with pytest.raises(ConfigError, match=r"engine_devices is 3, but engine\.tensor \(2\) times"):
        TrainConfig(mesh=MeshConfig(engine_devices=3), engine=EngineConfig(tensor=2))


@pytest.mark.slow
def test_a_run_trains_on_three_devices_while_the_engine_has_the_fourth(tmp_path: Path) -> None:
    flags = "--xla_force_host_platform_device_count=4"
    command = [
        *(sys.executable, "-c", "from gymllm_trainers.cli import train; raise SystemExit(train())"),
        *("--runs-dir", str(tmp_path), "--name", "run", "--steps", "2"),
        *(
            "--rollout.max-lag",
            "0",
            "--mesh.data",
            "3",
            "--mesh.fsdp",
            "1",
            "--mesh.engine-devices",
            "1",
        ),
        *("--metrics.no-display", "--metrics.wandb", "off", "--warm-start.no-enabled"),
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [step["step"] for step in steps] == [1, 2]
    # What the engine says of its tokens is what the trainer finds: they have the same weights.
    assert steps[0]["learner/logprob_gap_mean"] < 1e-3


def test_rows_are_as_many_as_the_mesh_divides() -> None:
    mesh = abstract(data=2, fsdp=3, tensor=5)
    assert rows_for(None, 0) == 2
    assert rows_for(None, 3) == 3
    assert rows_for(mesh, 0) == 6
    assert rows_for(mesh, 12) == 12
    with pytest.raises(ConfigError, match=r"learner\.rows=8 .* 6 parts .* set it to 12"):
        rows_for(mesh, 8)


def test_context_divides_rows_and_heads_or_is_refused() -> None:
    check_mesh(abstract(context=2, tensor=2), SHAPE, row_tokens=64)
    with pytest.raises(ConfigError, match=r"row_tokens=63 .* mesh\.context=2: set it to 64"):
        check_mesh(abstract(context=2), SHAPE, row_tokens=63)
    with pytest.raises(ModelError, match=r"mesh\.context=4 doesn't divide the 2 query heads"):
        check_mesh(abstract(context=4, tensor=2), SHAPE, row_tokens=64)


def test_what_an_optimizer_keeps_lies_as_its_parameter_does() -> None:
    mesh = abstract(fsdp=2, tensor=2)
    decoder = nnx.eval_shape(lambda: Decoder(SHAPE, rngs=nnx.Rngs(0)))
    params = abstract_state(decoder, mesh)
    optimizer = make_optimizer(OptimizerConfig(), 10)
    layouts = state_layout(optimizer.init, params, mesh)  # type: ignore[arg-type]  # needs no devices
    found = {
        path[-2].key: sharding.spec
        for path, sharding in jax.tree_util.tree_leaves_with_path(layouts)
        if "mu" in str(path)
    }
    assert found["query"] == PartitionSpec(None, "fsdp", "tensor")
    assert found["output"] == PartitionSpec(None, "tensor", "fsdp")
    assert found["attention_norm"] == PartitionSpec(None, None)
    assert found["embedding"] == PartitionSpec("tensor", "fsdp")


if __name__ == "__main__":
    print(json.dumps([measure(*case) for case in json.loads(sys.argv[1])]))  # noqa: T201
