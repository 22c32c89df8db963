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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from gymllm.errors import ConfigError, EngineError
from gymllm_trainers.engine.kernels.build import build
from gymllm_trainers.engine.paged_attention import PagedCache
from gymllm_trainers.models.config import DecoderConfig

_TARGETS = (
    "linear",
    "logits_tied",
    "paged_attention",
    "write_pages",
    "trunk",
    "sample",
    "draw",
    "packed_attention",
    "packed_attention_backward",
)
_TYPES = (jnp.float32, jnp.bfloat16)
_lock = threading.Lock()


_TRUNK_WEIGHTS = (
    "norm",
    "attention_norm",
    "query",
    "key",
    "value",
    "query_bias",
    "key_bias",
    "value_bias",
    "query_norm",
    "key_norm",
    "output",
    "output_bias",
    "attention_post_norm",
    "mlp_norm",
    "gate",
    "up",
    "gate_bias",
    "up_bias",
    "down",
    "down_bias",
    "mlp_post_norm",
)
"""In the order of trunk.c."""


class TrunkInputs(NamedTuple):
    """What `Kernels.trunk` works on; see `batch.StepArrays`."""

    x_TD: Array
    """Embedded tokens, float32 or bfloat16."""
    rope: tuple[Array, Array]
    """Cosines and sines, [T, H/2] float32."""
    local_rope: tuple[Array, Array] | None
    """Those of layers that slide, where they are others."""
    cache: PagedCache
    slot_T: Array
    table_FM: Array
    start_F: Array
    count_F: Array
    active_E: Array
    windows_L: Array | None
    """How many tokens a query of each layer sees."""
    slides_L: Array | None
    """Which layers take `local_rope`."""


class TrunkShape(NamedTuple):
    """What a call of `Kernels.trunk` is compiled for."""

    rows: int
    """Of the T tokens the first are decode rows, each a lane of F."""
    block: int
    """Tokens of each further lane."""
    heads: int
    gelu: bool
    """The activation: GELU by tanh, or SiLU."""
    eps: float
    offset: float
    """Added to the weights of norms."""
    scale: float
    softcap: float | None


@dataclass(frozen=True)
class Kernels:
    """The functions of one compiled library, under names of their own in XLA. All can be traced."""

    prefix: str
    """Of the names: a program kept in JAX's cache finds the library it was compiled for, or none."""
    multiplies_bfloat16: bool
    """Whether the processor multiplies bfloat16 numbers itself."""
    lanes: int
    """Numbers of a vector."""

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

    def packed_attention(
        self,
        query_BTNH: Array,
        key_BTKH: Array,
        value_BTKH: Array,
        ends_BT: Array,
        positions_BT: Array,
        window: Array,
        *,
        scale: float,
    ) -> tuple[Array, Array, Array]:
        """Attention of packed rows of trees, for training; `models/attention.py` has what is computed.

        Args:
            query_BTNH: float32, as are keys and values; `lanes` divides H.
            key_BTKH: Keys.
            value_BTKH: Values.
            ends_BT: int32.
            positions_BT: int32.
            window: int32 scalar; 0 is none.
            scale: Of the scores.

        Returns:
            Mixed values [B, T, N, H]; each query's highest score and its sum of exp(score - highest),
            [B, N, T].
        """
        batch, tokens, heads, _ = query_BTNH.shape
        of_query = jax.ShapeDtypeStruct((batch, heads, tokens), jnp.float32)
        shapes = [jax.ShapeDtypeStruct(query_BTNH.shape, jnp.float32), of_query, of_query]
        call = jax.ffi.ffi_call(f"{self.prefix}_packed_attention", shapes, vmap_method="sequential")
        integers = map(_int32, (ends_BT, positions_BT, window))
        mixed, peak, total = call(
            query_BTNH, key_BTKH, value_BTKH, *integers, scale=np.float32(scale)
        )
        return mixed, peak, total

    def packed_attention_backward(
        self,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        cotangent: Array,
        *,
        scale: float,
    ) -> tuple[Array, Array, Array]:
        """The gradient of `packed_attention`.

        Args:
            inputs: Its arguments, in order.
            outputs: Its results.
            cotangent: Of the mixed values, float32 [B, T, N, H].
            scale: As there.

        Returns:
            Of queries [B, T, N, H], keys and values [B, T, K, H], float32.
        """
        batch, tokens, heads, size = cotangent.shape
        query, key, value, *integers = inputs
        shapes = [jax.ShapeDtypeStruct(cotangent.shape, jnp.float32)] * 3
        name = f"{self.prefix}_packed_attention_backward"
        call = jax.ffi.ffi_call(name, shapes, vmap_method="sequential")
        d_query, d_key, d_value = call(
            query, key, value, *map(_int32, integers), *outputs, cotangent, scale=np.float32(scale)
        )
        groups = key.shape[2]
        shape = (batch, tokens, groups, heads // groups, size)
        return d_query, d_key.reshape(shape).sum(3), d_value.reshape(shape).sum(3)

    def take_trunk(
        self, config: DecoderConfig, dtypes: set[Any], *, adapters: bool, compute_dtype: DTypeLike
    ) -> bool:
        """Whether `trunk` knows a decoder of this shape, with parameters of these types."""
        compute = jnp.dtype(compute_dtype)
        sizes = (config.hidden_size, config.intermediate_size)
        halves = self.multiplies_bfloat16 and not any(size % 2 for size in sizes)
        known = compute == jnp.float32 or (compute == jnp.bfloat16 and halves)
        return known and dtypes == {compute} and not adapters and not config.num_experts

    def trunk(
        self, inputs: TrunkInputs, weights: dict[str, Array], shape: TrunkShape
    ) -> tuple[Array, PagedCache]:
        """Every layer of a dense decoder without adapters, for an engine's step.

        Args:
            inputs: What the step is of.
            weights: A layer's parameters by `layer_shapes`' names, stacked, and "norm", the final one;
                kernels in x's type.
            shape: What is compiled in.

        Returns:
            Hidden states after the final norm, [T, D] in x's type, 0 for tokens that are not active; and the
            cache.
        """
        none = jnp.zeros((0,), jnp.float32)
        zeros_L = jnp.zeros((inputs.cache.key.shape[0],), jnp.int32)
        x_TD, cache = _known(inputs.x_TD), inputs.cache
        local = inputs.local_rope or inputs.rope
        integers = (
            *(inputs.slot_T, inputs.table_FM, inputs.start_F, inputs.count_F, inputs.active_E),
            zeros_L if inputs.windows_L is None else inputs.windows_L,
            zeros_L if inputs.slides_L is None else inputs.slides_L,
        )
        shapes = [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in (x_TD, *cache)]
        call = jax.ffi.ffi_call(f"{self.prefix}_trunk", shapes, input_output_aliases={5: 1, 6: 2})
        hidden_TD, key, value = call(
            x_TD,
            *(part.astype(jnp.float32) for part in (*inputs.rope, *local)),
            *cache,
            *map(_int32, integers),
            *(_known(weights.get(name, none)) for name in _TRUNK_WEIGHTS),
            rows=np.int64(shape.rows),
            block=np.int64(shape.block),
            heads=np.int64(shape.heads),
            gelu=np.int64(shape.gelu),
            eps=np.float32(shape.eps),
            offset=np.float32(shape.offset),
            scale=np.float32(shape.scale),
            softcap=np.float32(shape.softcap or 0.0),
        )
        return hidden_TD, PagedCache(key, value)

    def sample(
        self,
        hidden_SD: Array,
        head: Array,
        count: Array,
        temperature_F: Array,
        uniform_F: Array,
        *,
        tied: bool,
        softcap: float | None,
    ) -> tuple[Array, Array]:
        """`sampling.sample_plain` of hidden @ head, for the first `count` rows.

        Args:
            hidden_SD: Final hidden states, float32 or bfloat16.
            head: [D, V], or the embedding [V, D] if `tied`.
            count: int32 scalar, at most F.
            temperature_F: float32; 0 is greedy.
            uniform_F: float32 in [0, 1).
            tied: Whether `head` is the embedding.
            softcap: Of the logits.

        Returns:
            int32 [4, F]: token, bits of its log-probability, bits of that at temperature 1, whether nothing
            could be drawn; and the tokens as int32 [S], 0 past F.
        """
        hidden_SD, head = _known(hidden_SD), _known(head)
        pairs = (
            head.dtype == jnp.bfloat16 and self.multiplies_bfloat16 and hidden_SD.shape[1] % 2 == 0
        )
        if not pairs:
            hidden_SD = hidden_SD.astype(jnp.float32)
        shapes = [
            jax.ShapeDtypeStruct((4, temperature_F.shape[0]), jnp.int32),
            jax.ShapeDtypeStruct((hidden_SD.shape[0],), jnp.int32),
        ]
        packed_4F, previous_S = jax.ffi.ffi_call(f"{self.prefix}_sample", shapes)(
            hidden_SD,
            head,
            _int32(count),
            temperature_F.astype(jnp.float32),
            uniform_F.astype(jnp.float32),
            tied=np.int64(tied),
            softcap=np.float32(softcap or 0.0),
        )
        return packed_4F, previous_S

    def draw(
        self, logits_FV: Array, temperature_F: Array, uniform_F: Array, *, softcap: float | None
    ) -> Array:
        """Of logits, int32 [4, F] as `sample` has it, and the same bits as there."""
        shape = jax.ShapeDtypeStruct((4, logits_FV.shape[0]), jnp.int32)
        call = jax.ffi.ffi_call(f"{self.prefix}_draw", shape)
        return call(
            logits_FV,
            temperature_F.astype(jnp.float32),
            uniform_F.astype(jnp.float32),
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
            lanes = int(functions.gymllm_lanes())
        except (OSError, AttributeError) as error:  # AttributeError: another library
            raise EngineError(
                f"The engine's kernels can't be loaded: {error}. Remove {library} to have them built again."
            ) from error
        prefix = f"gymllm_{library.stem.replace('-', '_')}"
        for name, function in found.items():
            handler = jax.ffi.pycapsule(function)
            jax.ffi.register_ffi_target(f"{prefix}_{name}", handler, platform="cpu")
        return Kernels(prefix, has_pairs, lanes)


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
