"""What eight devices compute, keep, read and write, against one; and what doesn't fit a mesh.

Run as a script it is the process with eight devices: JAX takes their number when it starts.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec
from safetensors.numpy import load_file

from gymllm.errors import ConfigError, ModelError
from gymllm_trainers.models import (
    Decoder,
    LoadedModel,
    load_model,
    random_decoder,
    save_model,
)
from gymllm_trainers.models.decoder import LoRAParam
from gymllm_trainers.models.experts import mix_experts
from gymllm_trainers.models.load import read_params
from gymllm_trainers.models.sharding import (
    MESH_AXES,
    constrain_rows,
    leaf_at,
    make_mesh,
    param_shardings,
    row_sharding,
    shard_decoder,
)

FIXTURES = Path(__file__).parent / "fixtures"
# Every axis at once, on the family that has something on each of them.
FAST = [("tiny_qwen3_moe", {"fsdp": 2, "tensor": 2, "expert": 2})]
SLOW = [
    ("tiny_llama", {"fsdp": 8}),
    ("tiny_qwen3", {"data": 8, "fsdp": 1}),
    ("tiny_qwen3", {"data": 2, "fsdp": 2, "tensor": 2}),
    ("tiny_qwen3", {"fsdp": 2, "tensor": 4}),
    ("tiny_gemma3", {"fsdp": 4, "tensor": 2}),
    ("tiny_qwen3_moe", {"expert": 2, "data": 2, "fsdp": 2}),
    ("tiny_qwen3", {"context": 4, "fsdp": 2}),
    ("tiny_gemma3", {"context": 2, "fsdp": 2, "tensor": 2}),
    ("tiny_qwen3_moe", {"context": 2, "expert": 2, "data": 2, "fsdp": 1}),
]


def abstract_mesh(**sizes: int) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in MESH_AXES), MESH_AXES)


# ------------------------------------------------------------------ eight devices


def start(*arguments: str, devices: int) -> subprocess.Popen[str]:
    """Runs this file in a process with so many devices."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """What a process printed, once it has ended well."""
    try:
        output, errors = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return output


def on_eight_devices(cases: list[tuple[str, dict[str, int]]]) -> list[dict[str, float]]:
    """Runs this file with eight devices; what `measure` returns for each case."""
    return json.loads(finish(start("measure", json.dumps(cases), devices=8)))


def measure(name: str, sizes: dict[str, int]) -> dict[str, float]:
    """Largest differences between what eight devices and one make of a checkpoint, and one's share of it."""
    mesh = make_mesh(**sizes)
    single, divided = load_model(FIXTURES / name), load_model(FIXTURES / name, mesh=mesh)
    results = {
        "parameters": largest_difference(divided.params, single.params),
        "largest_share": largest_share(divided),
    }
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder) / "m", divided.config, divided.params, divided.tokenizer)
        written = load_model(Path(folder) / "m")
    results["written"] = largest_difference(written.params, single.params)
    # Arrays on the host are what GGUF files are read as.
    arrays = read_params(Arrays(FIXTURES / name), single.config, dtype="float32", mesh=mesh)
    results["arrays"] = largest_difference(arrays, single.params)

    if single.config.num_experts:
        results["experts"] = experts_difference(mesh)

    generator = np.random.default_rng(0)
    ids = jnp.array(generator.integers(0, single.config.vocab_size, (8, 12)), jnp.int32)
    decoder = with_adapters(single)
    expected = loss_and_gradient(decoder, ids)
    # Sharded from a decoder that is whole: how adapters, which aren't in the checkpoint, get there.
    decoder = with_adapters(divided)
    shard_decoder(decoder, mesh)
    with jax.set_mesh(mesh):
        found = loss_and_gradient(decoder, jax.device_put(ids, row_sharding(mesh)))
    results["loss"] = abs(float(found[0]) - float(expected[0]))
    results["gradient"] = largest_difference(found[1], expected[1])
    return results


def experts_difference(mesh: jax.sharding.Mesh) -> float:
    """Largest difference of a layer of six experts, run either way on a mesh, from one device's."""
    generator = np.random.default_rng(0)
    shapes = [(16, 4), (4, 6), (6, 4, 8), (6, 4, 8), (6, 8, 4)]
    operands = [jnp.asarray(generator.normal(size=shape), jnp.float32) for shape in shapes]

    def mix(implementation: Literal["dense", "ragged"], operands: list[jax.Array]) -> jax.Array:
        return mix_experts(
            *operands,
            experts_per_token=3,
            normalise=False,
            activation=jax.nn.silu,
            implementation=implementation,
        )

    expected = mix("dense", operands)
    with jax.set_mesh(mesh):
        found = [jax.jit(mix, static_argnums=0)(way, operands) for way in ("dense", "ragged")]
    return max(largest_difference(array, expected) for array in found)


class Arrays:
    """A checkpoint whose tensors are NumPy arrays."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._tensors: dict[str, np.ndarray] = {}
        for path in folder.glob("*.safetensors"):
            self._tensors |= load_file(path)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        return self._tensors[name]


def with_adapters(model: LoadedModel) -> Decoder:
    """The model with adapters that change what it computes."""
    decoder = model.decoder()
    decoder.add_adapters(rank=2, alpha=4.0, rngs=nnx.Rngs(0))
    for _, variable in nnx.to_flat_state(nnx.state(decoder.adapters, LoRAParam)):
        noise = np.random.default_rng(variable[...].size).normal(0, 0.1, variable[...].shape)
        variable[...] = jnp.asarray(noise, jnp.float32)
    return decoder


def loss_and_gradient(decoder: Decoder, ids_BT: jax.Array) -> tuple[jax.Array, nnx.State]:
    """Mean negative log-probability of tokens after the first, and its gradient, where those are."""
    graph, state = nnx.split(decoder)
    positions = jnp.broadcast_to(jnp.arange(ids_BT.shape[1], dtype=jnp.int32), ids_BT.shape)

    def loss(state: nnx.State, ids_BT: jax.Array) -> jax.Array:
        decoder = nnx.merge(graph, state)
        hidden = decoder.hidden(ids_BT, positions, jnp.full_like(ids_BT, ids_BT.shape[1]))
        logprobs = jax.nn.log_softmax(decoder.logits(hidden)[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logprobs, ids_BT[:, 1:, None], axis=-1))

    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    compute = jax.jit(jax.value_and_grad(loss), out_shardings=(None, shardings))
    return compute(state, ids_BT)


def largest_difference(left: object, right: object) -> float:
    """Over two trees of arrays, each relative to the largest value of its array."""

    def difference(left: jax.Array, right: jax.Array) -> float:
        left, right = np.asarray(left), np.asarray(right)
        return float(np.abs(left - right).max() / np.abs(right).max())

    return max(jax.tree.leaves(jax.tree.map(difference, left, right)))


def largest_share(model: LoadedModel) -> float:
    """The most of the parameters' bytes that one device keeps."""
    leaves = jax.tree.leaves(model.params)
    kept = dict.fromkeys(jax.devices(), 0)
    for leaf in leaves:
        for shard in leaf.addressable_shards:
            kept[shard.device] += shard.data.nbytes
    return max(kept.values()) / sum(leaf.nbytes for leaf in leaves)


def check(results: dict[str, float]) -> None:
    assert results["parameters"] == 0
    assert results["arrays"] == 0
    assert results["written"] == 0
    assert results.get("experts", 0) < 1e-5
    assert results["loss"] < 1e-5
    assert results["gradient"] < 1e-5


def test_eight_devices_compute_what_one_does() -> None:
    (results,) = on_eight_devices(FAST)
    check(results)
    # Norms and the router's outputs stay whole; the rest is in eight, or in four where there are no experts.
    assert 1 / 8 < results["largest_share"] < 0.25


@pytest.mark.slow
def test_every_division_computes_what_one_device_does() -> None:
    for (_, sizes), results in zip(SLOW, on_eight_devices(SLOW), strict=True):
        check(results)
        assert (results["largest_share"] == 1) == (sizes.get("data") == 8)


# ------------------------------------------------------------------ two processes


def share(number: int, port: str, folder: str) -> None:
    """One of two processes with two devices each: reads its parts, and takes part in writing them all."""
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=number)
    model = load_model(FIXTURES / "tiny_qwen3", mesh=make_mesh(fsdp=2, tensor=2))
    save_model(Path(folder) / "m", model.config, model.params, model.tokenizer)
    # The first can't write, and says so; the other is not left waiting for it.
    try:
        save_model(FIXTURES / "tiny_qwen3", model.config, model.params, model.tokenizer)
    except ModelError as error:
        print(error)  # noqa: T201


@pytest.mark.slow
def test_two_processes_read_their_parts_and_write_one_model(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    processes = [start("share", str(i), port, str(tmp_path), devices=2) for i in range(2)]
    first, second = map(finish, processes)
    assert "is not empty" in first
    assert "is not empty" not in second
    written, read = load_model(tmp_path / "m"), load_model(FIXTURES / "tiny_qwen3")
    assert written.config == read.config
    assert largest_difference(written.params, read.params) == 0


# ------------------------------------------------------------------ where parameters belong


def test_every_parameter_has_a_place() -> None:
    for name in sorted(path.parent.name for path in FIXTURES.glob("*/config.json")):
        if name.endswith("_reward"):
            continue  # with a score head
        config = load_model(FIXTURES / name).config
        params = nnx.to_pure_dict(
            nnx.state(nnx.eval_shape(lambda c=config: random_decoder(c, seed=0)))
        )
        shardings = param_shardings(config, abstract_mesh(fsdp=2))
        shapes = jax.tree.map(
            lambda sharding, leaf: sharding.shard_shape(leaf.shape), shardings, params
        )
        divided = {
            key
            for key, shape in (shapes["layers"] | {"embedding": shapes["embedding"]}).items()
            if shape != (params["layers"] | params)[key].shape
        }
        kernels = {key for key, leaf in params["layers"].items() if leaf.ndim > 2}
        assert divided == kernels | {"embedding"}


def test_kernels_are_divided_by_heads_and_by_feed_forward() -> None:
    config = load_model(FIXTURES / "tiny_qwen3_moe").config
    shardings = param_shardings(config, abstract_mesh(tensor=2, expert=2))

    def spec(*path: str) -> PartitionSpec:
        sharding = leaf_at(shardings, path)
        assert sharding is not None
        return sharding.spec

    assert spec("embedding") == PartitionSpec("tensor", "fsdp")
    assert spec("layers", "query") == PartitionSpec(None, "fsdp", "tensor")
    assert spec("layers", "output") == PartitionSpec(None, "tensor", "fsdp")
    assert spec("layers", "experts_down") == PartitionSpec(None, "expert", "tensor", "fsdp")
    assert spec("layers", "attention_norm") == PartitionSpec(None, None)


def test_vocabulary_that_does_not_divide_stays_whole(caplog: pytest.LogCaptureFixture) -> None:
    config = replace(load_model(FIXTURES / "tiny_qwen3").config, vocab_size=321)
    with caplog.at_level(logging.WARNING):
        shardings = param_shardings(config, abstract_mesh(tensor=4))
    embedding = leaf_at(shardings, ("embedding",))
    key = leaf_at(shardings, ("layers", "key"))
    assert embedding is not None
    assert key is not None
    assert embedding.spec == PartitionSpec(None, "fsdp")
    assert key.spec == PartitionSpec(None, "fsdp", None)
    assert [record.message for record in caplog.records] == [
        "vocab_size=321 is not a multiple of tensor=4: kept whole.",
        "num_key_value_heads=2 is not a multiple of tensor=4: kept whole.",
    ]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor": 8}, "num_attention_heads=4 can't be divided over tensor=8"),
        ({"fsdp": 3}, "hidden_size=32 can't be divided over fsdp=3"),
        ({"expert": 4}, "num_experts=6 can't be divided over expert=4"),
    ],
)
def test_what_can_not_be_divided_is_named(sizes: dict[str, int], message: str) -> None:
    config = load_model(FIXTURES / "tiny_qwen3_moe").config
    with pytest.raises(ModelError, match=message):
        param_shardings(config, abstract_mesh(**sizes))


def test_feed_forward_that_does_not_divide_is_named() -> None:
    config = replace(load_model(FIXTURES / "tiny_qwen3").config, intermediate_size=63)
    with pytest.raises(ModelError, match="intermediate_size=63 can't be divided over tensor=2"):
        param_shardings(config, abstract_mesh(tensor=2))


# ------------------------------------------------------------------ meshes


def test_mesh_takes_what_the_other_axes_leave() -> None:
    assert dict(make_mesh(devices=jax.devices()[:1]).shape) == dict.fromkeys(MESH_AXES, 1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"tensor": 2},
            r"tensor=2, expert=1, context=1 doesn't fit 1 devices: .* multiply to that number",
        ),
        ({"fsdp": 2}, r"data=1, fsdp=2, .* doesn't fit 1 devices"),
        ({"data": -1}, r"-1 on one axis .*got data=-1, fsdp=-1"),
        ({"data": 0}, r"must be >= 1, .*got data=0"),
    ],
)
def test_mesh_that_does_not_fit_is_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_mesh(**sizes, devices=jax.devices()[:1])


def test_mesh_of_other_axes_is_refused() -> None:
    config = load_model(FIXTURES / "tiny_qwen3").config
    with pytest.raises(
        ConfigError, match=r"has the axes x and lacks context, data, .* `make_mesh`"
    ):
        param_shardings(config, AbstractMesh((2,), ("x",)))


def test_without_a_mesh_nothing_is_constrained() -> None:
    x = jnp.ones((3, 2))
    assert constrain_rows(x) is x


if __name__ == "__main__":
    task, *arguments = sys.argv[1:]
    if task == "measure":
        print(json.dumps([measure(name, sizes) for name, sizes in json.loads(arguments[0])]))  # noqa: T201
    else:
        share(int(arguments[0]), *arguments[1:])
