"""Attention of packed rows, forward and backward: time and memory of what runs on this machine.

    python benchmarks/attention.py [--quick] [--implementations reference xla] [--dtypes float32 bfloat16]

Rows of sequences side by side, and of trees: groups of 8 that share a prompt. The machine's own matrix
products are measured in the same run: the bound is the time that the products of visible pairs alone would
take at that rate, 2 of them forward and 5 backward.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from table import Table

from gymllm.errors import ConfigError
from gymllm_trainers.models.attention import packed_attention

HEADS, GROUPS, SIZE = 9, 3, 64
"""SmolLM2-135M's."""


class Case(NamedTuple):
    """Rows that are filled until the next sequence or group doesn't fit."""

    rows: int
    tokens: int
    lengths: tuple[int, int]
    """Least and most tokens of a sequence, or of an answer."""
    window: int | None = None
    prompt: int = 0
    """Tokens that 8 answers share; 0: sequences share nothing."""


CASES = {
    "2x768, sequences of 100-400": Case(2, 768, (100, 400)),
    "2x768, one sequence": Case(2, 768, (768, 768)),
    "1x4096, sequences of 200-1500": Case(1, 4096, (200, 1500)),
    "1x4096, one sequence": Case(1, 4096, (4096, 4096)),
    "1x4096, one sequence, window 512": Case(1, 4096, (4096, 4096), window=512),
    "1x4096, groups of 150 + 8 x 40": Case(1, 4096, (40, 40), prompt=150),
    "1x4096, a group of 600 + 8 x 300-400": Case(1, 4096, (300, 400), prompt=600),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short rows alone, each twice")
    parser.add_argument("--implementations", nargs="+", default=["reference"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    cases, table = CASES, Table()
    if options.quick:
        options.repeats = min(options.repeats, 2)
        cases = {title: case for title, case in CASES.items() if case.tokens < 1024}
    for dtype in options.dtypes:
        rate = matmul_rate(dtype, options.repeats)
        table.add(f"{dtype}: matrix product 1024x1024x1024", rate / 1e9, "GFLOP/s")
        for title, case in cases.items():
            ends, positions = packed(case)
            arrays = random_arrays(case.rows, case.tokens, dtype)
            pairs = visible_pairs(ends, positions, case.window)
            bound = 2 * 7 * pairs * HEADS * SIZE / rate
            for name in options.implementations:
                what = f"{dtype} {name}: {title}"
                attend = functools.partial(
                    packed_attention,
                    positions_BT=positions,
                    scale=SIZE**-0.5,
                    window=case.window,
                    branched=case.prompt > 0,
                    implementation=name,
                )
                try:
                    seconds, held = measure(attend, arrays, ends, options.repeats)
                except ConfigError as error:
                    table.add(what, str(error))
                    continue
                table.add(what, seconds * 1e3, "ms", f"bound {bound * 1e3:.3g} ms")
                table.add(f"{what}: held", held / 2**20, "MiB")
    table.print_json()


def packed(case: Case) -> tuple[jax.Array, jax.Array]:
    """Ends and positions."""
    rng = np.random.default_rng(0)
    ends, positions = np.zeros((2, case.rows, case.tokens), np.int32)
    for row in range(case.rows):
        start = 0
        while True:
            sizes = rng.integers(case.lengths[0], case.lengths[1] + 1, size=8 if case.prompt else 1)
            stop = start + case.prompt + int(sizes.sum())
            if stop > case.tokens:
                break
            trunk = start + case.prompt
            ends[row, start:trunk] = stop
            positions[row, start:trunk] = np.arange(case.prompt)
            for size in sizes.tolist():
                ends[row, trunk : trunk + size] = trunk + size
                positions[row, trunk : trunk + size] = np.arange(size) + case.prompt
                trunk += size
            start = stop
    return jnp.asarray(ends), jnp.asarray(positions)


def random_arrays(rows: int, tokens: int, dtype: str) -> list[jax.Array]:
    """Queries, keys, values and the result's cotangent."""
    rng = np.random.default_rng(1)
    counts = (HEADS, GROUPS, GROUPS, HEADS)
    return [jnp.asarray(rng.normal(size=(rows, tokens, n, SIZE)), dtype) for n in counts]


def visible_pairs(ends_BT: jax.Array, positions_BT: jax.Array, window: int | None) -> int:
    """Pairs of a query and a key that it sees: itself and what is above it."""
    depths = np.asarray(positions_BT)[np.asarray(ends_BT) > 0] + 1
    return int(np.minimum(depths, window or depths.max()).sum())


def matmul_rate(dtype: str, repeats: int) -> float:
    """FLOP/s of one large product that is summed in float32."""
    x = jnp.ones((1024, 1024), dtype)
    product = jax.jit(functools.partial(jnp.matmul, preferred_element_type=jnp.float32))
    return 2 * 1024**3 / fastest(lambda: product(x, x), repeats)


def measure(
    attend: Callable[..., jax.Array], arrays: list[jax.Array], ends: jax.Array, repeats: int
) -> tuple[float, int]:
    """Seconds of forward and backward, and bytes held besides arguments and results."""

    def total(*arrays: jax.Array) -> jax.Array:
        return (attend(*arrays[:3], ends) * arrays[3]).astype(jnp.float32).sum()

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
