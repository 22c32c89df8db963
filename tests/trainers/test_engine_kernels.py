"""The engine's kernels for CPUs: products against NumPy, the same bits in any batch, how they are built."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from jax import Array

from gymllm.errors import ConfigError, EngineError
from gymllm_trainers.engine import kernels
from gymllm_trainers.engine.kernels.calls import open_library
from gymllm_trainers.engine.paged_attention import PagedCache

needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None and shutil.which("gcc") is None, reason="needs a C compiler"
)
Floats = npt.NDArray[np.float32]
TYPES = [
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
]


@pytest.fixture(scope="module")
def native() -> kernels.Kernels:
    """The kernels as the engine loads them."""
    loaded = kernels.load()
    if loaded is None:
        pytest.skip(str(kernels.unavailable()))
    return loaded


def draw(seed: int, *shape: int, dtype: str = "float32") -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32).astype(dtype)


def close(out: Array, x: Array, kernel: Array) -> None:
    """`out` is x @ kernel, in float32 or rounded to x's type."""
    wide = (np.asarray(part.astype(jnp.float32), np.float64) for part in (x, kernel))
    expected = np.matmul(*wide)
    rounded = 2**-8 if out.dtype == jnp.bfloat16 else 1e-6
    tolerance = {"rtol": rounded, "atol": 1e-5 * x.shape[1] ** 0.5}
    np.testing.assert_allclose(np.asarray(out.astype(jnp.float32)), expected, **tolerance)


@needs_compiler
@pytest.mark.parametrize("which", ["native", "plain"])
@pytest.mark.parametrize(("x_type", "kernel_type"), TYPES)
def test_products_equal_numpy(
    which: str, x_type: str, kernel_type: str, request: pytest.FixtureRequest
) -> None:
    loaded: kernels.Kernels = request.getfixturevalue(which)

    @jax.jit
    def products(x: Array, kernel: Array) -> tuple[Array, Array, Array]:
        tied = loaded.logits_tied(x, kernel[1].T)
        return loaded.linear(x, kernel, jnp.int32(1)), tied, loaded.logits(x, kernel[1])

    # Whole and broken panels; few rows, several tiles; more steps than a packed panel has; odd sums.
    for depth, columns, rows in ((64, 384, 2), (2100, 50, 3), (40, 149, 9), (33, 5, 37)):
        kernel = draw(1, 2, depth, columns, dtype=kernel_type)
        x = draw(2, rows, depth, dtype=x_type)
        out, tied, untied = products(x, kernel)
        assert out.dtype == x.dtype
        assert tied.dtype == untied.dtype == jnp.float32
        close(out, x, kernel[1])
        close(untied, x, kernel[1])
        assert np.array_equal(tied, untied)


@needs_compiler
@pytest.mark.parametrize("which", ["native", "plain"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("x_type", "kernel_type"), TYPES[:3])
def test_products_of_any_number_of_rows_and_columns(
    which: str, x_type: str, kernel_type: str, tied: bool, request: pytest.FixtureRequest
) -> None:
    """Panels of each width, whole and broken; each number of rows up to several tiles, one after another."""
    loaded: kernels.Kernels = request.getfixturevalue(which)
    columns = [16, 17, 47, 48, 64, 79, 96, 100, 128, 144, 160, 192, 200, 255, 256, 288, 300]
    # More steps than a packed panel has, for what is then added to sums in memory.
    for depth, widths in ((2, columns), (64, columns), (1100, [64, 128, 150, 160])):
        whole = np.asarray(draw(1, 40, depth, dtype=x_type).astype(jnp.float32))
        for width in widths:
            kernel = draw(width, 1, depth, width, dtype=kernel_type)
            x = jnp.asarray(whole).astype(x_type)
            exact = whole.astype(np.float64) @ np.asarray(kernel[0].astype(jnp.float32), np.float64)
            for rows in (
                range(1, 41) if depth == 64 and width % 50 == 0 else (1, 2, 3, 4, 5, 8, 9, 33)
            ):
                active = np.zeros(41, np.int32)
                active[0], active[1 : 1 + rows] = rows, np.arange(rows)
                if tied:
                    out = loaded.logits_tied(x, kernel[0].T, active)
                else:
                    out = loaded.logits(x, kernel[0], active)
                out = np.asarray(out)
                np.testing.assert_allclose(
                    out[:rows], exact[:rows], atol=2e-6 * depth**0.5 * 4, rtol=1e-5
                )
                assert not out[rows:].any()


@pytest.mark.parametrize(("x_type", "kernel_type"), TYPES)
def test_row_has_the_same_bits_in_any_batch(
    native: kernels.Kernels, x_type: str, kernel_type: str
) -> None:
    kernel = draw(0, 1, 576, 400, dtype=kernel_type)
    x = draw(1, 70, 576, dtype=x_type)
    whole = np.asarray(native.logits(x, kernel[0]))
    tied = np.asarray(native.logits_tied(x, kernel[0].T))
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 69):
        part = native.logits(x[70 - count :], kernel[0])
        assert np.array_equal(part, whole[70 - count :]), count
        part = native.logits_tied(x[70 - count :], kernel[0].T)
        assert np.array_equal(part, tied[70 - count :]), count


def test_threads_leave_each_others_columns_alone(native: kernels.Kernels) -> None:
    """A width that panels don't divide, and sums that go through memory: a race would show now and then."""
    x, embedding = draw(0, 2, 2048), draw(1, 1280, 2048)
    first = np.asarray(native.logits_tied(x, embedding))
    close(jnp.asarray(first), x, embedding.T)
    for _ in range(30):
        assert np.array_equal(native.logits_tied(x, embedding), first)


def test_rows_that_are_not_active_come_out_zero(native: kernels.Kernels) -> None:
    kernel, x = draw(0, 3, 96, 100), draw(1, 20, 96)
    # What stands in the others doesn't matter.
    active = np.array([17, 2, 5, 19, 11], np.int32)
    idle = np.setdiff1d(np.arange(20), active)
    rows = np.zeros(21, np.int32)
    for count in (0, 1, 5):
        rows[0], rows[1 : 1 + count] = count, active[:count]
        out = np.asarray(jax.jit(native.linear)(x.at[idle].set(jnp.nan), kernel, 2, rows))
        whole = np.asarray(native.linear(x, kernel, 2))
        assert np.array_equal(out[active[:count]], whole[active[:count]])
        assert not np.delete(out, active[:count], axis=0).any()


def test_layers_are_read_in_place(native: kernels.Kernels) -> None:
    kernel = draw(0, 8, 64, 512)

    def through(x: Array, kernel: Array) -> Array:
        def layer(x: Array, at: Array) -> tuple[Array, None]:
            return x + native.linear(x, kernel, at)[:, :64], None

        return jax.lax.scan(layer, x, jnp.arange(8))[0]

    compiled = jax.jit(through).lower(draw(1, 4, 64), kernel).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < kernel[0].nbytes
    expected = draw(1, 4, 64)
    for at in range(8):
        expected += jnp.dot(expected, kernel[at], precision="highest")[:, :64]
    np.testing.assert_allclose(compiled(draw(1, 4, 64), kernel), expected, rtol=1e-3)


@needs_compiler
def test_portable_attention_equals_native(native: kernels.Kernels, plain: kernels.Kernels) -> None:
    page_size, table = 4, np.arange(1, 41, dtype=np.int32)[None]
    for size, dtype in ((20, "float32"), (64, "bfloat16")):
        shape = 1, 41, 2, page_size, size
        key, value, query = draw(0, *shape), draw(1, *shape), draw(2, 1, 5, 6, size)
        cache = PagedCache(key.astype(dtype), value.astype(dtype))
        outs = [
            loaded.paged_attention(
                query, cache, 0, table, [150], [5], scale=0.3, window=100, softcap=2.0
            )
            for loaded in (native, plain)
        ]
        np.testing.assert_allclose(outs[0], outs[1], rtol=1e-5, atol=1e-5)


@needs_compiler
def test_portable_packed_attention_equals_native(
    native: kernels.Kernels, plain: kernels.Kernels
) -> None:
    ends = np.zeros((2, 70), np.int32)
    ends[0, :30], ends[0, 30:66], ends[1] = 30, np.arange(31, 67), 70
    ends[0, 30:40] = 66
    positions = np.tile(np.arange(70, dtype=np.int32), (2, 1))
    inputs = [draw(seed, 2, 70, heads, 48) for seed, heads in enumerate((6, 2, 2))]
    inputs += [jnp.asarray(ends), jnp.asarray(positions), jnp.int32(50)]
    found = []
    for each in (native, plain):
        outputs = each.packed_attention(*inputs, scale=0.3)
        cotangent = draw(9, 2, 70, 6, 48)
        parts = each.packed_attention_backward(tuple(inputs), outputs, cotangent, scale=0.3)
        found.append((*outputs, *parts))
    assert native.lanes % plain.lanes == 0
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_values_that_make_no_sense_are_refused(native: kernels.Kernels) -> None:
    kernel, x = draw(0, 3, 16, 16), draw(1, 2, 16)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such layer"):
        native.linear(x, kernel, 3).block_until_ready()
    with pytest.raises(jax.errors.JaxRuntimeError, match="an index that is no row"):
        native.linear(x, kernel, 0, np.array([1, 2, 0], np.int32)).block_until_ready()
    cache = PagedCache(jnp.zeros((1, 3, 1, 4, 16)), jnp.zeros((1, 3, 1, 4, 16)))
    query, table = draw(0, 1, 2, 2, 16), np.array([[1, 2]], np.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="not within its page table"):
        native.paged_attention(query, cache, 0, table, [7], [2], scale=1.0).block_until_ready()
    with pytest.raises(ConfigError, match=r"float32 and bfloat16, got float16.*engine\.kernels"):
        native.linear(x.astype(jnp.float16), kernel, 0)


@needs_compiler
def test_builds_at_once_make_one_library(tmp_path: Path) -> None:
    flags = ("-O0", "-DPORTABLE")
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda _: kernels.build(flags=flags, folder=tmp_path), range(3)))
    assert set(made) == set(tmp_path.iterdir()) == {made[0]}
    # Found again, not built again.
    changed = made[0].stat().st_mtime_ns
    assert kernels.build(flags=flags, folder=tmp_path).stat().st_mtime_ns == changed


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "other"])
def test_damaged_library_is_built_again(tmp_path: Path, damage: str) -> None:
    flags = ("-DPORTABLE", "-O0")
    library = kernels.build(flags=flags, folder=tmp_path)
    whole = library.read_bytes()
    middle = len(whole) // 2
    library.write_bytes(
        {
            "cut": whole[:middle],  # loading it is a bus error
            "empty": b"",
            "flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "other": b"hello" * 100,
        }[damage]
    )
    assert kernels.build(flags=flags, folder=tmp_path) == library
    assert ctypes.CDLL(str(library)).gymllm_linear


@needs_compiler
def test_folder_in_the_librarys_place_is_said(tmp_path: Path) -> None:
    flags = ("-DPORTABLE", "-O0")
    library = kernels.build(flags=flags, folder=tmp_path)
    library.unlink()
    library.mkdir()
    with pytest.raises(EngineError, match="can't be kept in"):
        kernels.build(flags=flags, folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [library.name]


def test_failed_build_says_what_the_compiler_said(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"could not be compiled: .*no-such-flag"):
        kernels.build(flags=("--no-such-flag",), folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match=r"No C compiler is on the PATH .*apt-get install gcc"):
        kernels.build(folder=tmp_path)


@needs_compiler
def test_broken_library_is_said(tmp_path: Path) -> None:
    library = tmp_path / "kernels-broken.so"
    library.write_bytes(b"no library")
    with pytest.raises(EngineError, match=r"can't be loaded: .*Remove .*kernels-broken"):
        open_library(library)


@needs_compiler
def test_missing_memory_is_said(tmp_path: Path) -> None:
    header = tmp_path / "none.h"
    header.write_text(
        "#include <stdlib.h>\n"
        "static inline void *none(size_t line, size_t size) { return line && size ? NULL : NULL; }\n"
        "#define aligned_alloc none\n"
    )
    flags = ("-DPORTABLE", "-O1", "-include", str(header))
    loaded = open_library(kernels.build(flags=flags, folder=tmp_path))
    x, kernel = draw(0, 40, 64), draw(1, 1, 64, 50)
    with pytest.raises(jax.errors.JaxRuntimeError, match="No memory is left"):
        loaded.linear(x, kernel, 0).block_until_ready()
    cache = PagedCache(jnp.zeros((1, 3, 1, 4, 16)), jnp.zeros((1, 3, 1, 4, 16)))
    query, table = draw(0, 1, 2, 2, 16), np.array([[1, 2]], np.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="No memory is left"):
        loaded.paged_attention(query, cache, 0, table, [3], [2], scale=1.0).block_until_ready()
    rows = (draw(0, 1, 9, 2, 16), *(draw(1, 1, 9, 1, 16),) * 2, jnp.full((1, 9), 9))
    with pytest.raises(jax.errors.JaxRuntimeError, match="No memory is left"):
        loaded.packed_attention(*rows, rows[-1], jnp.int32(0), scale=1.0)[0].block_until_ready()
    with pytest.raises(jax.errors.JaxRuntimeError, match="No memory is left"):
        loaded.draw(x, jnp.ones(40), jnp.zeros(40), softcap=None).block_until_ready()


@pytest.mark.slow
@needs_compiler
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """Odd sizes under the address and undefined-behaviour sanitizers, in a process of its own."""
    flags = ("-march=native", "-O1", "-g", "-fsanitize=address,undefined")
    flags += ("-fno-sanitize-recover=all",)
    library = kernels.build(flags=flags, folder=tmp_path)
    runtimes = [
        subprocess.run(
            ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        # The sanitizer looks for C++'s exceptions when it is loaded, and JAX throws some.
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    program = Path(__file__).parent / "kernels_odd_sizes.py"
    done = subprocess.run(
        [sys.executable, str(program), str(library)],
        env={
            "LD_PRELOAD": " ".join(runtimes),
            "ASAN_OPTIONS": "detect_leaks=0",
            "HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "every size done" in done.stdout
