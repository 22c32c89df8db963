"""One decoder for Llama and Qwen3: packed for training, cached for generation.

Axes: B rows, T tokens, R engine rows, C tokens of a chunk, S slots, M cache length, L layers, D model,
N query heads, K key-value heads, G = N / K, H head, F feed-forward, V vocabulary. Layer parameters are
stacked on a leading L axis and scanned, so a program's size does not grow with depth.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from gymllm_trainers.models.config import DecoderConfig

LinearName = Literal["query", "key", "value", "output", "gate", "up", "down"]
LINEARS: tuple[LinearName, ...] = ("query", "key", "value", "output", "gate", "up", "down")


_HIDDEN = -1e30
"""Added to the score of a key that a query must not see; finite, so that no row is all infinities."""


class LoRAParam(nnx.Param[Array]):
    """A low-rank adapter's parameter: what is trained when the base is frozen."""


class KVCache(NamedTuple):
    """Keys (after RoPE) and values of every slot; both [L, S, K, M, H]."""

    key: Array
    value: Array


def init_cache(config: DecoderConfig, *, slots: int, length: int, dtype: DTypeLike) -> KVCache:
    """An empty cache for `slots` conversations of up to `length` tokens."""
    shape = (
        config.num_hidden_layers,
        slots,
        config.num_key_value_heads,
        length,
        config.head_dim,
    )
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def linear_shapes(config: DecoderConfig) -> dict[LinearName, tuple[int, int]]:
    """(in, out) of each linear of a layer."""
    d, f = config.hidden_size, config.intermediate_size
    query = config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    return {
        "query": (d, query),
        "key": (d, key),
        "value": (d, key),
        "output": (query, d),
        "gate": (d, f),
        "up": (d, f),
        "down": (f, d),
    }


class Layers(nnx.Module):
    """Every layer's parameters, stacked: kernels [L, in, out], norms [L, D] or [L, H]."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        count = config.num_hidden_layers
        # Residual branches are scaled down with depth, so that a deep stack starts near identity.
        scales = {"output": 0.02 / (2 * count) ** 0.5, "down": 0.02 / (2 * count) ** 0.5}
        for name, shape in linear_shapes(config).items():
            noise = jax.random.truncated_normal(rngs.params(), -3, 3, (count, *shape), jnp.float32)
            setattr(self, name, nnx.Param((scales.get(name, 0.02) * noise).astype(dtype)))
        self.attention_norm = nnx.Param(jnp.ones((count, config.hidden_size), dtype))
        self.mlp_norm = nnx.Param(jnp.ones((count, config.hidden_size), dtype))
        if config.qk_norm:
            self.query_norm = nnx.Param(jnp.ones((count, config.head_dim), dtype))
            self.key_norm = nnx.Param(jnp.ones((count, config.head_dim), dtype))


class Adapters(nnx.Module):
    """LoRA (Hu et al. 2021, arXiv:2106.09685): W + (alpha / rank) A B; A [L, in, r], B [L, r, out]."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rank: int,
        alpha: float,
        linears: tuple[LinearName, ...],
        rngs: nnx.Rngs,
        dtype: DTypeLike,
    ) -> None:
        self.scale = alpha / rank
        self.linears = linears
        for name in linears:
            fan_in, fan_out = linear_shapes(config)[name]
            count = config.num_hidden_layers
            noise = jax.random.normal(rngs.params(), (count, fan_in, rank), jnp.float32)
            setattr(self, f"{name}_a", LoRAParam((noise / fan_in**0.5).astype(dtype)))
            setattr(self, f"{name}_b", LoRAParam(jnp.zeros((count, rank, fan_out), dtype)))


class Decoder(nnx.Module):
    """A decoder-only transformer. Parameters keep `dtype`; arithmetic is done in `compute_dtype`.

    With `remat`, training keeps one activation a layer and recomputes the rest in the backward pass.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        compute_dtype: DTypeLike = jnp.float32,
        remat: bool = False,
    ) -> None:
        self.config = config
        self.compute_dtype = compute_dtype
        self.remat = remat
        shape = (config.vocab_size, config.hidden_size)
        noise = jax.random.truncated_normal(rngs.params(), -3, 3, shape, jnp.float32)
        self.embedding = nnx.Param((0.02 * noise).astype(dtype))
        self.layers = Layers(config, rngs=rngs, dtype=dtype)
        self.norm = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        if not config.tie_word_embeddings:
            noise = jax.random.truncated_normal(rngs.params(), -3, 3, shape[::-1], jnp.float32)
            self.head = nnx.Param((0.02 * noise).astype(dtype))
        self.adapters: Adapters | None = nnx.data(None)

    def add_adapters(
        self,
        *,
        rank: int,
        alpha: float,
        linears: tuple[LinearName, ...] = LINEARS,
        rngs: nnx.Rngs,
    ) -> None:
        """Adds LoRA adapters that start as the identity."""
        self.adapters = Adapters(
            self.config,
            rank=rank,
            alpha=alpha,
            linears=linears,
            rngs=rngs,
            dtype=self.norm[...].dtype,
        )

    def hidden(self, ids_BT: Array, positions_BT: Array, segments_BT: Array) -> Array:
        """Final hidden states of packed rows.

        Args:
            ids_BT: Token ids, int32.
            positions_BT: Position of each token in its own sequence, int32, from 0.
            segments_BT: Which sequence of its row a token belongs to, int32; 0 is padding. A token
                attends to the tokens of its own sequence that come before it.

        Returns:
            [B, T, D] in `compute_dtype`, after the final norm.
        """
        rope = _rope(positions_BT, self.config)

        def layer(x_BTD: Array, weights: dict[str, Array]) -> tuple[Array, None]:
            query, key, value = self._project(x_BTD, weights, rope)
            mixed = packed_attention(query, key.swapaxes(1, 2), value.swapaxes(1, 2), segments_BT)
            return self._finish(x_BTD, mixed, weights), None

        body = jax.checkpoint(layer) if self.remat else layer
        x_BTD, _ = jax.lax.scan(body, self._embed(ids_BT), self._stacked())
        return _rms_norm(x_BTD, self.norm[...], self.config.rms_norm_eps)

    def extend(
        self, cache: KVCache, ids_RC: Array, slots_R: Array, start_R: Array, count_R: Array
    ) -> tuple[Array, KVCache]:
        """Appends a chunk to some slots.

        Args:
            cache: Donate it: it is updated in place.
            ids_RC: Next tokens of each row, int32; those past `count_R` are ignored.
            slots_R: Each row's slot, int32; rows that are not in use point past the last slot.
            start_R: Tokens that each row's slot already holds.
            count_R: Tokens of the chunk, 1 <= count <= C (0 for a row not in use).

        Returns:
            The last valid token's final hidden state [R, D], and the cache.
        """
        config = self.config
        length = cache.key.shape[3]
        offsets_C = jnp.arange(ids_RC.shape[1])
        positions_RC = start_R[:, None] + offsets_C
        # A write past the end is dropped: that is where padding goes.
        write_RC = jnp.where(offsets_C < count_R[:, None], positions_RC, length)
        rope = _rope(positions_RC, config)
        windows = attention_windows(length)
        held = jnp.max(start_R + count_R)
        window = jnp.searchsorted(jnp.array(windows), held)

        def attend(window: int, query: Array, cache: KVCache, index: Array) -> Array:
            """Attention to the first `window` tokens of each row's slot."""
            key, value = (
                jax.lax.dynamic_index_in_dim(part, index, keepdims=False)[:, :, :window]
                .at[slots_R]
                .get(mode="clip")
                for part in cache
            )
            visible_RCM = jnp.arange(window) <= positions_RC[:, :, None]
            return attention(query, key, value, visible_RCM)

        branches = [functools.partial(attend, window) for window in windows]

        def layer(
            carry: tuple[Array, KVCache], inputs: tuple[Array, dict[str, Array]]
        ) -> tuple[tuple[Array, KVCache], None]:
            x_RCD, cache = carry
            index, weights = inputs
            query, key, value = self._project(x_RCD, weights, rope)
            where = (index, slots_R[:, None], slice(None), write_RC)
            cache = KVCache(
                cache.key.at[where].set(key.astype(cache.key.dtype), mode="drop"),
                cache.value.at[where].set(value.astype(cache.value.dtype), mode="drop"),
            )
            # What no row has reached is not looked at.
            mixed = jax.lax.switch(window, branches, query, cache, index)
            return (self._finish(x_RCD, mixed, weights), cache), None

        count = jnp.arange(config.num_hidden_layers)
        (x_RCD, cache), _ = jax.lax.scan(
            layer, (self._embed(ids_RC), cache), (count, self._stacked())
        )
        last = jnp.maximum(count_R - 1, 0)[:, None, None]
        x_RD = jnp.take_along_axis(x_RCD, last, axis=1)[:, 0]
        return _rms_norm(x_RD, self.norm[...], config.rms_norm_eps), cache

    def logits(self, hidden: Array) -> Array:
        """float32 logits [..., V] of final hidden states [..., D]."""
        return jnp.dot(hidden, self.head_DV, preferred_element_type=jnp.float32)

    @property
    def head_DV(self) -> Array:
        """The output projection, [D, V], in `compute_dtype`."""
        tied = self.config.tie_word_embeddings
        kernel = self.embedding[...].T if tied else self.head[...]
        return kernel.astype(self.compute_dtype)

    def _embed(self, ids: Array) -> Array:
        return self.embedding[...].at[ids].get(mode="clip").astype(self.compute_dtype)

    def _stacked(self) -> dict[str, Array]:
        """Parameters that the layers are scanned over."""
        stacked = {
            name: param[...] for name, param in nnx.to_pure_dict(nnx.state(self.layers)).items()
        }
        if self.adapters is not None:
            stacked |= nnx.to_pure_dict(nnx.state(self.adapters, LoRAParam))
        return stacked

    def _linear(self, x: Array, weights: dict[str, Array], name: LinearName) -> Array:
        # Two axes, not three: XLA's gradient of a kernel that is contracted over two axes transposes its
        # operands first, which halves a CPU's rate.
        flat = x.reshape(-1, x.shape[-1])
        out = flat @ weights[name].astype(x.dtype)
        if self.adapters is not None and name in self.adapters.linears:
            down, up = weights[f"{name}_a"].astype(x.dtype), weights[f"{name}_b"].astype(x.dtype)
            out += self.adapters.scale * ((flat @ down) @ up)
        return out.reshape(*x.shape[:-1], -1)

    def _project(
        self, x: Array, weights: dict[str, Array], rope: tuple[Array, Array]
    ) -> tuple[Array, Array, Array]:
        """Query [B, T, N, H], key and value [B, T, K, H] of a layer, rotated."""
        config = self.config
        x = _rms_norm(x, weights["attention_norm"], config.rms_norm_eps)

        def heads(name: LinearName, count: int) -> Array:
            return self._linear(x, weights, name).reshape(*x.shape[:-1], count, config.head_dim)

        query = heads("query", config.num_attention_heads)
        key = heads("key", config.num_key_value_heads)
        if config.qk_norm:
            query = _rms_norm(query, weights["query_norm"], config.rms_norm_eps)
            key = _rms_norm(key, weights["key_norm"], config.rms_norm_eps)
        return _rotate(query, rope), _rotate(key, rope), heads("value", config.num_key_value_heads)

    def _finish(self, x: Array, mixed: Array, weights: dict[str, Array]) -> Array:
        """Adds the attention's and the feed-forward's residuals."""
        x = x + self._linear(mixed, weights, "output")
        inner = _rms_norm(x, weights["mlp_norm"], self.config.rms_norm_eps)
        gate = jax.nn.silu(self._linear(inner, weights, "gate"))
        return x + self._linear(gate * self._linear(inner, weights, "up"), weights, "down")


def packed_attention(
    query_BTNH: Array, key_BKTH: Array, value_BKTH: Array, segments_BT: Array, *, block: int = 192
) -> Array:
    """Causal attention inside each segment of packed rows; returns [B, T, N * H].

    Queries go in blocks, each against the keys up to its own end: what causality hides from a whole block
    is never computed.
    """
    tokens = query_BTNH.shape[1]
    order = jnp.arange(tokens)
    parts: list[Array] = []
    for start in range(0, tokens, block):
        end = min(start + block, tokens)
        same = segments_BT[:, start:end, None] == segments_BT[:, None, :end]
        visible = same & (order[start:end, None] >= order[:end])
        keys, values = key_BKTH[:, :, :end], value_BKTH[:, :, :end]
        parts.append(attention(query_BTNH[:, start:end], keys, values, visible))
    return jnp.concatenate(parts, axis=1)


def attention(query_BTNH: Array, key_BKMH: Array, value_BKMH: Array, visible_BTM: Array) -> Array:
    """Grouped-query attention, softmax in float32; returns [B, T, N * H]."""
    batch, tokens, heads, size = query_BTNH.shape
    groups = key_BKMH.shape[1]
    # [B, K, G*T, H]: one matrix product a key-value head instead of one a query head.
    query = query_BTNH.reshape(batch, tokens, groups, heads // groups, size).transpose(
        0, 2, 3, 1, 4
    )
    query = query.reshape(batch, groups, -1, size) * size**-0.5
    scores = jnp.einsum("bkqh,bkmh->bkqm", query, key_BKMH, preferred_element_type=jnp.float32)
    # Added, not selected: the gradient passes through as it is.
    hidden_BTM = jnp.where(visible_BTM, 0.0, _HIDDEN)
    scores = scores.reshape(batch, groups, heads // groups, tokens, -1) + hidden_BTM[:, None, None]
    shares = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    shares = shares.reshape(batch, groups, (heads // groups) * tokens, -1)
    # Divided after the product with the values: H numbers a query instead of M.
    mixed = jnp.einsum("bkqm,bkmh->bkqh", shares.astype(value_BKMH.dtype), value_BKMH)
    mixed = mixed / jnp.sum(shares, axis=-1, keepdims=True)
    mixed = mixed.reshape(batch, groups, heads // groups, tokens, size).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(batch, tokens, heads * size).astype(query_BTNH.dtype)


def attention_windows(length: int) -> tuple[int, ...]:
    """Up to four lengths that a cache's attention is compiled for, the last one its own."""
    step = max(-(-length // 128) * 32, 32)
    return (*range(step, length, step), length)


def _rms_norm(x: Array, scale: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale.astype(jnp.float32)).astype(x.dtype)


def _rope(positions: Array, config: DecoderConfig) -> tuple[Array, Array]:
    """Cosines and sines [..., 1, H/2], float32 (Su et al. 2021, arXiv:2104.09864)."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: Array, rope: tuple[Array, Array]) -> Array:
    """Rotates the two halves of each head (the hub's layout, not the interleaved one)."""
    cos, sin = rope
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(
        x.dtype
    )


def merge_adapters(decoder: Decoder) -> Decoder:
    """A copy with the adapters folded into the kernels, and no adapters. Jit it."""
    graph, state = nnx.split(decoder)
    merged = nnx.merge(graph, state)
    adapters = merged.adapters
    if adapters is not None:
        for name in adapters.linears:
            kernel: nnx.Param[Array] = getattr(merged.layers, name)
            down: Array = getattr(adapters, f"{name}_a")[...]
            up: Array = getattr(adapters, f"{name}_b")[...]
            delta = adapters.scale * jnp.einsum("lir,lro->lio", down, up)
            # A new parameter: the one that is there is the original's, unless this is traced.
            folded = nnx.Param(kernel[...] + delta.astype(kernel[...].dtype))
            setattr(merged.layers, name, folded)
        merged.adapters = None
    return merged
