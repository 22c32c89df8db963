"""Optimizers: optax's own where they are optax's, and NumPy's reckoning where they are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

from gymllm.errors import ConfigError, UnknownNameError
from gymllm_trainers.models import Decoder
from gymllm_trainers.optimizer import (
    OptimizerConfig,
    decayed,
    learning_rate,
    make_optimizer,
    muon_axes,
)
from gymllm_trainers.optimizer_state import mean_parameters

Tree = Any
MakeDecoder = Callable[..., Decoder]


def parameters(decoder: Decoder) -> Tree:
    return nnx.split(decoder, nnx.Param, ...)[1]


def gradients(like: Tree, count: int) -> list[Tree]:
    leaves, structure = jax.tree.flatten(like)
    rng = np.random.default_rng(0)
    return [
        jax.tree.unflatten(
            structure,
            [jnp.asarray(rng.standard_normal(leaf.shape) * 0.1, jnp.float32) for leaf in leaves],
        )
        for _ in range(count)
    ]


def train(optimizer: optax.GradientTransformation, params: Tree, given: list[Tree]) -> Tree:
    state = optimizer.init(params)
    for gradient in given:
        updates, state = jax.jit(optimizer.update)(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_same(left: Tree, right: Tree) -> None:
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------------ against optax


@pytest.mark.parametrize(("warmup", "total"), [(0, 10), (3, 10), (0, None)])
def test_defaults_are_clipped_adamw_with_a_linear_fall(make_decoder: MakeDecoder, warmup, total):
    params = parameters(make_decoder(0))
    ours = make_optimizer(OptimizerConfig(warmup_steps=warmup), total)
    peak, falling = 1.5e-4, max((total or 0) - warmup, 1)
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(peak / (warmup + 1), peak, warmup),
            optax.linear_schedule(peak, peak * 0.1 if total else peak, falling),
        ],
        [warmup],
    )
    theirs = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.99, weight_decay=0.0),
    )
    given = gradients(params, 4)
    assert_same(train(ours, params, given), train(theirs, params, given))


@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        ({"name": "adafactor"}, optax.adafactor(1e-3)),
        ({"name": "lion"}, optax.lion(1e-3, b1=0.9, b2=0.99, weight_decay=0)),
        ({"name": "sgd", "kwargs": {"momentum": 0.9}}, optax.sgd(1e-3, momentum=0.9)),
        ({"name": "lamb", "b2": 0.999, "eps": 1e-6}, optax.lamb(1e-3)),
        ({"name": "ademamix"}, optax.contrib.ademamix(1e-3, b2=0.99)),
        ({"name": "adamw", "eps": 1e-3}, optax.adamw(1e-3, b2=0.99, eps=1e-3, weight_decay=0)),
    ],
)
def test_other_names_are_optaxs(settings, reference):
    params = {"w": jnp.linspace(-1, 1, 12).reshape(3, 4), "norm": jnp.ones(4)}
    config = OptimizerConfig(learning_rate=1e-3, schedule="constant", max_grad_norm=0, **settings)
    given = gradients(params, 3)
    for a, b in zip(
        jax.tree.leaves(train(make_optimizer(config, None), params, given)),
        jax.tree.leaves(train(reference, params, given)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)


def test_norms_and_biases_are_not_decayed(make_decoder: MakeDecoder):
    params = parameters(make_decoder(0, qkv_bias=True))
    params = jax.tree.map(lambda leaf: jnp.ones_like(leaf), params)
    config = OptimizerConfig(weight_decay=0.1, learning_rate=0.5, schedule="constant")
    zero = jax.tree.map(jnp.zeros_like, params)
    after = train(make_optimizer(config, None), params, [zero])
    layers = after["layers"]
    for name in ("query", "down"):
        np.testing.assert_allclose(layers[name][...], 0.95, rtol=1e-6)
    np.testing.assert_allclose(after["embedding"][...], 0.95, rtol=1e-6)
    for name in ("attention_norm", "query_norm", "query_bias"):
        np.testing.assert_array_equal(layers[name][...], 1)
    np.testing.assert_array_equal(after["norm"][...], 1)
    assert decayed({"w": jnp.ones((2, 2)), "b": jnp.ones(2)}) == {"w": True, "b": False}


# ------------------------------------------------------------------ Muon


def orthogonalized(matrix: np.ndarray) -> np.ndarray:
    """Newton-Schulz by Keller Jordan (2024): five steps of its quintic."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / (np.linalg.norm(wide) + 1e-8)
    for _ in range(5):
        square = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * square + 2.0315 * square @ square) @ wide
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


def test_muon_takes_each_layers_matrices_and_adamw_the_rest(make_decoder: MakeDecoder):
    params = parameters(make_decoder(0))
    config = OptimizerConfig(name="muon", learning_rate=1e-2, schedule="constant", max_grad_norm=0)
    (gradient,) = gradients(params, 1)
    after = train(make_optimizer(config, None), params, [gradient])
    for name in ("query", "down"):
        before, made = params["layers"][name][...], after["layers"][name][...]
        for layer, matrix in enumerate(np.asarray(gradient["layers"][name][...], np.float64)):
            # The first step's momentum is in the gradient's direction, whatever its size.
            size = 0.2 * max(matrix.shape) ** 0.5
            expected = before[layer] - 1e-2 * size * orthogonalized(matrix)
            np.testing.assert_allclose(made[layer], expected, atol=2e-6)
    adamw = train(optax.adamw(1e-2, b2=0.99, weight_decay=0, nesterov=True), params, [gradient])
    for name in ("attention_norm", "query_norm"):
        assert_same(after["layers"][name], adamw["layers"][name])
    assert_same(after["embedding"], adamw["embedding"])


def test_muon_leaves_what_is_no_matrix_to_adamw():
    shapes = {
        "query_a": (2, 8, 4),
        "experts_up": (2, 3, 8, 4),
        "query_bias": (2, 8),
        "mlp_norm": (2, 8),
        "embedding": (9, 8),
        "head": (8, 9),
        "score": (8, 1),
    }
    tree = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    axes = muon_axes(tree)
    assert {name for name in shapes if axes[name] is not None} == {"query_a", "experts_up"}
    assert axes["experts_up"] == optax.contrib.MuonDimensionNumbers(2, 3)


# ------------------------------------------------------------------ schedules


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0.5, 1, 0.9, 0.55, 0.1, 0.1]),
        ("cosine", [0.5, 1, 1 - 0.9 * (1 - np.cos(np.pi / 9)) / 2, None, 0.1, 0.1]),
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("wsd", [0.5, 1, 1, 1, 0.1, 0.1]),
    ],
)
def test_schedules_rise_and_fall(schedule, expected):
    config = OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup_steps=1)
    rate = learning_rate(config, 10)
    for step, value in zip((0, 1, 2, 5.5, 10, 20), expected, strict=True):
        if value is not None:
            assert rate(step) == pytest.approx(value, rel=1e-5), step


def test_wsd_falls_in_the_last_fifth():
    config = OptimizerConfig(learning_rate=1.0, schedule="wsd", final_rate=0)
    rate = learning_rate(config, 100)
    assert [float(rate(step)) for step in (0, 80, 90, 100)] == pytest.approx([1, 1, 0.5, 0])
    assert float(learning_rate(config, None)(1000)) == 1


# ------------------------------------------------------------------ the mean


@pytest.mark.parametrize("offload", [False, True])
def test_mean_of_the_parameters(offload):
    params = {"w": jnp.linspace(0, 1, 5000), "b": jnp.ones(3, jnp.bfloat16)}
    config = OptimizerConfig(
        name="sgd",
        learning_rate=0.5,
        schedule="constant",
        max_grad_norm=0,
        ema_decay=0.75,
        offload=offload,
    )
    optimizer = make_optimizer(config, None)
    state = optimizer.init(params)
    mean = {name: np.asarray(leaf, np.float32) for name, leaf in params.items()}
    start = params
    for gradient in gradients(params, 3):
        updates, state = jax.jit(optimizer.update)(gradient, state, params)
        params = optax.apply_updates(params, updates)
        mean = {name: 0.75 * mean[name] + 0.25 * np.float32(params[name]) for name in mean}
    held = mean_parameters(state, params)
    np.testing.assert_allclose(held["w"], mean["w"], rtol=1e-6)
    assert held["b"].dtype == jnp.bfloat16
    assert held["w"].sharding == params["w"].sharding
    assert not np.array_equal(start["w"], held["w"])
    without = make_optimizer(replace(config, ema_decay=0.0), None)
    assert mean_parameters(without.init(params), params) is None


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": 0}, "learning_rate must be > 0, got 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be > 0, got nan"),
        ({"b2": 1.0}, "b2 must be from 0 to below 1, got 1.0"),
        ({"ema_decay": -0.1}, "ema_decay must be from 0"),
        ({"final_rate": 2}, "final_rate must be from 0 to 1, got 2"),
        ({"max_grad_norm": -1}, "max_grad_norm must be >= 0, got -1"),
        ({"warmup_steps": -1}, "warmup_steps must be >= 0"),
        ({"eps": 0.0}, "eps must be > 0"),
        ({"name": "adafactor", "state_dtype": "int8"}, "state_dtype int8 is for optimizers whose"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**settings)


def test_unknown_name_says_what_was_meant():
    with pytest.raises(UnknownNameError, match=r"Did you mean .*adamw"):
        OptimizerConfig(name="adanw")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "sgd", "weight_decay": 0.1}, "sgd has no such argument"),
        ({"name": "adafactor", "b1": 0.5}, "optimizer.b1 is 0.5, and adafactor has no such"),
        ({"name": "sgd", "kwargs": {"momentun": 0.9}}, "unexpected keyword argument 'momentun'"),
        ({"name": "lbfgs"}, "lbfgs can't be used.*from gradients and parameters alone"),
    ],
)
def test_what_optax_would_not_take_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_optimizer(OptimizerConfig(**settings), 10)
