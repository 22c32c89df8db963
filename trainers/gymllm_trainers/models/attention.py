"""Attention of packed rows, for training: one function, an implementation for each platform.

Axes: B rows, T tokens, N query heads, K key-value heads, G = N / K, H head.

| implementation | where | what it can't do |
|---|---|---|
| reference | anywhere; memory linear in T (`attention_reference.py`) | |
| xla | anywhere; holds [B, N, T, T] scores | soft caps |
| cudnn | GPU; holds a [B, T, T] mask | soft caps, float32, heads that cuDNN has no kernel for |
| splash | TPU; interpreted on a CPU, for tests | a traced window whose size isn't given |

Under `jax.set_mesh` each device runs its own rows and heads (`shard_map`): a Pallas kernel can't be
partitioned by XLA, and a loop that skips blocks skips more with fewer rows.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, get_args

import chex
import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash_kernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.sharding import AxisType, PartitionSpec

from gymllm.errors import ConfigError, UnknownNameError
from gymllm_trainers.models.attention_reference import blocked_attention
from gymllm_trainers.models.sharding import ROW_AXES

Implementation = Literal["auto", "reference", "xla", "cudnn", "splash"]

_HEAD_AXIS = "tensor"
"""Mesh axis that divides key-value heads, with their query heads."""
_DENSE_BYTES = 2**30
"""On a GPU, scores or masks of more than this are not held: the reference takes over."""
_LANES = 128
"""Splash attention's rows are a multiple of this."""


def packed_attention(
    query_BTNH: Array,
    key_BTKH: Array,
    value_BTKH: Array,
    segments_BT: Array,
    *,
    scale: float,
    window: Array | int | None = None,
    softcap: float | None = None,
    local_window: int | None = None,
    implementation: Implementation = "auto",
) -> Array:
    """Grouped-query attention, causal inside each segment of packed rows; softmax in float32.

    Differentiable once, in reverse, with respect to queries, keys and values.

    Args:
        query_BTNH: Queries, after RoPE; float32, bfloat16 or float16. Head n uses key-value head n // G.
        key_BTKH: Keys, of the same dtype.
        value_BTKH: Values, of the same dtype.
        segments_BT: Which sequence of its row a token belongs to, int32; 0 is padding.
        scale: Scores are multiplied by it.
        window: A query at position p sees keys at positions > p - window; None: all before it. May be an
            int32 scalar that is traced, as where layers are scanned.
        softcap: Scores become softcap * tanh(score / softcap) (Gemma 2, sec. 2 of arXiv:2408.00118).
        local_window: The one size that a traced `window` has where it is less than T. Splash attention
            needs it, as its windows are compiled in; others don't look at it.
        implementation: See the table above; "auto" takes the platform's, or the reference if that can't.

    Returns:
        [B, T, N, H] in the queries' dtype; 0 for padding.

    Raises:
        ConfigError: An implementation that was asked for by name can't do this, or a window < 1, a
            soft cap <= 0, or heads that don't divide.
    """
    chex.assert_rank([query_BTNH, key_BTKH, value_BTKH, segments_BT], [4, 4, 4, 2])
    chex.assert_equal_shape([key_BTKH, value_BTKH])
    heads, groups = query_BTNH.shape[2], key_BTKH.shape[2]
    if implementation not in get_args(Implementation):
        raise UnknownNameError("attention implementation", implementation, get_args(Implementation))
    if heads % groups:
        raise ConfigError(
            f"query heads must be a multiple of key-value heads, got {heads} and {groups}."
        )
    for name, size in (("window", window), ("local_window", local_window)):
        if isinstance(size, int) and size < 1:
            raise ConfigError(
                f"{name} must be >= 1 token, got {size}; None lets a query see all keys before it."
            )
    if softcap is not None and not softcap > 0:
        raise ConfigError(f"softcap must be > 0, got {softcap}; None leaves scores as they are.")

    def attend(
        query: Array, key: Array, value: Array, segments: Array, window: Array | None = None
    ) -> Array:
        size = static_window if window is None else window
        how = _Attention(scale, size, softcap, local_window)
        # Chosen here, where shapes are one device's own.
        chosen = how.choose(query) if implementation == "auto" else implementation
        if (reason := how.refusal(chosen, query)) is not None:
            raise ConfigError(
                f"attention implementation {chosen!r} can't be used: {reason}. "
                f'Use "auto" or "reference".'
            )
        mixed = getattr(how, chosen)(query, key, value, segments)
        # What padding attends to differs between implementations; nobody may come to depend on it.
        return jnp.where((segments != 0)[:, :, None, None], mixed, 0).astype(query.dtype)

    static_window = window if isinstance(window, int) else None
    arguments = (query_BTNH, key_BTKH, value_BTKH, segments_BT)
    if window is not None and static_window is None:
        arguments = (*arguments, jnp.asarray(window, jnp.int32))
    mesh = jax.sharding.get_abstract_mesh()
    free = [
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind is not AxisType.Manual
    ]
    if not free or mesh.size == 1:
        return attend(*arguments)
    rows = tuple(name for name in ROW_AXES if name in free)
    if query_BTNH.shape[0] % math.prod(mesh.shape[name] for name in rows):
        rows = ()
    split = _HEAD_AXIS in free and groups % mesh.shape[_HEAD_AXIS] == 0
    spec = PartitionSpec(rows or None, None, _HEAD_AXIS if split else None, None)
    specs = (spec, spec, spec, PartitionSpec(rows or None, None), PartitionSpec())
    return jax.shard_map(
        attend,
        in_specs=specs[: len(arguments)],
        out_specs=spec,
        axis_names=set(free),
        check_vma=False,  # Pallas calls don't say over which axes their results vary
    )(*arguments)


def _platform() -> str:
    """Where this will run: the mesh's devices, as when compiling ahead of time, or JAX's own."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    name: str = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name


def _compute_capability() -> float:
    """Of the first GPU; 0 where there is none, or where it isn't NVIDIA's."""
    if jax.default_backend() != "gpu":
        return 0.0
    try:
        return float(jax.devices()[0].compute_capability)
    except (AttributeError, ValueError):
        return 0.0


class _Attention:
    """Attention's options, and the implementations, each a method by its name."""

    def __init__(
        self,
        scale: float,
        window: Array | int | None,
        softcap: float | None,
        local_window: int | None,
    ) -> None:
        self.scale = scale
        self.window = window
        self.softcap = softcap
        self.local_window = local_window

    def choose(self, query_BTNH: Array) -> Implementation:
        """The implementation of this platform, or the reference where that can't do it."""
        batch, tokens, heads, _ = query_BTNH.shape
        pairs = batch * tokens**2
        candidates: dict[str, dict[Implementation, int]] = {
            "gpu": {"cudnn": pairs * query_BTNH.dtype.itemsize, "xla": pairs * heads * 4},
            "tpu": {"splash": 0},
        }
        for name, held_bytes in candidates.get(_platform(), {}).items():
            if held_bytes <= _DENSE_BYTES and self.refusal(name, query_BTNH) is None:
                return name
        return "reference"

    def refusal(self, name: Implementation, query_BTNH: Array) -> str | None:
        """Why an implementation can't be used; None if it can."""
        size = query_BTNH.shape[-1]
        platform = _platform()
        if name in ("xla", "cudnn") and self.softcap is not None:
            return f"jax.nn.dot_product_attention has no soft cap, and softcap is {self.softcap}"
        if name == "cudnn":
            capability = _compute_capability()
            largest = 256 if capability >= 9 else 128
            if capability < 8:
                found = f"compute capability {capability}" if capability else f"platform {platform}"
                return f"cuDNN needs an NVIDIA GPU of compute capability >= 8.0, got {found}"
            if query_BTNH.dtype not in (jnp.bfloat16, jnp.float16):
                return f"cuDNN needs bfloat16 or float16, got {query_BTNH.dtype}"
            if size % 8 or size > largest:
                return f"cuDNN needs a head size <= {largest} that 8 divides, got {size}"
        if name == "splash":
            if platform not in ("tpu", "cpu"):
                return (
                    f"splash attention needs a TPU (or a CPU, which interprets it), got {platform}"
                )
            if not isinstance(self.window, int | None) and self.local_window is None:
                return "splash attention needs local_window where window is traced"
        return None

    def reference(self, query: Array, key: Array, value: Array, segments: Array) -> Array:
        """Plain JAX, memory linear in T."""
        return blocked_attention(
            query,
            key,
            value,
            segments,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
        )

    def xla(self, query: Array, key: Array, value: Array, segments: Array) -> Array:
        """JAX's own, with every score held."""
        mask = segments[:, None, :, None] == segments[:, None, None, :]
        if self.window is not None:
            order = jnp.arange(query.shape[1])
            mask &= order[:, None] - order < self.window
        return jax.nn.dot_product_attention(
            query, key, value, mask=mask, scale=self.scale, is_causal=True, implementation="xla"
        )

    def cudnn(self, query: Array, key: Array, value: Array, segments: Array) -> Array:
        """cuDNN's fused kernel, with the segments as a mask."""
        tokens = query.shape[1]
        if tokens % 2:  # its gradient needs an even number of tokens
            query, key, value, segments = (
                jnp.pad(x, ((0, 0), (0, 1), *((0, 0) for _ in x.shape[2:])))
                for x in (query, key, value, segments)
            )
        mask = segments[:, None, :, None] == segments[:, None, None, :]
        static = self.window if isinstance(self.window, int) else None
        if self.window is not None and static is None:
            order = jnp.arange(query.shape[1])
            mask &= order[:, None] - order < self.window
        mixed = jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            scale=self.scale,
            is_causal=True,
            # Keys from p - left on, p's own included.
            local_window_size=None if static is None else (static - 1, 0),
            implementation="cudnn",
        )
        return mixed[:, :tokens]

    def splash(self, query: Array, key: Array, value: Array, segments: Array) -> Array:
        """JAX's Pallas kernel for TPUs."""
        tokens = query.shape[1]
        padding = -tokens % _LANES
        query, key, value, segments = (
            jnp.pad(x, ((0, 0), (0, padding), *((0, 0) for _ in x.shape[2:])))
            for x in (query, key, value, segments)
        )
        # The kernel has no scale. [B, heads, T, H].
        query = (query.astype(jnp.float32) * self.scale).astype(query.dtype)
        arguments = (query.swapaxes(1, 2), key.swapaxes(1, 2), value.swapaxes(1, 2), segments)
        whole = functools.partial(_splash, window=None, softcap=self.softcap)
        if self.window is None:
            mixed = whole(*arguments)
        elif isinstance(self.window, int):
            mixed = _splash(*arguments, window=self.window, softcap=self.softcap)
        else:
            local = functools.partial(_splash, window=self.local_window, softcap=self.softcap)
            mixed = jax.lax.cond(self.window < tokens, local, whole, *arguments)
        return mixed.swapaxes(1, 2)[:, :tokens]


def _splash(
    query_BNTH: Array,
    key_BKTH: Array,
    value_BKTH: Array,
    segments_BT: Array,
    *,
    window: int | None,
    softcap: float | None,
) -> Array:
    heads, tokens = query_BNTH.shape[1:3]
    shape = (tokens, tokens)
    mask = splash_mask.CausalMask(shape)
    if window is not None and window < tokens:
        mask = splash_mask.LocalMask(shape, (window - 1, 0), 0)
    # Large blocks keep the matrix unit busy; 512 is what JAX's own users settled on.
    block = next(size for size in (512, 256, _LANES) if tokens % size == 0)
    kernel = splash_kernel.make_splash_mha_single_device(
        mask=splash_mask.MultiHeadMask([mask] * heads),
        block_sizes=splash_kernel.BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        attn_logits_soft_cap=softcap,
        interpret=_platform() != "tpu",
    )

    def row(query_NTH: Array, key_KTH: Array, value_KTH: Array, segments_T: Array) -> Array:
        ids = splash_kernel.SegmentIds(segments_T, segments_T)
        mixed_NTH = kernel(query_NTH, key_KTH, value_KTH, ids)
        assert isinstance(mixed_NTH, Array)  # no residuals were asked for
        return mixed_NTH

    return jax.vmap(row)(query_BNTH, key_BKTH, value_BKTH, segments_BT)
