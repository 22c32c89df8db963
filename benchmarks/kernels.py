"""The engine's kernels for CPUs against the machine's limits, and against XLA's own.

    python benchmarks/kernels.py [--quick]

A kernel's least time is what it takes to read weights, keys and values once from memory, or to multiply at
the rate of XLA's square product, whichever is longer; both rates are measured in the same run. Where
bfloat16 is multiplied in pairs, ours can be faster than that. Shapes are SmolLM2-135M's; its layers'
weights together are far larger than any cache. Ours and XLA's are taken in turns, the best of each counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from machine_limits import Limits, matmul_rate, read_rate
from table import Table

from gymllm_trainers.engine import kernels, paged_attention
from gymllm_trainers.engine.paged_attention import PagedCache

HIDDEN, FEED_FORWARD, LAYERS, VOCABULARY = 576, 1536, 30, 49152
HEADS, GROUPS, SIZE, PAGE_SIZE = 9, 3, 64, 16
GOAL = ">= 80 %"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Two ways to the same result."""

    what: str
    dtype: str
    ours: Callable[[], Array]
    xla: Callable[[], Array]
    bytes: float
    operations: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sizes and tries")
    options = parser.parse_args()
    loaded = kernels.load()
    if loaded is None:
        raise SystemExit(str(kernels.unavailable()))
    table = Table()
    types = ("float32", "bfloat16")
    limits = Limits(
        bytes_a_s=read_rate(), operations_a_s={dtype: matmul_rate(dtype) for dtype in types}
    )
    table.add("memory is read at", limits.bytes_a_s / 1e9, "GB/s")
    for dtype, rate in limits.operations_a_s.items():
        table.add(f"{dtype} matrices are multiplied at, by XLA", rate / 1e9, "GFLOP/s")
    sizes = (1, 8) if options.quick else (1, 8, 32, 64, 256)
    contexts = ((1, 1, 2048), (8, 1, 512), (32, 1, 512), (16, 16, 512))
    tries = 2 if options.quick else 15
    for dtype in types:
        for rows in sizes:
            show(table, layers(loaded, dtype, rows), limits, tries)
        for rows in sizes[:4]:
            show(table, head(loaded, dtype, rows), limits, tries)
        for rows, queries, context in contexts[: 2 if options.quick else None]:
            show(table, attention(loaded, dtype, rows, queries, context), limits, tries)
    table.print_json()


def show(table: Table, case: Case, limits: Limits, tries: int) -> None:
    """Measures a case, in turns."""
    ours, xla = ([run_s(which)] for which in (case.ours, case.xla))
    for _ in range(tries):
        ours.append(run_s(case.ours))
        if min(xla) < 1 or len(xla) < 3:
            xla.append(run_s(case.xla))
    # The first of each compiles.
    best, other = min(ours[1:]), min(xla[1:])
    least = max(case.bytes / limits.bytes_a_s, case.operations / limits.operations_a_s[case.dtype])
    table.add(f"{case.dtype} {case.what}", best * 1e6, "us")
    table.add("    of what the machine can do", 100 * least / best, "%", GOAL)
    table.add("    XLA's takes times as long", other / best, "x")


def run_s(run: Callable[[], Array]) -> float:
    """Seconds of one run."""
    started = time.perf_counter()
    run().block_until_ready()
    return time.perf_counter() - started


def random_array(dtype: str, *shape: int) -> Array:
    """Normal numbers."""
    return jax.random.normal(jax.random.key(len(shape)), shape, dtype)


def layers(loaded: kernels.Kernels, dtype: str, rows: int) -> Case:
    """All linears of all layers, one after the other, as a step has them."""
    shapes = [(HIDDEN, HEADS * SIZE), (HIDDEN, GROUPS * SIZE), (HIDDEN, GROUPS * SIZE)]
    shapes += [(HEADS * SIZE, HIDDEN), (HIDDEN, FEED_FORWARD), (HIDDEN, FEED_FORWARD)]
    shapes += [(FEED_FORWARD, HIDDEN)]
    stacked = [random_array(dtype, LAYERS, *shape) for shape in shapes]
    x = random_array(dtype, rows, HIDDEN)

    def through(x: Array, stacked: list[Array], ours: bool) -> Array:
        def linear(x: Array, at: int, layer: Array) -> Array:
            if ours:
                return loaded.linear(x, stacked[at], layer)
            kernel = jax.lax.dynamic_index_in_dim(stacked[at], layer, keepdims=False)
            return jnp.dot(x, kernel, preferred_element_type=jnp.float32).astype(x.dtype)

        def body(x: Array, layer: Array) -> tuple[Array, None]:
            query, key, value = (linear(x, at, layer) for at in range(3))
            mixed = query.at[:, : GROUPS * SIZE].add(key + value)
            x = linear(mixed, 3, layer)
            x = linear(linear(x, 4, layer) * linear(x, 5, layer), 6, layer)
            return x * 0.01, None

        return jax.lax.scan(body, x, jnp.arange(LAYERS, dtype=jnp.int32))[0]

    jitted = jax.jit(through, static_argnums=2)
    numbers = sum(kernel.size for kernel in stacked)
    return Case(
        what=f"linears of {LAYERS} layers, {rows} rows",
        dtype=dtype,
        ours=lambda: jitted(x, stacked, True),
        xla=lambda: jitted(x, stacked, False),
        bytes=numbers * jnp.dtype(dtype).itemsize,
        operations=2 * rows * numbers,
    )


def head(loaded: kernels.Kernels, dtype: str, rows: int) -> Case:
    """Logits by a tied embedding."""
    embedding, x = random_array(dtype, VOCABULARY, HIDDEN), random_array(dtype, rows, HIDDEN)
    ours = jax.jit(loaded.logits_tied)
    xla = jax.jit(lambda x, head: jnp.dot(x, head.T, preferred_element_type=jnp.float32))
    return Case(
        what=f"tied head, {rows} rows",
        dtype=dtype,
        ours=lambda: ours(x, embedding),
        xla=lambda: xla(x, embedding),
        bytes=embedding.nbytes,
        operations=2 * rows * embedding.size,
    )


def attention(loaded: kernels.Kernels, dtype: str, rows: int, queries: int, context: int) -> Case:
    """New keys and values are written and attended to, in every layer, in a cache of shuffled pages."""
    table_pages = context // PAGE_SIZE
    pages = rows * table_pages + 1
    shape = LAYERS, pages, GROUPS, PAGE_SIZE, SIZE
    order = np.random.default_rng(0).permutation(np.arange(1, pages)).astype(np.int32)
    tables = jnp.asarray(order.reshape(rows, table_pages))
    start = jnp.full(rows, context - queries, jnp.int32)
    count = jnp.full(rows, queries, jnp.int32)
    query = random_array(dtype, rows, queries, HEADS, SIZE)
    new = random_array(dtype, rows * queries, GROUPS, SIZE)
    last = context - queries + np.arange(queries)
    slot = jnp.asarray(order.reshape(rows, -1)[:, last // PAGE_SIZE] * PAGE_SIZE + last % PAGE_SIZE)
    slot = slot.reshape(-1).astype(jnp.int32)

    def through(cache: PagedCache, ours: bool) -> tuple[Array, PagedCache]:
        write = loaded.write_pages if ours else paged_attention.write_pages
        attend = loaded.paged_attention if ours else paged_attention.paged_attention

        def body(
            carry: tuple[Array, PagedCache], layer: Array
        ) -> tuple[tuple[Array, PagedCache], None]:
            query, cache = carry
            cache = write(cache, layer, new, new, slot)
            mixed = attend(query, cache, layer, tables, start, count, scale=SIZE**-0.5)
            return (mixed, cache), None

        return jax.lax.scan(body, (query, cache), jnp.arange(LAYERS, dtype=jnp.int32))[0]

    jitted = jax.jit(through, static_argnums=1, donate_argnums=0)
    held = [PagedCache(random_array(dtype, *shape), random_array(dtype, *shape))]

    def run(ours: bool) -> Array:
        out, held[0] = jitted(held[0], ours)
        return out

    seen = context - (queries - 1) / 2
    return Case(
        what=f"attention of {rows} rows x {queries} to {context} tokens, {LAYERS} layers",
        dtype=dtype,
        ours=lambda: run(True),
        xla=lambda: run(False),
        bytes=2 * held[0].key.nbytes,
        operations=4 * LAYERS * rows * queries * seen * HEADS * SIZE,
    )


if __name__ == "__main__":
    main()
