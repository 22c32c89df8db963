"""One decoder for every family: packed for training, paged or cached for generation.

Axes: B rows, T tokens, R engine rows, C tokens of a chunk, S slots, M cache length, L layers, D model,
N query heads, K key-value heads, G = N / K, H head, F feed-forward, E experts, V vocabulary. Layer parameters
are stacked on a leading L axis and scanned, so a program's size does not grow with depth; what differs from
layer to layer (a window, RoPE's base) is scanned with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, TypeVar, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from gymllm.errors import ConfigError
from gymllm_trainers.models.attention import packed_attention
from gymllm_trainers.models.config import DecoderConfig, layer_shapes, rope_frequencies
from gymllm_trainers.models.experts import mix_experts
from gymllm_trainers.models.product import product
from gymllm_trainers.models.sharding import (
    constrain_embedded,
    constrain_ids,
    constrain_rows,
    context_pieces,
    fold_context,
    unfold_context,
)

LinearName = Literal["query", "key", "value", "output", "gate", "up", "down"]
LINEARS: tuple[LinearName, ...] = get_args(LinearName)
RematPolicy = Literal["none", "full", "dots", "offload"]
_Carry = TypeVar("_Carry")
_State = TypeVar("_State")
_Inputs = TypeVar("_Inputs")

_RESIDUAL = ("output", "down", "experts_down")
_HIDDEN = -1e30
"""Added to the score of a key that a query must not see; finite, so that no row is all infinities."""


class Attend(Protocol[_Carry]):
    """Attention of one layer, as the caller of `Decoder.trunk` brings it."""

    def __call__(
        self,
        layer: Array,
        window: Array | None,
        query: Array,
        key: Array,
        value: Array,
        carry: _Carry,
    ) -> tuple[Array, _Carry]:
        """Mixes values.

        Args:
            layer: Number of the layer, int32 scalar.
            window: How many tokens a query sees, its own included, int32 scalar, at least `NO_WINDOW` where
                it sees all before it; None in a model whose layers all do.
            query: [..., T, N, H], rotated.
            key: [..., T, K, H], rotated.
            value: [..., T, K, H].
            carry: What the layer before returned.

        Returns:
            What was mixed [..., T, N, H], and the carry for the next layer.
        """
        ...


class Linear(Protocol):
    """A product with one layer's kernel, where the caller of `Decoder.trunk` brings its own."""

    def __call__(self, x_MI: Array, kernels_LIO: Array, layer: Array) -> Array:
        """[M, O] = x @ kernels[layer]."""
        ...


class LoRAParam(nnx.Param[Array]):
    """A low-rank adapter's parameter: what is trained when the base is frozen."""


def linear_shapes(config: DecoderConfig) -> dict[LinearName, tuple[int, int]]:
    """(in, out) of each linear of a layer; experts are not among them."""
    shapes = layer_shapes(config)
    return {name: (shapes[name][0], shapes[name][1]) for name in LINEARS if name in shapes}


class Layers(nnx.Module):
    """Every layer's parameters, `layer_shapes` of them, stacked on a leading L axis."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        count = config.num_hidden_layers
        # Residual branches are scaled down with depth, so that a deep stack starts near identity.
        residual = 0.02 / (2 * count) ** 0.5
        for name, shape in layer_shapes(config).items():
            if name.endswith("_norm"):
                values = jnp.full((count, *shape), 0 if config.norm_offset else 1, dtype)
            elif name.endswith("_bias"):
                values = jnp.zeros((count, *shape), dtype)
            else:
                key = rngs.params()
                noise = jax.random.truncated_normal(key, -3, 3, (count, *shape), jnp.float32)
                spread = residual if name in _RESIDUAL else 0.02
                values = (spread * noise).astype(dtype)
            setattr(self, name, nnx.Param(values))


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

    `remat` says what training keeps of a layer for the backward pass: everything ("none"); its input alone,
    recomputing the rest ("full"); its input and its products with kernels ("dots"); or those in the host's
    memory ("offload").
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        compute_dtype: DTypeLike = jnp.float32,
        remat: RematPolicy = "none",
    ) -> None:
        self.config = config
        self.compute_dtype = compute_dtype
        self.remat: RematPolicy = remat
        shape = (config.vocab_size, config.hidden_size)
        noise = jax.random.truncated_normal(rngs.params(), -3, 3, shape, jnp.float32)
        self.embedding = nnx.Param((0.02 * noise).astype(dtype))
        self.layers = Layers(config, rngs=rngs, dtype=dtype)
        self.norm = nnx.Param(
            jnp.full((config.hidden_size,), 0 if config.norm_offset else 1, dtype)
        )
        if not config.tie_word_embeddings:
            noise = jax.random.truncated_normal(rngs.params(), -3, 3, shape[::-1], jnp.float32)
            self.head = nnx.Param((0.02 * noise).astype(dtype))
        self.adapters: Adapters | None = nnx.data(None)

    def add_adapters(
        self,
        *,
        rank: int,
        alpha: float,
        linears: tuple[LinearName, ...] | None = None,
        rngs: nnx.Rngs,
        dtype: DTypeLike | None = None,
    ) -> None:
        """Adds LoRA adapters that start as the identity.

        Args:
            rank: Columns of A and rows of B.
            alpha: What they add is scaled by alpha / rank.
            linears: Which linears of every layer; None: all that the model has.
            rngs: For A; B starts at zero.
            dtype: What they are kept in; None: what the other parameters are. They are trained, so float32
                keeps small updates that bfloat16 would round away.

        Raises:
            ConfigError: A linear that the model doesn't have, or a rank below 1.
        """
        present = tuple(linear_shapes(self.config))
        chosen = present if linears is None else linears
        absent = [name for name in chosen if name not in present]
        if absent:
            raise ConfigError(
                f"Adapters were asked for on {', '.join(absent)}; this model's linears are "
                f"{', '.join(present)} (experts take none)."
            )
        if rank < 1:
            raise ConfigError(f"The rank of adapters must be >= 1, got {rank}.")
        self.adapters = Adapters(
            self.config,
            rank=rank,
            alpha=alpha,
            linears=chosen,
            rngs=rngs,
            dtype=self.norm[...].dtype if dtype is None else dtype,
        )

    def trunk(
        self,
        ids: Array,
        positions: Array,
        attend: Attend[_Carry],
        carry: _Carry,
        *,
        linear: Linear | None = None,
    ) -> tuple[Array, _Carry]:
        """Runs every layer, with the caller's attention.

        Args:
            ids: Token ids, int32, of any shape [..., T].
            positions: Position of each token in its own sequence, from 0; the same shape.
            attend: Attention of one layer; see `Attend`.
            carry: Handed from layer to layer: a cache, or () where there is none.
            linear: Replaces the products with the kernels of `linear_shapes` and with adapters. They are
                then not scanned over: each call gets the whole stack and the layer's number, and may read
                the kernel in place.

        Returns:
            Hidden states after the final norm [..., T, D] in `compute_dtype`, and the last layer's carry.
        """
        config = self.config
        whole = rope(positions, config, local=False)
        local = whole
        if config.rope_local_theta is not None:
            local = rope(positions, config, local=True)
        stacked = self.stacked()
        kernels = {name: stacked.pop(name) for name in self._kernels() if linear}
        count = config.num_hidden_layers
        windows = None if config.windows is None else jnp.array(config.windows, jnp.int32)
        slides = jnp.array(config.sliding_layers or (False,) * count)

        def layer(
            state: tuple[Array, _Carry],
            inputs: tuple[Array, Array | None, Array, dict[str, Array]],
        ) -> tuple[tuple[Array, _Carry], None]:
            x, carry = state
            index, window, slides, weights = inputs
            rope = whole
            if local is not whole:
                rope = jax.tree.map(lambda a, b: jnp.where(slides, b, a), whole, local)
            own = _Layer(self, weights, index, kernels, linear)
            query, key, value = own.project(x, rope)
            mixed, carry = attend(index, window, query, key, value, carry)
            x = own.finish(x, mixed.reshape(*x.shape[:-1], -1))
            return (constrain_rows(x), carry), None

        body = _recomputed(layer, self.remat)
        inputs = (jnp.arange(count, dtype=jnp.int32), windows, slides, stacked)
        (x, carry), _ = jax.lax.scan(body, (self.embed(ids), carry), inputs)
        return self._norm(x, self.norm[...], in_order=linear is not None), carry

    def hidden(
        self, ids_BT: Array, positions_BT: Array, ends_BT: Array, *, branched: bool = True
    ) -> Array:
        """Final hidden states of packed rows of trees.

        Args:
            ids_BT: Token ids, int32.
            positions_BT: Depth of each token in its tree, int32, from 0: its position in its sequence.
            ends_BT: Index in the row after each token's last descendant, int32; 0 is padding. A token attends
                to its ancestors and itself. For one sequence a row it is the sequence's length, and
                `attention.ends_of_segments` makes it for several.
            branched: Whether a row may hold trees with branches; see `attention.packed_attention`.

        Returns:
            [B, T, D] in `compute_dtype`, after the final norm.
        """
        config = self.config
        pieces = context_pieces(ids_BT.shape)
        ids_BT, positions_BT, ends_BT = (
            fold_context(x, pieces) for x in (ids_BT, positions_BT, ends_BT)
        )

        def attend(
            layer: Array, window: Array | None, query: Array, key: Array, value: Array, carry: None
        ) -> tuple[Array, None]:
            mixed = packed_attention(
                query,
                key,
                value,
                ends_BT,
                positions_BT=positions_BT,
                scale=config.attention_scale,
                window=window,
                softcap=config.attention_softcap,
                local_window=config.sliding_window,
                branched=branched,
                pieces=pieces,
            )
            return mixed, carry

        return unfold_context(self.trunk(ids_BT, positions_BT, attend, None)[0], pieces)

    def logits(self, hidden: Array) -> Array:
        """float32 logits [..., V] of final hidden states [..., D], after the final soft cap."""
        return softcap(self.uncapped_logits(hidden), self.config.final_softcap)

    def uncapped_logits(self, hidden: Array) -> Array:
        """The same before the soft cap."""
        return jnp.dot(hidden, self.head_DV, preferred_element_type=jnp.float32)

    @property
    def head_DV(self) -> Array:
        """The output projection, [D, V], in `compute_dtype`."""
        tied = self.config.tie_word_embeddings
        kernel = self.embedding[...].T if tied else self.head[...]
        return kernel.astype(self.compute_dtype)

    def embed(self, ids: Array) -> Array:
        looked_up = self.embedding[...].at[constrain_ids(ids)].get(mode="clip")
        x = looked_up.astype(self.compute_dtype)
        if self.config.scale_embeddings:
            x *= jnp.array(self.config.hidden_size**0.5, x.dtype)
        return constrain_embedded(x)

    def _norm(self, x: Array, scale: Array, *, in_order: bool) -> Array:
        offset = 1.0 if self.config.norm_offset else 0.0
        eps = self.config.rms_norm_eps
        return rms_norm(x, scale, eps, offset=offset, in_order=in_order)

    def _kernels(self) -> list[str]:
        """Names of what x is multiplied with in every layer, adapters included."""
        names: list[str] = list(linear_shapes(self.config))
        if self.adapters is not None:
            names += [f"{name}_{part}" for name in self.adapters.linears for part in "ab"]
        return names

    def stacked(self) -> dict[str, Array]:
        """Parameters that the layers are scanned over."""
        stacked = {
            name: param[...] for name, param in nnx.to_pure_dict(nnx.state(self.layers)).items()
        }
        if self.adapters is not None:
            stacked |= nnx.to_pure_dict(nnx.state(self.adapters, LoRAParam))
        return stacked


class _Layer(NamedTuple):
    """One layer inside the scan: its own weights, and the stacks of those that are not scanned."""

    decoder: Decoder
    weights: dict[str, Array]
    number: Array
    kernels: dict[str, Array]
    linear: Linear | None

    def project(self, x: Array, rope: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Query [..., T, N, H], key and value [..., T, K, H], rotated."""
        config = self.decoder.config
        x = self._norm(x, "attention_norm")

        def heads(name: LinearName, count: int) -> Array:
            return self._linear(x, name).reshape(*x.shape[:-1], count, config.head_dim)

        query = heads("query", config.num_attention_heads)
        key = heads("key", config.num_key_value_heads)
        if config.qk_norm:
            query, key = self._norm(query, "query_norm"), self._norm(key, "key_norm")
        return _rotate(query, rope), _rotate(key, rope), heads("value", config.num_key_value_heads)

    def finish(self, x: Array, mixed: Array) -> Array:
        """Adds the attention's and the feed-forward's residuals."""
        config = self.decoder.config
        added = self._linear(mixed, "output")
        x = x + (self._norm(added, "attention_post_norm") if config.post_norms else added)
        added = self._feed_forward(self._norm(x, "mlp_norm"))
        return x + (self._norm(added, "mlp_post_norm") if config.post_norms else added)

    def _feed_forward(self, x: Array) -> Array:
        config, weights = self.decoder.config, self.weights
        if config.num_experts:
            flat = x.reshape(-1, x.shape[-1])
            mixed = mix_experts(
                flat,
                weights["router"],
                weights["experts_gate"],
                weights["experts_up"],
                weights["experts_down"],
                experts_per_token=config.experts_per_token,
                normalise=config.norm_topk_prob,
                activation=functools.partial(activate, kind=config.hidden_act),
            )
            return mixed.reshape(x.shape)
        gate = activate(self._linear(x, "gate"), config.hidden_act)
        return self._linear(gate * self._linear(x, "up"), "down")

    def _norm(self, x: Array, name: str) -> Array:
        # Who brings products of his own wants a token's numbers not to depend on how many there are.
        return self.decoder._norm(x, self.weights[name], in_order=self.linear is not None)

    def _linear(self, x: Array, name: LinearName) -> Array:
        # Two axes, not three: XLA's gradient of a kernel that is contracted over two axes transposes its
        # operands first, which halves a CPU's rate.
        flat = x.reshape(-1, x.shape[-1])
        out = self._product(flat, name)
        if f"{name}_bias" in self.weights:
            out += self.weights[f"{name}_bias"].astype(out.dtype)
        adapters = self.decoder.adapters
        if adapters is not None and name in adapters.linears:
            out += adapters.scale * self._product(self._product(flat, f"{name}_a"), f"{name}_b")
        return out.reshape(*x.shape[:-1], -1)

    def _product(self, x_MI: Array, name: str) -> Array:
        if self.linear is None:
            return product(x_MI, self.weights[name])
        return self.linear(x_MI, self.kernels[name], self.number)


def softcap(x: Array, cap: float | None) -> Array:
    """cap * tanh(x / cap) (Gemma 2, sec. 2 of arXiv:2408.00118); x itself without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def activate(x: Array, kind: str) -> Array:
    """The feed-forward's activation: SiLU, or GELU by its tanh approximation."""
    return jax.nn.silu(x) if kind == "silu" else jax.nn.gelu(x, approximate=True)


def rms_norm(
    x: Array, scale: Array, eps: float, *, offset: float = 0.0, in_order: bool = False
) -> Array:
    """x / rms(x) * (offset + scale) over the last axis, in float32; returns x's type.

    With `in_order` a row has the same bits whatever the number of rows is: on a CPU, XLA sums a row in an
    order that depends on it.
    """
    wide = x.astype(jnp.float32)
    squares = jnp.square(wide)
    if in_order:
        # Or some would be squared and added in one operation, with one rounding.
        mean = _sum_in_order(jax.lax.optimization_barrier(squares)) / x.shape[-1]
    else:
        mean = jnp.mean(squares, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(mean + eps)
    return (wide * (scale.astype(jnp.float32) + offset)).astype(x.dtype)


def _sum_in_order(x: Array) -> Array:
    """Sum over the last axis, kept with length 1, as adds of halves: their order no compiler changes."""
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        rest = [(0, 0)] * (x.ndim - 1) + [(0, 2 * half - x.shape[-1])]
        x = x[..., :half] + jnp.pad(x[..., half:], rest)
    return x


def _recomputed(
    layer: Callable[[_State, _Inputs], tuple[_State, None]], policy: RematPolicy
) -> Callable[[_State, _Inputs], tuple[_State, None]]:
    """A layer that keeps for its backward pass what the policy says."""
    match policy:
        case "none":
            return layer
        case "full":
            return jax.checkpoint(layer)
        case "dots":
            keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            return jax.checkpoint(layer, policy=keep)
        case "offload":
            keep = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
            return jax.checkpoint(layer, policy=keep)
        case _:
            raise ConfigError(
                f"remat must be one of {', '.join(get_args(RematPolicy))}, got {policy!r}."
            )


def rope(positions: Array, config: DecoderConfig, *, local: bool) -> tuple[Array, Array]:
    """Cosines and sines [..., 1, H/2], float32."""
    frequencies = jnp.array(rope_frequencies(config, local=local), jnp.float32)
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
