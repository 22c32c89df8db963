"""Calls the kernels of one library with sizes that fit nothing; for a build with sanitizers."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from gymllm_trainers.engine.kernels.calls import open_library
from gymllm_trainers.engine.paged_attention import PagedCache

PRODUCT_TYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")]
CACHE_TYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]


def main(library: Path) -> None:
    """Runs them all; a sanitizer ends the process at the first fault."""
    loaded = open_library(library)
    rng = np.random.default_rng(0)

    def draw(*shape: int, dtype: str) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)

    for x_type, kernel_type in PRODUCT_TYPES:
        for depth, columns in ((1, 1), (33, 47), (34, 49), (1030, 97), (16, 193)):
            for tokens in (1, 2, 7, 9, 40):
                x = draw(tokens, depth, dtype=x_type)
                kernel = draw(2, depth, columns, dtype=kernel_type)
                rows = np.arange(-1, tokens, dtype=np.int32)
                rows[0] = tokens // 2 + 1
                loaded.linear(x, kernel, 1, rows).block_until_ready()
                loaded.logits_tied(x, kernel[1].T).block_until_ready()
    for size, page_size in ((1, 1), (17, 3), (64, 16), (80, 70)):
        for cache_type, query_type in CACHE_TYPES:
            table = np.zeros((3, -(-140 // page_size)), np.int32)
            table[:2] = 1 + np.arange(2 * table.shape[1]).reshape(2, -1)
            shape = 2, 1 + 2 * table.shape[1], 2, page_size, size
            cache = PagedCache(draw(*shape, dtype=cache_type), draw(*shape, dtype=cache_type))
            slot = np.array([0, shape[1] * page_size - 1], np.int32)
            new = draw(2, 2, size, dtype=query_type)
            cache = loaded.write_pages(cache, jnp.int32(1), new, new, slot)
            query = draw(3, 37, 10, size, dtype=query_type)
            for window, softcap in ((None, None), (3, 1.0), (65, None)):
                start, count = np.array([100, 0, 0]), np.array([37, 5, 0])
                out = loaded.paged_attention(
                    query,
                    cache,
                    jnp.int32(1),
                    table,
                    start,
                    count,
                    scale=0.5,
                    window=window,
                    softcap=softcap,
                )
                out.block_until_ready()
    sys.stdout.write("every size done\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
