"""States of optimizers in fewer bits, in other memory and on meshes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gymllm.errors import ConfigError
from gymllm_trainers.optimizer import OptimizerConfig, make_optimizer
from gymllm_trainers.optimizer_state import Blocks, blocks_of, decode, encode

Tree = Any


# ------------------------------------------------------------------ 8 bits


def codes(bits: int) -> np.ndarray:
    """What the codes of magnitudes mean, in order: sec. 2 of arXiv:2110.02861, as a table."""
    values = [0.0]
    for decade in range(bits):
        edges = np.linspace(0.1, 1, 2**decade + 1) * 10.0 ** (decade - bits + 1)
        values += list((edges[:-1] + edges[1:]) / 2)
    values[-1] = 1.0
    return np.array(values)


@pytest.mark.parametrize("signed", [True, False])
def test_numbers_are_rounded_to_a_code_beside_them_and_right_on_average(signed):
    rng = np.random.default_rng(0)
    values = rng.standard_normal((2, 64, 512)) * 10 ** rng.uniform(-4, 0, 512)
    values = values.astype(np.float32)
    got = decode(encode(jnp.asarray(values if signed else values**2), signed=signed, seed=0))
    got = np.asarray(got, np.float64)
    got = got if signed else np.sqrt(got)
    blocks = np.abs(values).reshape(2, 64, 2, 256).max(-1)
    scale = np.repeat(blocks, 256, axis=-1).astype(np.float64)
    table = codes(7 if signed else 8)
    share, held = np.abs(values) / scale, np.abs(got) / scale
    code = np.abs(table[:, None] - held.reshape(1, -1)).argmin(0).reshape(held.shape)
    np.testing.assert_allclose(held, table[code], rtol=1e-5, atol=1e-12)
    above = np.clip(table.searchsorted(share, side="left"), 1, len(table) - 1)
    assert (
        np.abs(code - above + 0.5) <= 1
    ).mean() > 0.999  # its neighbours, but for edges of decades
    assert (np.abs(code - above + 0.5) <= 2).all()
    wide = share > 1e-3
    bias = (held - share)[wide].mean() / share[wide].mean()
    assert abs(bias) < 1e-3
    if signed:
        assert (np.sign(got) == np.sign(values))[share > 1e-6].all()


def test_another_seed_rounds_otherwise():
    values = jax.random.normal(jax.random.key(0), (40, 300))
    first, second = (decode(encode(values, signed=True, seed=seed)) for seed in (1, 2))
    differ = np.asarray(first != second)
    # Half-way between codes every other pair of draws differs, over all numbers a third.
    assert 0.25 < differ.mean() < 0.4
    many = np.mean([decode(encode(values, signed=True, seed=seed)) for seed in range(64)], axis=0)
    inside = np.abs(values) < 0.9 * np.abs(values).max()
    assert np.abs(many - values)[inside].mean() < np.abs(first - values)[inside].mean() / 4


def test_the_largest_of_a_block_is_exact():
    values = jax.random.normal(jax.random.key(0), (40, 300))
    largest = jnp.abs(values).max(axis=1)
    np.testing.assert_array_equal(
        jnp.abs(decode(encode(values, signed=True, seed=0))).max(axis=1), largest
    )


def test_a_second_moment_is_never_rounded_to_zero():
    values = jnp.array([[1.0, 1e-20, 1e-30, 0.0]])
    got = np.asarray(decode(encode(values, signed=False, seed=0)))[0]
    assert (got[:3] > 0).all()
    assert got[3] == 0
    assert got[0] == 1


def test_zeros_stay_zeros():
    for signed in (True, False):
        blocks = encode(jnp.zeros((3, 70)), signed=signed, seed=0)
        np.testing.assert_array_equal(decode(blocks), 0)


@pytest.mark.parametrize(
    ("shape", "axis", "count"),
    [
        ((3, 256, 640), 2, 4),  # of 160, the largest divisor that is no larger than 256
        ((3, 576, 1536), 2, 6),
        ((2, 4096, 8), 1, 16),  # an adapter's A
        ((2, 8, 4096), 2, 16),  # and B
        ((5000,), 0, 20),
        ((4, 1009), 1, 4),  # a prime: padded
        ((64, 20), 0, 1),
    ],
)
def test_blocks_are_along_an_axis_that_is_long_enough(shape, axis, count):
    assert blocks_of(shape) == (axis, count)
    values = jax.random.normal(jax.random.key(1), shape)
    blocks = encode(values, signed=True, seed=0)
    assert blocks.codes.shape == shape
    assert blocks.scales.shape == (*shape[:axis], count, *shape[axis + 1 :])
    np.testing.assert_allclose(decode(blocks), values, atol=0.0141 * float(jnp.abs(values).max()))


# ------------------------------------------------------------------ a regression


def regression(config: OptimizerConfig, steps: int = 150) -> tuple[np.ndarray, Tree, float]:
    """Trains two layers on a teacher's outputs; returns the parameters, the state, and the last loss."""
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (256, 64))
    target = jnp.tanh(x @ jax.random.normal(keys[1], (64, 256)) / 8) @ (
        jax.random.normal(keys[2], (256, 32)) / 16
    )
    params = {
        "first": jax.random.normal(keys[3], (64, 256)) / 8,
        "second": jax.random.normal(keys[4], (256, 32)) / 16,
        "bias": jnp.zeros(32),
    }
    optimizer = make_optimizer(config, steps)

    def loss(params: Tree) -> jax.Array:
        made = jnp.tanh(x @ params["first"]) @ params["second"] + params["bias"]
        return jnp.mean((made - target) ** 2)

    @jax.jit
    def step(params: Tree, state: Tree) -> tuple[Tree, Tree, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state = optimizer.init(params)
    value = jnp.inf
    for _ in range(steps):
        params, state, value = step(params, state)
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])
    return flat, state, float(value)


def size(tree: Tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("settings", "moments", "most"),
    [
        ({"name": "adamw", "learning_rate": 3e-3}, 2, 0.03),
        # A direction that gradients hardly have counts as much as any other here, and noise is in all.
        ({"name": "muon", "learning_rate": 3e-3}, 1, 0.06),
        ({"name": "lion", "learning_rate": 3e-4}, 1, 0.06),
    ],
)
def test_narrow_moments_train_as_wide_ones_do(settings, moments, most):
    wide, wide_state, wide_loss = regression(OptimizerConfig(**settings))
    parameters = 4 * (64 * 256 + 256 * 32)
    for dtype, share, part in (("int8", 4, 1), ("bfloat16", 2, 0.5)):
        narrow, state, loss = regression(OptimizerConfig(**settings, state_dtype=dtype))
        assert size(wide_state) == pytest.approx(moments * parameters, rel=0.02)
        assert size(state) == pytest.approx(moments * parameters / share, rel=0.06)
        assert np.linalg.norm(narrow - wide) / np.linalg.norm(wide) < part * most
        assert loss == pytest.approx(wide_loss, rel=0.25)


def test_small_arrays_stay_float32():
    optimizer = make_optimizer(OptimizerConfig(state_dtype="int8"), 10)
    state = optimizer.init({"w": jnp.ones((64, 64)), "norm": jnp.ones(64)})
    adam = next(part for part in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(part))
    assert isinstance(adam.mu["w"], Blocks)
    assert adam.mu["w"].codes.dtype == jnp.int8
    assert adam.nu["w"].codes.dtype == jnp.uint8
    assert adam.mu["norm"].dtype == adam.nu["norm"].dtype == jnp.float32


def is_adam(part: object) -> bool:
    return isinstance(part, optax.ScaleByAdamState)


# ------------------------------------------------------------------ the host's memory


def test_offloaded_moments_wait_in_the_hosts_memory_and_compute_the_same():
    settings = {"learning_rate": 3e-3, "ema_decay": 0.9}
    here, _, _ = regression(OptimizerConfig(**settings), steps=10)
    there, state, _ = regression(OptimizerConfig(**settings, offload=True), steps=10)
    np.testing.assert_array_equal(here, there)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state) if leaf.size >= 4096}
    assert kinds == {"pinned_host"}


def test_offload_is_refused_where_no_host_memory_can_be_addressed(monkeypatch):
    class Memory:
        kind = "device"

    class Device:
        device_kind, platform = "toy", "toy"

        def addressable_memories(self) -> list[Memory]:
            return [Memory()]

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    with pytest.raises(ConfigError, match="addresses only device, not pinned_host"):
        make_optimizer(OptimizerConfig(offload=True), 10)


# ------------------------------------------------------------------ meshes


ON_A_MESH = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import NamedSharding, PartitionSpec as P
from gymllm_trainers.mesh import init_like
from gymllm_trainers.models.sharding import make_mesh
from gymllm_trainers.optimizer import OptimizerConfig, make_optimizer

mesh = make_mesh(fsdp=4, tensor=2)
places = {"up": P(None, "fsdp", "tensor"), "embedding": P("tensor", "fsdp"), "norm": P()}
rng = np.random.default_rng(0)
values = {"up": (2, 64, 512), "embedding": (128, 64), "norm": (64,)}
values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in values.items()}
given = [{n: rng.standard_normal(v.shape).astype(np.float32) for n, v in values.items()} for _ in range(3)]
for settings in (
    {"ema_decay": 0.5},
    {"state_dtype": "int8"},
    {"name": "muon"},
    {"offload": True},
    {"name": "adafactor", "kwargs": {"min_dim_size_to_factor": 32}},
):
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, **settings), 10)
    results = []
    for used in (None, mesh):
        lie = {name: NamedSharding(mesh, places[name]) if used else None for name in values}
        params = {name: jax.device_put(value, lie[name]) for name, value in values.items()}
        state = init_like(optimizer.init, params, used)
        # As a step that is compiled ahead is: what goes in and out lies where the state does.
        lies = jax.tree.map(lambda leaf: leaf.sharding, state) if used else None
        step = jax.jit(optimizer.update, out_shardings=(None, lies))
        for gradient in given:
            updates, state = step(gradient, state, params)
            params = optax.apply_updates(params, updates)
        for leaf in jax.tree.leaves(state):
            if "offload" in settings and leaf.size >= 4096:
                assert leaf.sharding.memory_kind == "pinned_host"
            if used and leaf.shape in [value.shape for value in values.values()] and leaf.size >= 4096:
                assert leaf.addressable_shards[0].data.size * 8 == leaf.size, (settings, leaf.sharding)
        results.append(params)
    for name in values:
        # A sum in another order may put a moment into the cell beside.
        atol = 1e-3 if "state_dtype" in settings else 1e-5
        np.testing.assert_allclose(results[0][name], results[1][name], atol=atol)
print("same")
"""


@pytest.mark.slow
def test_states_lie_as_their_parameters_do_and_compute_the_same_there():
    environment = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run(
        [sys.executable, "-c", ON_A_MESH],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip() == "same", done.stderr[-2000:]
