"""Attention of packed rows, for training: one function, an implementation for each platform.

Axes: B rows, T tokens, N query heads, K key-value heads, G = N / K, H head.

A row holds trees, laid out depth first (`tree.py`). Key a is seen by query n exactly when a <= n < ends[a]:
one number a token says who its descendants are. Sequences are trees without branches.

| implementation | where | what it can't do |
|---|---|---|
| reference | anywhere; memory linear in T (`attention_reference.py`) | |
| native | CPU, in C; memory linear in T (`attention_native.py`) | soft caps; heads of broken vectors |
| xla | anywhere; holds [B, N, T, T] scores | soft caps |
| cudnn | GPU; holds a [B, T, T] mask | soft caps, float32, heads that cuDNN has no kernel for |
| splash | TPU; a CPU interprets it; a [B, T, T] mask if branched | else a traced window of unknown size |

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
from gymllm_trainers.models import attention_native
from gymllm_trainers.models.attention_reference import blocked_attention
from gymllm_trainers.models.sharding import ROW_AXES, on_whole_rows

Implementation = Literal["auto", "reference", "native", "xla", "cudnn", "splash"]

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
    ends_BT: Array,
    *,
    positions_BT: Array | None = None,
    scale: float,
    window: Array | int | None = None,
    softcap: float | None = None,
    local_window: int | None = None,
    branched: bool = True,
    implementation: Implementation = "auto",
    pieces: int = 1,
) -> Array:
    """Grouped-query attention of packed rows, each token to its ancestors; softmax in float32.

    Differentiable once, in reverse, with respect to queries, keys and values.

    Args:
        query_BTNH: Queries, after RoPE; float32, bfloat16 or float16. Head n uses key-value head n // G.
        key_BTKH: Keys, of the same dtype.
        value_BTKH: Values, of the same dtype.
        ends_BT: Index in the row after each token's last descendant, int32: key a is seen by queries a to
            ends - 1. 0 is padding. `ends_of_segments` makes it for sequences side by side.
        positions_BT: Each token's depth in its tree, int32, which a window counts in; None: its index in the
            row, which does where rows are not branched.
        scale: Scores are multiplied by it.
        window: A query at position p sees keys at positions > p - window; None: all before it. May be an
            int32 scalar that is traced, as where layers are scanned.
        softcap: Scores become softcap * tanh(score / softcap) (Gemma 2, sec. 2 of arXiv:2408.00118).
        local_window: The one size that a traced `window` has where it is less than T. Splash attention
            needs it, as its windows are compiled in; others don't look at it.
        branched: Whether a row may hold trees with branches; False is a promise that lets splash attention
            work without a mask, and cuDNN skip what is out of a window.
        implementation: See the table above; "auto" takes the platform's, or the reference if that can't.
        pieces: In how many consecutive rows each row comes, held by the devices along the mesh's "context"
            (`sharding.fold_context`).

    Returns:
        [B, T, N, H] in the queries' dtype; 0 for padding.

    Raises:
        ConfigError: An implementation that was asked for by name can't do this, or a window < 1, a
            soft cap <= 0, or heads that don't divide.
    """
    chex.assert_rank([query_BTNH, key_BTKH, value_BTKH, ends_BT], [4, 4, 4, 2])
    chex.assert_equal_shape([key_BTKH, value_BTKH])
    if positions_BT is not None:
        chex.assert_equal_shape([ends_BT, positions_BT])
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
        query: Array, key: Array, value: Array, ends: Array, positions: Array, window: Array
    ) -> Array:
        how = _Attention(
            scale=scale,
            window=static_window if traced is None else window,
            softcap=softcap,
            local_window=local_window,
            branched=branched,
        )
        # Chosen here, where shapes are one device's own.
        chosen = how.choose(query) if implementation == "auto" else implementation
        if (reason := how.refusal(chosen, query)) is not None:
            raise ConfigError(
                f"attention implementation {chosen!r} can't be used: {reason}. "
                f'Use "auto" or "reference".'
            )
        mixed = getattr(how, chosen)(query, key, value, ends, positions)
        # What padding attends to differs between implementations; nobody may come to depend on it.
        return jnp.where((ends != 0)[:, :, None, None], mixed, 0).astype(query.dtype)

    static_window = window if isinstance(window, int) else None
    traced = None
    if window is not None and static_window is None:
        traced = jnp.asarray(window, jnp.int32)
    if positions_BT is None:
        order_T = jnp.arange(ends_BT.shape[1], dtype=jnp.int32)
        positions_BT = jnp.broadcast_to(order_T, ends_BT.shape)
    arguments = (
        query_BTNH,
        key_BTKH,
        value_BTKH,
        ends_BT,
        positions_BT,
        jnp.int32(0) if traced is None else traced,
    )
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
    tokens = PartitionSpec(rows or None, None)
    return jax.shard_map(
        on_whole_rows(attend, pieces),
        in_specs=(spec, spec, spec, tokens, tokens, PartitionSpec()),
        out_specs=spec,
        axis_names=set(free),
        check_vma=False,  # Pallas calls don't say over which axes their results vary
    )(*arguments)


def ends_of_segments(segments_BT: Array) -> Array:
    """What `packed_attention` takes, for sequences side by side.

    Args:
        segments_BT: Which sequence of its row a token belongs to, int32; a sequence lies in one piece, and
            0 is padding.

    Returns:
        Index in the row after the token's sequence, int32; 0 for padding.
    """
    tokens = segments_BT.shape[1]
    order_T = jnp.arange(1, tokens + 1, dtype=jnp.int32)
    last_BT = jnp.diff(segments_BT, axis=1, append=-1) != 0
    # The nearest last token from here on is the sequence's own.
    ends_BT = jax.lax.cummin(jnp.where(last_BT, order_T, tokens), axis=1, reverse=True)
    return jnp.where(segments_BT == 0, 0, ends_BT)


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
        *,
        scale: float,
        window: Array | int | None,
        softcap: float | None,
        local_window: int | None,
        branched: bool,
    ) -> None:
        self.scale = scale
        self.window = window
        self.softcap = softcap
        self.local_window = local_window
        self.branched = branched

    def choose(self, query_BTNH: Array) -> Implementation:
        """The implementation of this platform, or the reference where that can't do it."""
        batch, tokens, heads, _ = query_BTNH.shape
        pairs = batch * tokens**2
        candidates: dict[str, dict[Implementation, int]] = {
            "gpu": {"cudnn": pairs * query_BTNH.dtype.itemsize, "xla": pairs * heads * 4},
            "tpu": {"splash": 0},
            "cpu": {"native": 0},
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
        if name == "native":
            if platform != "cpu":
                return f"it is for CPUs, got {platform}"
            if self.softcap is not None:
                return f"it has no soft cap, and softcap is {self.softcap}"
            return attention_native.refusal(size)
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
            static = self.branched or isinstance(self.window, int | None)
            if not static and self.local_window is None:
                return "splash attention needs local_window where window is traced"
        return None

    def reference(
        self, query: Array, key: Array, value: Array, ends: Array, positions: Array
    ) -> Array:
        """Plain JAX, memory linear in T."""
        return blocked_attention(
            query,
            key,
            value,
            ends,
            positions_BT=positions,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
        )

    def native(
        self, query: Array, key: Array, value: Array, ends: Array, positions: Array
    ) -> Array:
        """In C, where only what some query sees is computed."""
        return attention_native.native_attention(
            query, key, value, ends, positions, scale=self.scale, window=self.window
        )

    def xla(self, query: Array, key: Array, value: Array, ends: Array, positions: Array) -> Array:
        """JAX's own, with every score held."""
        mask = self._visible(ends, positions)[:, None]
        return jax.nn.dot_product_attention(
            query, key, value, mask=mask, scale=self.scale, implementation="xla"
        )

    def cudnn(self, query: Array, key: Array, value: Array, ends: Array, positions: Array) -> Array:
        """cuDNN's fused kernel, with a mask."""
        tokens = query.shape[1]
        # Its gradient needs an even number of tokens.
        query, key, value, ends, positions = _padded(tokens % 2, query, key, value, ends, positions)
        static = None if self.branched or not isinstance(self.window, int) else self.window
        mixed = jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=self._visible(ends, positions)[:, None],
            scale=self.scale,
            is_causal=True,
            # Keys from p - left on, p's own included: more that needn't be looked at.
            local_window_size=None if static is None else (static - 1, 0),
            implementation="cudnn",
        )
        return mixed[:, :tokens]

    def splash(
        self, query: Array, key: Array, value: Array, ends: Array, positions: Array
    ) -> Array:
        """JAX's Pallas kernel for TPUs."""
        tokens = query.shape[1]
        query, key, value, ends, positions = _padded(
            -tokens % _LANES, query, key, value, ends, positions
        )
        # The kernel has no scale. [B, heads, T, H].
        query = (query.astype(jnp.float32) * self.scale).astype(query.dtype)
        arrays = (query.swapaxes(1, 2), key.swapaxes(1, 2), value.swapaxes(1, 2))
        if self.branched:
            mixed = _splash_branched(*arrays, self._visible(ends, positions), softcap=self.softcap)
            return mixed.swapaxes(1, 2)[:, :tokens]
        # Tokens of one sequence, and they alone, have the same end.
        whole = functools.partial(_splash, window=None, softcap=self.softcap)
        if self.window is None:
            mixed = whole(*arrays, ends)
        elif isinstance(self.window, int):
            mixed = _splash(*arrays, ends, window=self.window, softcap=self.softcap)
        else:
            local = functools.partial(_splash, window=self.local_window, softcap=self.softcap)
            mixed = jax.lax.cond(self.window < tokens, local, whole, *arrays, ends)
        return mixed.swapaxes(1, 2)[:, :tokens]

    def _visible(self, ends_BT: Array, positions_BT: Array) -> Array:
        """Which keys a query sees, [B, queries, keys], bool; padding sees itself, as softmax needs a key."""
        order_T = jnp.arange(ends_BT.shape[1], dtype=jnp.int32)
        visible = (order_T[:, None] >= order_T) & (order_T[:, None] < ends_BT[:, None])
        if self.window is not None:
            visible &= positions_BT[:, :, None] - positions_BT[:, None] < self.window
        return visible | (order_T[:, None] == order_T)


def _padded(count: int, *arrays_BT: Array) -> list[Array]:
    """Arrays with so many tokens of padding behind."""
    return [
        jnp.pad(x_BT, ((0, 0), (0, count), *((0, 0) for _ in x_BT.shape[2:]))) for x_BT in arrays_BT
    ]


def _splash(
    query_BNTH: Array,
    key_BKTH: Array,
    value_BKTH: Array,
    segments_BT: Array,
    *,
    window: int | None,
    softcap: float | None,
) -> Array:
    """Sequences side by side: the mask is computed in the kernel."""
    heads, tokens = query_BNTH.shape[1:3]
    shape = (tokens, tokens)
    mask = splash_mask.CausalMask(shape)
    if window is not None and window < tokens:
        mask = splash_mask.LocalMask(shape, (window - 1, 0), 0)
    kernel = splash_kernel.make_splash_mha_single_device(
        mask=splash_mask.MultiHeadMask([mask] * heads),
        block_sizes=_block_sizes(tokens),
        attn_logits_soft_cap=softcap,
        interpret=_platform() != "tpu",
    )

    def row(query_NTH: Array, key_KTH: Array, value_KTH: Array, segments_T: Array) -> Array:
        ids = splash_kernel.SegmentIds(segments_T, segments_T)
        mixed_NTH = kernel(query_NTH, key_KTH, value_KTH, ids)
        assert isinstance(mixed_NTH, Array)  # no residuals were asked for
        return mixed_NTH

    return jax.vmap(row)(query_BNTH, key_BKTH, value_BKTH, segments_BT)


def _splash_branched(
    query_BNTH: Array,
    key_BKTH: Array,
    value_BKTH: Array,
    visible_BTT: Array,
    *,
    softcap: float | None,
) -> Array:
    """Trees: the mask is an array, and blocks that are empty in it are skipped.

    The kernel compares segments for being equal, which can't say who descends from whom. One mask serves all
    heads.
    """

    def row(query_NTH: Array, key_KTH: Array, value_KTH: Array, visible_TT: Array) -> Array:
        kernel = splash_kernel.make_splash_mha_single_device(
            mask=visible_TT[None],
            block_sizes=_block_sizes(visible_TT.shape[0]),
            attn_logits_soft_cap=softcap,
            interpret=_platform() != "tpu",
        )
        # Made inside jit, this mark comes out as an array, which the kernel then can't branch on.
        for name in ("fwd_mask_info", "dq_mask_info", "dkv_mask_info"):
            info = getattr(kernel, name)
            setattr(kernel, name, info._replace(is_dynamic_mask=True))
        mixed_NTH = kernel(query_NTH, key_KTH, value_KTH)
        assert isinstance(mixed_NTH, Array)  # no residuals were asked for
        return mixed_NTH

    return jax.vmap(row)(query_BNTH, key_BKTH, value_BKTH, visible_BTT)


def _block_sizes(tokens: int) -> splash_kernel.BlockSizes:
    # Large blocks keep the matrix unit busy; 512 is what JAX's own users settled on.
    block = next(size for size in (512, 256, _LANES) if tokens % size == 0)
    return splash_kernel.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
