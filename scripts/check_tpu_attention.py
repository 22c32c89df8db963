"""Compiles attention and the log-probability head for TPUs that aren't here, and says what they hold.

    JAX_PLATFORMS=cpu python scripts/check_tpu_attention.py [v5e:2x2 v5p:2x2x1 ...]

On demand: needs `pip install libtpu` (0.6 GB) of jax's own release, in an environment of its own. Nothing
runs; a kernel that the TPU's compiler refuses, or a path that silently isn't a kernel, fails here.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gymllm_trainers.models.attention import packed_attention
from gymllm_trainers.models.logprob_head import token_statistics

ROWS, TOKENS, HEADS, GROUPS = 4, 4096, 16, 8
LINES: dict[str, object] = {"branched": False}
KINDS: dict[str, tuple[int, dict[str, object], bool]] = {
    "head 128": (128, LINES, False),
    "head 64": (64, LINES, False),
    "head 256, soft cap, window 1024": (256, LINES | {"softcap": 50.0, "window": 1024}, False),
    "head 256, traced window": (256, LINES | {"softcap": 50.0, "local_window": 1024}, True),
    "trees, head 128": (128, {}, False),
    "trees, head 256, soft cap, traced window": (256, {"softcap": 50.0}, True),
}
"""Size of a head, options, and whether a window is traced."""


def main() -> None:
    for name in sys.argv[1:] or ["v5e:2x2", "v6e:2x2", "v5p:2x2x1"]:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
        tensor = 2 if len(devices) % 2 == 0 else 1
        shape = (1, len(devices) // tensor, tensor)
        mesh = Mesh(
            np.array(devices).reshape(shape), ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3
        )
        for title, (size, options, traced) in KINDS.items():
            report(f"{name}: attention, {title}", mesh, *attention(size, options, traced=traced))
        report(f"{name}: log-probability head, 151,936 words", mesh, *head())


Arguments = list[tuple[tuple[int, ...], object, PartitionSpec]]


def attention(
    size: int, options: dict[str, Any], *, traced: bool
) -> tuple[Callable[..., object], Arguments, int]:
    """A gradient of attention, its arguments, and how many kernels it must hold."""

    def total(query: jax.Array, key: jax.Array, value: jax.Array, *rest: jax.Array) -> jax.Array:
        ends, *window = rest
        more = {"window": window[0]} if traced else {}
        mixed = packed_attention(query, key, value, ends, scale=size**-0.5, **options, **more)
        return mixed.astype(jnp.float32).sum()

    heads = PartitionSpec(("data", "fsdp"), None, "tensor")
    arrays: Arguments = [
        ((ROWS, TOKENS, count, size), jnp.bfloat16, heads) for count in (HEADS, GROUPS, GROUPS)
    ]
    arrays.append(((ROWS, TOKENS), jnp.int32, PartitionSpec(("data", "fsdp"))))
    if traced:
        arrays.append(((), jnp.int32, PartitionSpec()))
    # Forward, queries' gradient, keys' and values' gradient; twice where a window may or may not hide keys
    # and no mask says it.
    return jax.grad(total, (0, 1, 2)), arrays, 6 if traced and "branched" in options else 3


def head() -> tuple[Callable[..., object], Arguments, int]:
    """A gradient of the head, of a tied embedding in float32."""
    words, width, tokens = 151_936, 1024, ROWS * TOKENS

    def total(hidden: jax.Array, head: jax.Array, target: jax.Array, mask: jax.Array) -> jax.Array:
        return token_statistics(hidden, head, target, mask, tied=True).logprob.sum()

    rows = PartitionSpec(("data", "fsdp"))
    arrays: Arguments = [
        ((tokens, width), jnp.bfloat16, rows),
        ((words, width), jnp.float32, PartitionSpec("tensor", "fsdp")),
        ((tokens,), jnp.int32, rows),
        ((tokens,), jnp.float32, rows),
    ]
    return jax.grad(total, (0, 1)), arrays, 0


def report(
    what: str, mesh: Mesh, function: Callable[..., object], arguments: Arguments, kernels: int
) -> None:
    """Compiles for the mesh and prints a line; fails if kernels are missing."""
    start = time.perf_counter()
    with jax.set_mesh(mesh):
        shapes = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
            for shape, dtype, spec in arguments
        ]
        compiled = jax.jit(function).lower(*shapes).compile()
    seconds = time.perf_counter() - start
    found = compiled.as_text().count('custom_call_target="tpu_custom_call"')
    analysis = compiled.memory_analysis()
    held = 0 if analysis is None else analysis.temp_size_in_bytes / 2**20
    print(
        f"{what:60} {found} kernels, {held:.0f} MiB held, compiled in {seconds:.0f} s", flush=True
    )
    if found < kernels:
        raise SystemExit(
            f"{what}: expected {kernels} kernels, found {found}: not splash attention."
        )


if __name__ == "__main__":
    main()
