"""The kernels as calls that XLA makes from compiled programs.

Axes: T tokens, I in, O out, L layers, F rows that are sampled from, D model, V vocabulary; those of pages
are `paged_attention`'s.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gymllm.errors import ConfigError, EngineError
from gymllm_trainers.engine.kernels.build import build
from gymllm_trainers.engine.paged_attention import PagedCache

_TARGETS = ("linear", "logits_tied", "paged_attention", "write_pages")
_TYPES = (jnp.float32, jnp.bfloat16)
_lock = threading.Lock()


@dataclass(frozen=True)
class Kernels:
    """The functions of one compiled library, under names of their own in XLA. All can be traced."""

    prefix: str
    """Of the names: a program kept in JAX's cache finds the library it was compiled for, or none."""
    multiplies_bfloat16: bool
    """Whether the processor multiplies bfloat16 numbers itself."""

    def linear(
        self, x_TI: Array, kernels_LIO: Array, layer: Array | int, rows: Array | None = None
    ) -> Array:
        """x @ kernels[layer], summed in float32 in the order of I.

        A row has the same bits whatever T, the other rows and their number are. With x and kernels in
        bfloat16 products are taken two at a time; otherwise numbers are float32, and so are products.

        Args:
            x_TI: float32 or bfloat16.
            kernels_LIO: float32 or bfloat16; read in place.
            layer: Which one, int32 scalar.
            rows: [1 + T], int32: how many rows are computed, and then which; the others come out zero.
                None computes all.

        Returns:
            [T, O] in x's type.
        """
        out = self._multiply("linear", x_TI, kernels_LIO, layer, rows, kernels_LIO.shape[-1])
        return out.astype(x_TI.dtype)

    def logits(self, x_FD: Array, head_DV: Array, rows: Array | None = None) -> Array:
        """x @ head, float32 [F, V]; otherwise as `linear`."""
        return self._multiply("linear", x_FD, head_DV[None], 0, rows, head_DV.shape[-1])

    def logits_tied(self, x_FD: Array, embedding_VD: Array, rows: Array | None = None) -> Array:
        """x @ embedding.T, float32 [F, V], which is not transposed for it; otherwise as `linear`."""
        return self._multiply("logits_tied", x_FD, embedding_VD, 0, rows, embedding_VD.shape[0])

    def write_pages(
        self, cache: PagedCache, layer: Array, key_TKH: Array, value_TKH: Array, slot_T: Array
    ) -> PagedCache:
        """The same as `paged_attention.write_pages`."""
        shapes = [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in cache]
        call = jax.ffi.ffi_call(
            f"{self.prefix}_write_pages", shapes, input_output_aliases={0: 0, 1: 1}
        )
        key_TKH, value_TKH = (_known(part, cache.key.dtype) for part in (key_TKH, value_TKH))
        value_TKH = value_TKH.astype(key_TKH.dtype)
        return PagedCache(*call(*cache, _int32(layer), key_TKH, value_TKH, _int32(slot_T)))

    def paged_attention(
        self,
        query_BCNH: Array,
        cache: PagedCache,
        layer: Array,
        table_BM: Array,
        start_B: Array,
        count_B: Array,
        *,
        scale: float,
        window: Array | int | None = None,
        softcap: float | None = None,
    ) -> Array:
        """The same as `paged_attention.paged_attention`, in float32 whatever the cache's type is.

        A query has the same bits in a block of queries as alone.
        """
        call = jax.ffi.ffi_call(
            f"{self.prefix}_paged_attention",
            jax.ShapeDtypeStruct(query_BCNH.shape, query_BCNH.dtype),
        )
        # 0 is none.
        window = 0 if window is None else jnp.maximum(window, 1)
        integers = (_int32(part) for part in (layer, table_BM, start_B, count_B, window))
        return call(
            _known(query_BCNH),
            *cache,
            *integers,
            scale=np.float32(scale),
            softcap=np.float32(softcap or 0.0),
        )

    def _multiply(
        self,
        name: str,
        x_TI: Array,
        kernels: Array,
        layer: Array | int,
        rows: Array | None,
        columns: int,
    ) -> Array:
        tokens, depth = x_TI.shape
        pairs = kernels.dtype == jnp.bfloat16 and self.multiplies_bfloat16 and depth % 2 == 0
        x_TI = _known(x_TI)
        if not pairs:
            x_TI = x_TI.astype(jnp.float32)
        if rows is None:
            rows = jnp.concatenate([jnp.array([tokens]), jnp.arange(tokens)])
        call = jax.ffi.ffi_call(
            f"{self.prefix}_{name}", jax.ShapeDtypeStruct((tokens, columns), jnp.float32)
        )
        return call(x_TI, _known(kernels), _int32(layer), _int32(rows))


def _int32(number: Array | int) -> Array:
    return jnp.asarray(number, jnp.int32)


def _known(numbers: Array, also: jnp.dtype | None = None) -> Array:
    if numbers.dtype not in _TYPES or (also is not None and also not in _TYPES):
        raise ConfigError(
            f"The kernels for CPUs take float32 and bfloat16, got {numbers.dtype}. Set engine.kernels "
            "to xla, or load the model in one of these types."
        )
    return numbers


@functools.cache
def open_library(library: Path) -> Kernels:
    """Registers a library's functions with XLA.

    Raises:
        EngineError: The system can't load it.
    """
    with _lock:
        try:
            functions = ctypes.CDLL(str(library))
            found = {name: getattr(functions, f"gymllm_{name}") for name in _TARGETS}
            has_pairs = bool(functions.gymllm_has_pairs())
        except (OSError, AttributeError) as error:  # AttributeError: another library
            raise EngineError(
                f"The engine's kernels can't be loaded: {error}. Remove {library} to have them built again."
            ) from error
        prefix = f"gymllm_{library.stem.replace('-', '_')}"
        for name, function in found.items():
            handler = jax.ffi.pycapsule(function)
            jax.ffi.register_ffi_target(f"{prefix}_{name}", handler, platform="cpu")
        return Kernels(prefix, has_pairs)


@functools.cache
def _load() -> Kernels | str:
    if jax.default_backend() != "cpu":
        return f"The kernels are for CPUs; JAX runs on {jax.default_backend()}."
    try:
        return open_library(build())
    except EngineError as error:
        return str(error)


def load() -> Kernels | None:
    """The kernels, compiled if they haven't been before; None where they can't be had."""
    kernels = _load()
    return None if isinstance(kernels, str) else kernels


def unavailable() -> str | None:
    """Why `load` has nothing to offer; None if it has."""
    kernels = _load()
    return kernels if isinstance(kernels, str) else None
