"""Attention of packed rows, forward and backward: time and memory of what runs on this machine.

    python benchmarks/attention.py [--implementations reference xla] [--dtypes float32 bfloat16]

The machine's own matrix products are measured in the same run: the bound is the time that the products of
visible pairs alone would take at that rate, 2 of them forward and 5 backward.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from table import Table

from gymllm.errors import ConfigError
from gymllm_trainers.models.attention import packed_attention

HEADS, GROUPS, SIZE = 9, 3, 64
"""SmolLM2-135M's."""
CASES = {
    "2x768, sequences of 100-400": (2, 768, (100, 400), None),
    "2x768, one sequence": (2, 768, (768, 768), None),
    "1x4096, sequences of 200-1500": (1, 4096, (200, 1500), None),
    "1x4096, one sequence": (1, 4096, (4096, 4096), None),
    "1x4096, one sequence, window 512": (1, 4096, (4096, 4096), 512),
}
"""Rows, tokens, the sequences' lengths, and a window."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--implementations", nargs="+", default=["reference"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    table = Table()
    for dtype in options.dtypes:
        rate = matmul_rate(dtype, options.repeats)
        table.add(f"{dtype}: matrix product 1024x1024x1024", rate / 1e9, "GFLOP/s")
        for title, (rows, tokens, lengths, window) in CASES.items():
            segments = packed(rows, tokens, lengths)
            arrays = random_arrays(rows, tokens, dtype)
            pairs = visible_pairs(segments, window)
            bound = 2 * 7 * pairs * HEADS * SIZE / rate
            for name in options.implementations:
                what = f"{dtype} {name}: {title}"
                attend = functools.partial(
                    packed_attention, scale=SIZE**-0.5, window=window, implementation=name
                )
                try:
                    seconds, held = measure(attend, arrays, segments, options.repeats)
                except ConfigError as error:
                    table.add(what, str(error))
                    continue
                table.add(what, seconds * 1e3, "ms", f"bound {bound * 1e3:.3g} ms")
                table.add(f"{what}: held", held / 2**20, "MiB")
    table.print_json()


def packed(rows: int, tokens: int, lengths: tuple[int, int]) -> jax.Array:
    """Segments of rows that are filled until the next sequence doesn't fit."""
    rng = np.random.default_rng(0)
    segments = np.zeros((rows, tokens), np.int32)
    for row in segments:
        start, count = 0, 0
        while start + (size := int(rng.integers(lengths[0], lengths[1] + 1))) <= tokens:
            count += 1
            row[start : start + size] = count
            start += size
    return jnp.asarray(segments)


def random_arrays(rows: int, tokens: int, dtype: str) -> list[jax.Array]:
    """Queries, keys, values and the result's cotangent."""
    rng = np.random.default_rng(1)
    counts = (HEADS, GROUPS, GROUPS, HEADS)
    return [jnp.asarray(rng.normal(size=(rows, tokens, n, SIZE)), dtype) for n in counts]


def visible_pairs(segments: jax.Array, window: int | None) -> int:
    """Pairs of a query and a key that it sees."""
    count = 0
    for row in np.asarray(segments):
        for size in np.bincount(row)[1:].tolist():
            seen = np.arange(1, size + 1)
            count += int(np.minimum(seen, window or size).sum())
    return count


def matmul_rate(dtype: str, repeats: int) -> float:
    """FLOP/s of one large product that is summed in float32."""
    x = jnp.ones((1024, 1024), dtype)
    product = jax.jit(functools.partial(jnp.matmul, preferred_element_type=jnp.float32))
    return 2 * 1024**3 / fastest(lambda: product(x, x), repeats)


def measure(
    attend: Callable[..., jax.Array], arrays: list[jax.Array], segments: jax.Array, repeats: int
) -> tuple[float, int]:
    """Seconds of forward and backward, and bytes held besides arguments and results."""

    def total(*arrays: jax.Array) -> jax.Array:
        return (attend(*arrays[:3], segments) * arrays[3]).astype(jnp.float32).sum()

    program = jax.jit(jax.grad(total, (0, 1, 2))).lower(*arrays).compile()
    analysis = program.memory_analysis()
    held = 0 if analysis is None else analysis.temp_size_in_bytes
    return fastest(lambda: program(*arrays), repeats), held


def fastest(function: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of some calls, after one that isn't counted."""
    jax.block_until_ready(function())
    seconds: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function())
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    main()
