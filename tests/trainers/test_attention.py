"""Attention of packed rows: every implementation that runs here against a dense one in float64."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from gymllm.errors import ConfigError
from gymllm_trainers.engine.kernels import load, unavailable
from gymllm_trainers.models.attention import (
    Implementation,
    ends_of_segments,
    packed_attention,
)
from gymllm_trainers.models.attention_reference import blocked_attention


def dense(
    xp: Any,
    query: Any,
    key: Any,
    value: Any,
    ends: npt.NDArray[np.int32],
    *,
    positions_BT: npt.NDArray[np.int32] | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Any:
    """Attention in a few lines of NumPy, or the same lines of `jax.numpy`."""
    group = query.shape[2] // key.shape[2]
    scores = scale * xp.einsum("bqnh,bknh->bnqk", query, xp.repeat(key, group, axis=2))
    if softcap is not None:
        scores = softcap * xp.tanh(scores / softcap)
    order = np.arange(query.shape[1])
    visible = (order <= order[:, None]) & (order[:, None] < ends[:, None, :])
    positions = order[None] if positions_BT is None else positions_BT
    visible = visible & (positions[:, :, None] - positions[:, None, :] < (window or 10**9))
    visible = visible | (order == order[:, None])  # padding has something to attend to
    shares = xp.where(visible[:, None], xp.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    shares = shares / shares.sum(-1, keepdims=True)
    mixed = xp.einsum("bnqk,bknh->bqnh", shares, xp.repeat(value, group, axis=2))
    return xp.where((ends > 0)[:, :, None, None], mixed, 0.0)


class Case(NamedTuple):
    """What is attended to, and how."""

    lengths: tuple[tuple[int, ...], ...]
    """Of the trees of each row."""
    tokens: int
    heads: int = 4
    groups: int = 2
    size: int = 8
    window: int | None = None
    softcap: float | None = None
    branch: float = 0.0
    """How likely it is that a token does not follow the one before it."""

    @property
    def layout(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Ends and positions: trees that grow token by token, each token below one of the path to the
        last."""
        rng = np.random.default_rng(self.tokens)
        ends, positions = np.zeros((2, len(self.lengths), self.tokens), np.int32)
        for row, lengths in enumerate(self.lengths):
            start = 0
            for length in lengths:
                path: list[int] = []
                for token in range(start, start + length):
                    if path and rng.random() < self.branch:
                        path = path[: rng.integers(1, len(path) + 1)]
                    path.append(token)
                    positions[row, token] = len(path) - 1
                    ends[row, path] = token + 1
                start += length
        return ends, positions

    @property
    def ends(self) -> npt.NDArray[np.int32]:
        return self.layout[0]

    def arrays(self, dtype: Any = np.float32) -> list[jax.Array]:
        """Queries, keys, values and a weight for each result; scores differ by much."""
        rng = np.random.default_rng(self.tokens)
        counts = (self.heads, self.groups, self.groups, self.heads)
        return [
            jnp.asarray(rng.normal(size=(len(self.lengths), self.tokens, n, self.size)), dtype)
            for n in counts
        ]

    def options(self) -> dict[str, Any]:
        return {
            "positions_BT": self.layout[1],
            "scale": 0.7,
            "window": self.window,
            "softcap": self.softcap,
        }


SEGMENTS = Case(((37,), (5, 1, 20), ()), 37)
WINDOW = Case(((37,), (9, 21)), 37, heads=3, groups=3, window=5)
WINDOW_AND_CAP = Case(((30,), (9, 21)), 33, heads=3, groups=1, window=7, softcap=1.5)
LONG = Case(((401,), (150, 180)), 401, heads=2, groups=1, window=150, softcap=5.0)
TREES = Case(((37,), (5, 1, 20), ()), 37, branch=0.3)
TREES_WINDOW = Case(((37,), (9, 21)), 37, heads=3, groups=3, window=5, branch=0.2)
TREES_WINDOW_AND_CAP = TREES_WINDOW._replace(groups=1, window=7, softcap=1.5)
TREES_LONG = LONG._replace(branch=0.02)
# Heads of whole vectors; more tokens than a block has, and none that it divides.
NATIVE = Case(((150,), (70, 1, 60), ()), 150, size=16, branch=0.05)
NATIVE_WINDOW = NATIVE._replace(heads=9, groups=3, size=80, window=20)
NATIVE_SEQUENCES = Case(((200,), (64, 130)), 200, heads=2, groups=1, size=64)

Attend = Callable[..., jax.Array]


def by_name(name: Implementation) -> Attend:
    def attend(*arrays: jax.Array, **options: Any) -> jax.Array:
        if name == "native" and load() is None:
            pytest.skip(str(unavailable()))
        return packed_attention(*arrays[:4], implementation=name, **options)

    return attend


def splash_without_branches(*arrays: jax.Array, **options: Any) -> jax.Array:
    return packed_attention(*arrays[:4], implementation="splash", branched=False, **options)


def in_blocks(*arrays: jax.Array, **options: Any) -> jax.Array:
    """The reference with so small blocks that there are many, less what it says of padding."""
    mixed = blocked_attention(*arrays, block=8, **options)
    return jnp.where((arrays[3] > 0)[:, :, None, None], mixed, 0)


IMPLEMENTATIONS: dict[str, Attend] = {
    "auto": by_name("auto"),
    "reference": by_name("reference"),
    "blocks": in_blocks,
    "native": by_name("native"),
    "xla": by_name("xla"),
    "splash": splash_without_branches,
    "splash, branched": by_name("splash"),
}


@functools.cache
def expected(case: Case) -> tuple[npt.NDArray[np.float64], list[npt.NDArray[np.float64]]]:
    """The dense lines' values, by NumPy, and their gradients, by JAX; in float64."""
    query, key, value, weight = (np.asarray(x, np.float64) for x in case.arrays())
    ends, options = case.ends, case.options()
    with jax.enable_x64():

        @jax.jit
        def gradients(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            def total(*arrays: jax.Array) -> jax.Array:
                return (dense(jnp, *arrays, ends, **options) * weight).sum()

            return jax.grad(total, (0, 1, 2))(*arrays)

        found = [np.asarray(x) for x in gradients(*map(jnp.asarray, (query, key, value)))]
    return dense(np, query, key, value, ends, **options), found


def value_and_grad(attend: Attend, case: Case, **options: Any) -> Callable[..., Any]:
    """A program: queries, keys, values and a window to the result and its weighted sum's gradients."""
    *_, weight = case.arrays()
    ends = jnp.asarray(case.ends)

    @jax.jit
    def program(*arrays: jax.Array, window: jax.Array | None = None) -> tuple[Any, Any]:
        def total(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
            how = case.options() if window is None else case.options() | {"window": window}
            mixed = attend(*arrays, ends, **how, **options)
            return (mixed * weight).sum(), mixed

        gradients, mixed = jax.grad(total, (0, 1, 2), has_aux=True)(*arrays)
        return mixed, gradients

    return program


def check(found: tuple[Any, Any], case: Case) -> None:
    mixed, gradients = expected(case)
    np.testing.assert_allclose(found[0], mixed, atol=1e-5)
    for part, other in zip(found[1], gradients, strict=True):
        np.testing.assert_allclose(part, other, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("blocks", SEGMENTS),
        ("blocks", WINDOW),
        ("blocks", WINDOW_AND_CAP),
        ("reference", LONG),
        ("auto", WINDOW_AND_CAP),
        ("auto", Case(((1,),), 1, window=1)),
        ("native", NATIVE),
        ("native", NATIVE_WINDOW),
        ("native", NATIVE_SEQUENCES),
        ("native", Case(((1,), ()), 1, size=16)),
        ("xla", SEGMENTS),
        ("xla", WINDOW),
        ("splash", SEGMENTS),
        ("splash", WINDOW),
        ("splash", WINDOW_AND_CAP),
        pytest.param("splash", LONG, marks=pytest.mark.slow),
        ("blocks", TREES),
        ("blocks", TREES_WINDOW),
        ("blocks", TREES_WINDOW_AND_CAP),
        ("reference", TREES_LONG),
        ("xla", TREES),
        ("xla", TREES_WINDOW),
        ("splash, branched", TREES),
        ("splash, branched", TREES_WINDOW_AND_CAP),
        pytest.param("splash, branched", TREES_LONG, marks=pytest.mark.slow),
    ],
)
def test_agrees_with_a_dense_reference(name: str, case: Case) -> None:
    query, key, value, _ = case.arrays()
    check(value_and_grad(IMPLEMENTATIONS[name], case)(query, key, value), case)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("blocks", TREES_WINDOW),
        ("xla", TREES_WINDOW),
        ("native", TREES_WINDOW._replace(size=32)),
        ("splash", WINDOW),
        ("splash, branched", TREES_WINDOW),
    ],
)
def test_a_window_may_be_traced(name: str, case: Case) -> None:
    """As where layers with and without one are scanned."""
    options = {"local_window": 5} if name == "splash" else {}
    query, key, value, _ = case.arrays()
    program = value_and_grad(IMPLEMENTATIONS[name], case, **options)
    for size in (5, 2**31 - 1):
        found = program(query, key, value, window=jnp.int32(size))
        check(found, case._replace(window=5 if size == 5 else None))


def test_by_hand() -> None:
    """Two keys whose scores differ by log 3: the second query takes a quarter and three quarters."""
    query = jnp.ones((1, 3, 1, 1))
    key = jnp.array([0.0, np.log(3), 7.0]).reshape(1, 3, 1, 1)
    value = jnp.array([4.0, 8.0, 100.0]).reshape(1, 3, 1, 1)
    attend = jax.jit(functools.partial(packed_attention, scale=1.0))
    mixed = attend(query, key, value, jnp.array([[2, 2, 3]]))
    np.testing.assert_allclose(mixed.ravel(), [4, 7, 100], rtol=1e-6)


def test_a_fork_by_hand() -> None:
    """The third token is below the first, as the second is: they don't see each other."""
    query = jnp.ones((1, 3, 1, 1))
    key = jnp.array([0.0, 50.0, np.log(3)]).reshape(1, 3, 1, 1)
    value = jnp.array([4.0, 100.0, 8.0]).reshape(1, 3, 1, 1)
    attend = jax.jit(functools.partial(packed_attention, scale=1.0))
    mixed = attend(query, key, value, jnp.array([[3, 2, 3]]))
    np.testing.assert_allclose(mixed.ravel(), [4, 100, 7], rtol=1e-6)


def test_ends_of_segments_by_hand() -> None:
    segments = jnp.array([[3, 3, 1, 2, 2, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    expected = [[2, 2, 3, 5, 5, 0], [0] * 6, [6] * 6]
    np.testing.assert_array_equal(ends_of_segments(segments), expected)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("blocks", TREES),
        ("native", NATIVE),
        ("xla", TREES),
        ("splash", SEGMENTS),
        ("splash, branched", TREES),
    ],
)
def test_bfloat16(name: str, case: Case) -> None:
    query, key, value, _ = case.arrays(jnp.bfloat16)
    mixed, gradients = value_and_grad(IMPLEMENTATIONS[name], case)(query, key, value)
    assert {x.dtype for x in (mixed, *gradients)} == {jnp.dtype(jnp.bfloat16)}
    wide, others = expected(case)
    # bfloat16 keeps 8 bits, and the arguments were rounded to it as well.
    np.testing.assert_allclose(np.asarray(mixed, np.float64), wide, atol=6e-2)
    for found, other in zip(gradients, others, strict=True):
        error = np.asarray(found, np.float64) - other
        assert np.sqrt(np.mean(error**2)) < 0.02 * np.sqrt(np.mean(other**2))


@pytest.mark.parametrize("name", ["blocks", "native"])
def test_ends_need_not_be_a_tree(name: str) -> None:
    case = Case(((40,),), 40, size=16)
    query, key, value, _ = case.arrays()
    ends = np.arange(1, 41) + np.random.default_rng(0).integers(0, 20, size=(1, 40))
    ends = np.minimum(ends, 40).astype(np.int32)
    attend = jax.jit(functools.partial(IMPLEMENTATIONS[name], scale=0.7))
    mixed = attend(query, key, value, jnp.asarray(ends))
    wide = [np.asarray(x, np.float64) for x in (query, key, value)]
    np.testing.assert_allclose(mixed, dense(np, *wide, ends, scale=0.7), atol=1e-5)


@pytest.mark.parametrize("name", ["reference", "native", "xla"])
def test_a_packed_sequence_is_what_it_is_alone(name: Implementation) -> None:
    case = Case(((11, 13, 6),), 37, size=16)
    query, key, value, _ = case.arrays()
    attend = jax.jit(functools.partial(packed_attention, scale=0.7, implementation=name))
    together = attend(query, key, value, jnp.asarray(case.ends))
    cut = (x[:, 11:24] for x in (query, key, value))
    alone = attend(*cut, jnp.full((1, 13), 13))
    np.testing.assert_allclose(together[:, 11:24], alone, atol=1e-6)


@pytest.mark.parametrize(
    "attend", [functools.partial(blocked_attention, block=8), by_name("native")]
)
def test_blocks_out_of_reach_are_not_looked_at(attend: Attend) -> None:
    """What is computed from them would not be a number."""
    # Queries of a block are all looked at together: the last sixteen have a block of their own.
    query, key, value, _ = Case(((64,),), 64, size=16).arrays()
    query, key, value = (jnp.pad(x, ((0, 0), (16, 0), (0, 0), (0, 0))) for x in (query, key, value))
    poisoned = [x.at[:, 32:48].set(jnp.nan) for x in (key, value)]

    @jax.jit
    @jax.value_and_grad
    def total(query: jax.Array, ends: jax.Array, window: jax.Array) -> jax.Array:
        mixed = attend(query, *poisoned, ends, scale=0.7, window=window)
        return mixed[:, 64:].sum()

    # A sequence of 16 tokens; a trunk of 16 with branches of 16, 16 and 16: the last one skips what is in
    # between.
    tree = jnp.repeat(jnp.array([[16, 80, 48, 64, 80]]), 16, axis=1)
    whole = jnp.repeat(jnp.array([[16, 80, 80, 80, 80]]), 16, axis=1)
    for ends, window in ((tree, 64), (whole, 9)):
        result, gradient = total(query, ends, jnp.int32(window))
        assert jnp.isfinite(result)
        assert jnp.isfinite(gradient[:, 64:]).all()
    # All of one sequence, they are looked at.
    assert jnp.isnan(total(query, whole, jnp.int32(64))[0])


@pytest.mark.parametrize("size", [8, 16])
def test_memory_is_linear_in_tokens(size: int) -> None:
    def held(tokens: int) -> int:
        x = jax.ShapeDtypeStruct((1, tokens, 2, size), jnp.float32)
        ends = jax.ShapeDtypeStruct((1, tokens), jnp.int32)

        def total(query: jax.Array, key: jax.Array, value: jax.Array, ends: jax.Array) -> jax.Array:
            return packed_attention(query, key, value, ends, scale=1.0).sum()

        program = jax.jit(jax.grad(total, (0, 1, 2))).lower(x, x, x, ends).compile()
        analysis = program.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    small, large = held(3072), held(12288)
    assert large < 5 * small
    assert large < 12288**2  # less than a quarter of one matrix of scores


@pytest.mark.parametrize("attend", [in_blocks, by_name("native")])
def test_works_under_vmap_and_remat(attend: Attend) -> None:
    case = TREES_WINDOW._replace(size=16)
    query, key, value, weight = case.arrays()
    ends, positions = map(jnp.asarray, case.layout)

    @jax.jit
    @jax.vmap
    def gradients(
        weight: jax.Array, ends: jax.Array, positions: jax.Array, *rows: jax.Array
    ) -> tuple[jax.Array, ...]:
        @jax.checkpoint
        def total(*arrays: jax.Array) -> jax.Array:
            options = case.options() | {"positions_BT": positions}
            return (attend(*arrays, ends, **options) * weight).sum()

        return jax.grad(total, (0, 1, 2))(*rows)

    # Each row as a batch of its own, so that loops of different lengths are batched.
    rows = [x[:, None] for x in (weight, ends, positions, query, key, value)]
    for found, other in zip(gradients(*rows), expected(case)[1], strict=True):
        np.testing.assert_allclose(found[:, 0], other, atol=1e-4)


# ---------------------------------------------------------------------- many devices

SHARDED = """
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    from gymllm_trainers.engine.kernels import load
    from gymllm_trainers.models.attention import packed_attention

    native = ["native"] if load() else []
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(4, 24, n, 16)), jnp.float32) for n in (4, 2, 2))
    # A trunk of 6 tokens with two branches, a sequence, and padding; a different one in each row.
    ends = [[20 + row] * 6 + [10 + row] * (4 + row) + [20 + row] * 10 + [0] * (4 - row)
            for row in range(4)]
    depths = [[*range(10 + row), *range(6, 16), *[0] * (4 - row)] for row in range(4)]
    ends, depths = jnp.asarray(ends), jnp.asarray(depths)

    def gradients(name, window):
        def total(query, key, value):
            mixed = packed_attention(query, key, value, ends, positions_BT=depths, scale=0.5,
                                     window=window,
                                     local_window=5, implementation=name)
            return jnp.sin(mixed).sum()
        return jax.jit(jax.grad(total, (0, 1, 2)))

    for shape in ((2, 2, 2), (2, 1, 4), (8, 1, 1)):
        mesh = jax.make_mesh(shape, ("data", "fsdp", "tensor"), (jax.sharding.AxisType.Auto,) * 3)
        for name in ["reference", "splash", *native] if shape == (2, 2, 2) else ["xla", *native]:
            expected = gradients(name, 5)(query, key, value)
            with jax.set_mesh(mesh):
                # 4 rows can't be spread over 8 devices, nor 2 heads over 4: then each device has all.
                rows = ("data", "fsdp") if shape[0] * shape[1] <= 4 else None
                heads = "tensor" if shape[2] <= 2 else None
                place = NamedSharding(mesh, P(rows, None, heads))
                spread = [jax.device_put(x, place) for x in (query, key, value)]
                found = gradients(name, 5)(*spread)
            for a, b in zip(found, expected, strict=True):
                np.testing.assert_allclose(a, b, atol=1e-6)
            assert found[0].sharding.is_equivalent_to(place, 4), (shape, found[0].sharding)
    print("equal")
"""


def test_a_mesh_changes_nothing() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(SHARDED)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "PATH": os.environ["PATH"],
        },
    )
    assert result.stdout == "equal\n", result.stderr


# ---------------------------------------------------------------------- what can't be done


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "cudnn"}, "cuDNN needs an NVIDIA GPU"),
        ({"implementation": "xla", "softcap": 2.0}, "has no soft cap, and softcap is 2.0"),
        (
            {"implementation": "splash", "window": jnp.int32(4), "branched": False},
            "local_window where window is",
        ),
        ({"implementation": "native", "softcap": 2.0}, "has no soft cap, and softcap is 2.0"),
        ({"implementation": "native"}, r"size must be a multiple of \d+, got 7|No C compiler"),
        ({"implementation": "flash"}, "Unknown attention implementation 'flash'"),
        ({"window": 0}, "window must be >= 1 token, got 0"),
        ({"local_window": -1}, "local_window must be >= 1 token, got -1"),
        ({"softcap": 0.0}, "softcap must be > 0, got 0.0"),
    ],
)
def test_what_cannot_be_done_is_refused(options: dict[str, Any], message: str) -> None:
    query, key, value, _ = Case(((5,),), 5, size=7).arrays()
    with pytest.raises(ConfigError, match=message):
        packed_attention(query, key, value, jnp.full((1, 5), 5), scale=1.0, **options)


def test_heads_that_do_not_divide_are_refused() -> None:
    query, key, value, _ = Case(((5,),), 5, heads=3, groups=2).arrays()
    with pytest.raises(ConfigError, match="multiple of key-value heads, got 3 and 2"):
        packed_attention(query, key, value, jnp.full((1, 5), 5), scale=1.0)
