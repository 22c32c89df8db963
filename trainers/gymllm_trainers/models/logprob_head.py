"""Log-probabilities of given tokens, without ever holding all logits.

Axes: T tokens (of a whole micro-batch, flattened), D model, V vocabulary; C tokens of a chunk, W words of a
block of the vocabulary.

Logits are computed a chunk of tokens and a block of the vocabulary at a time; softmax goes over the blocks
online (Milakov and Gimelshein 2018, arXiv:1805.02867), and the backward pass computes them again, and softmax
from each token's saved peak and sum. Under `jax.set_mesh` each device takes its own tokens and its own part
of the vocabulary; devices speak to each other once in each pass, outside all loops.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, PartitionSpec

from gymllm.errors import ConfigError
from gymllm_trainers.models.sharding import ROW_AXES

_VOCAB_AXIS = "tensor"
"""Mesh axis that divides the vocabulary."""
_HIDDEN = -1e30
"""A logit that doesn't count; finite, so that no difference of two is undefined."""
_ROUND = 128
"""Blocks of the vocabulary are a multiple of this, which matrix units like."""


_Carry = TypeVar("_Carry")
_Result = TypeVar("_Result")


class TokenStatistics(NamedTuple):
    """Of each token, shape [T], float32; 0 where the mask is 0."""

    logprob: Array
    """Log-probability (nats) of the target."""
    entropy: Array
    """Entropy (nats) of the distribution the target was drawn from; carries a gradient only if asked for."""


class _Static(NamedTuple):
    """What a program is compiled for."""

    softcap: float | None
    tied: bool
    entropy_gradient: bool
    chunk: int
    vocab_chunk: int
    rows: tuple[str, ...]
    """Mesh axes that divide tokens."""
    vocab: str | None
    """Mesh axis that divides the vocabulary."""
    axes: tuple[str, ...]
    """All mesh axes."""


class _Sums(NamedTuple):
    """What a part of the vocabulary adds to each token's statistics; float32."""

    peak: Array
    """Highest logit."""
    total: Array
    """Sum of exp(logit - peak)."""
    spread: Array
    """Sum of exp(logit - peak) * (logit - peak). Entropy is log(total) - spread / total: large logits don't
    cancel in it, as they would in log-sum-exp less the mean logit."""
    chosen: Array
    """The target's logit; 0 if it isn't of this part."""

    def at(self, peak: Array) -> _Sums:
        """The same sums with respect to a higher peak."""
        move = self.peak - peak
        keep = jnp.exp(move)
        spread = keep * (self.spread + self.total * move)
        return _Sums(peak, self.total * keep, spread, self.chosen)


class _Logits(NamedTuple):
    """Of a chunk of tokens and a block of the vocabulary."""

    value_CW: Array
    capped_CW: Array
    """Before the temperature, and with words that another block counts."""
    target_CW: Array
    """True at each token's target."""


def token_statistics(
    hidden_TD: Array,
    head: Array,
    target_T: Array,
    mask_T: Array,
    *,
    tied: bool = False,
    temperature: float | Array = 1.0,
    softcap: float | None = None,
    chunk: int = 512,
    vocab_chunk: int = 65_536,
    entropy_gradient: bool = False,
) -> TokenStatistics:
    """Log-probability of each target, and the entropy it was drawn with.

    Masked-in tokens are moved to the front and taken `chunk` at a time, and no more than there are: the cost
    follows the number of trained tokens, not of context tokens. At most [chunk, vocab_chunk] logits are held.
    Differentiable once, in reverse, by `hidden_TD` and `head`, whose gradient is summed in float32.

    Args:
        hidden_TD: Final hidden states, float32 or bfloat16; products are taken in this type and summed in
            float32.
        head: Output projection [D, V]; or, if `tied`, the embedding [V, D]. Of any float type.
        target_T: Token that each position predicts, int32, from 0 to V - 1.
        mask_T: Not 0 for positions whose statistics are wanted.
        tied: Whether `head` is the embedding.
        temperature: Logits are divided by it, as when they were sampled. May be traced; has no gradient.
        softcap: Logits become softcap * tanh(logit / softcap) before that (Gemma 2, sec. 2 of
            arXiv:2408.00118).
        chunk: Tokens whose logits are held at once, on each device.
        vocab_chunk: Words of the vocabulary whose logits are held at once, on each device.
        entropy_gradient: Whether the entropy is differentiated too, or taken as a constant.

    Raises:
        ConfigError: A temperature or soft cap <= 0, or a chunk < 1.
    """
    chex.assert_rank([hidden_TD, head, target_T, mask_T], [2, 2, 1, 1])
    tokens, width = hidden_TD.shape
    chex.assert_axis_dimension(head, 1 if tied else 0, width)
    if isinstance(temperature, int | float) and not temperature > 0:
        raise ConfigError(f"temperature must be > 0, got {temperature}.")
    if softcap is not None and not softcap > 0:
        raise ConfigError(f"softcap must be > 0, got {softcap}; None leaves logits as they are.")
    for name, size in (("chunk", chunk), ("vocab_chunk", vocab_chunk)):
        if size < 1:
            raise ConfigError(f"{name} must be >= 1, got {size}.")
    shape = _free_axes()
    rows = tuple(name for name in ROW_AXES if name in shape)
    if tokens % math.prod(shape[name] for name in rows):
        rows = ()
    words = head.shape[0 if tied else 1]
    divided = _VOCAB_AXIS in shape and words % shape[_VOCAB_AXIS] == 0
    static = _Static(
        softcap=softcap,
        tied=tied,
        entropy_gradient=entropy_gradient,
        chunk=chunk,
        vocab_chunk=vocab_chunk,
        rows=rows,
        vocab=_VOCAB_AXIS if divided else None,
        axes=tuple(shape),
    )
    scale = jnp.asarray(1 / temperature, jnp.float32)
    return _statistics(static, hidden_TD, head, scale, target_T, mask_T != 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(
    static: _Static, hidden_TD: Array, head: Array, scale: Array, target_T: Array, wanted_T: Array
) -> TokenStatistics:
    return _forward(static, hidden_TD, head, scale, target_T, wanted_T)[0]


def _forward(
    static: _Static, hidden_TD: Array, head: Array, scale: Array, target_T: Array, wanted_T: Array
) -> tuple[TokenStatistics, tuple[Array, ...]]:
    def local(*arrays: Array) -> tuple[TokenStatistics, Array, Array]:
        sums = _sums(static, *arrays)
        if static.vocab is not None:
            peak = jax.lax.pmax(sums.peak, static.vocab)
            sums = _Sums(peak, *jax.lax.psum(sums.at(peak)[1:], static.vocab))
        logsumexp = sums.peak + jnp.log(sums.total)
        entropy = jnp.log(sums.total) - sums.spread / sums.total
        statistics = TokenStatistics(sums.chosen - logsumexp, entropy)
        wanted = arrays[4]
        statistics = jax.tree.map(lambda x: jnp.where(wanted, x, 0.0), statistics)
        return statistics, sums.peak, sums.total

    arrays = (hidden_TD, head, scale, target_T, wanted_T)
    tokens = PartitionSpec(static.rows or None)
    statistics, peak_T, total_T = _on_each_device(static, local, tokens)(*arrays)
    return statistics, (*arrays, peak_T, total_T, statistics.entropy)


def _backward(
    static: _Static, saved: tuple[Array, ...], cotangent: TokenStatistics
) -> tuple[Array, Array, None, None, None]:
    def local(*arrays: Array) -> tuple[Array, Array]:
        d_hidden, d_head = _gradients(static, *arrays)
        if static.vocab is not None:
            d_hidden = jax.lax.psum(d_hidden, static.vocab)
        if static.rows:
            d_head = jax.lax.psum(d_head, static.rows)
        return d_hidden.astype(arrays[0].dtype), d_head.astype(arrays[1].dtype)

    # The mask's own gradient is 0: where it is, the statistics are.
    weights = (jnp.where(saved[4], part, 0.0) for part in cotangent)
    outputs = (PartitionSpec(static.rows or None), _head_spec(static))
    d_hidden, d_head = _on_each_device(static, local, outputs)(*saved, *weights)
    return d_hidden, d_head, None, None, None


_statistics.defvjp(_forward, _backward)


# ---------------------------------------------------------------------- on one device


def _sums(
    static: _Static, hidden_TD: Array, head: Array, scale: Array, target_T: Array, wanted_T: Array
) -> _Sums:
    """What this device's part of the vocabulary adds, [T]."""
    chunks, blocks = _Chunks(static, wanted_T), _Blocks(static, head, scale)

    def chunk(index: Array, sums_IC: _Sums) -> _Sums:
        rows_CD, target_C = chunks.take(index, hidden_TD), chunks.take(index, target_T)

        def block(number: Array | int, sums: _Sums) -> _Sums:
            logits = blocks.logits(number, rows_CD, target_C)
            before = sums.at(jnp.maximum(sums.peak, jnp.max(logits.value_CW, axis=-1)))
            below_CW = logits.value_CW - before.peak[:, None]
            shares_CW = jnp.exp(below_CW)
            chosen_CW = jnp.where(logits.target_CW, logits.value_CW, 0.0)
            return _Sums(
                before.peak,
                before.total + jnp.sum(shares_CW, axis=-1),
                before.spread + jnp.sum(shares_CW * below_CW, axis=-1),
                before.chosen + jnp.sum(chosen_CW, axis=-1),
            )

        nothing_C = jnp.zeros(target_C.shape, jnp.float32)
        sums = blocks.loop(block, _Sums(nothing_C + _HIDDEN, nothing_C, nothing_C, nothing_C))
        return jax.tree.map(lambda all_IC, own_C: all_IC.at[index].set(own_C), sums_IC, sums)

    nothing_IC = jnp.zeros(chunks.order_IC.shape, jnp.float32)
    # A total of 1 where nothing is computed: its logarithm is taken.
    start = _Sums(nothing_IC, nothing_IC + 1, nothing_IC, nothing_IC)
    sums_IC = jax.lax.fori_loop(0, chunks.count, chunk, start)
    return jax.tree.map(chunks.restore, sums_IC)


def _gradients(
    static: _Static,
    hidden_TD: Array,
    head: Array,
    scale: Array,
    target_T: Array,
    wanted_T: Array,
    peak_T: Array,
    total_T: Array,
    entropy_T: Array,
    weight_T: Array,
    entropy_weight_T: Array,
) -> tuple[Array, Array]:
    """Gradients of sum(weight * logprob + entropy_weight * entropy) by hidden states and head, float32."""
    chunks, blocks = _Chunks(static, wanted_T), _Blocks(static, head, scale)

    def chunk(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        d_hidden_ICD, d_head = carry
        rows_CD, target_C, peak_C, factor_C, weight_C = (
            chunks.take(index, x) for x in (hidden_TD, target_T, peak_T, 1 / total_T, weight_T)
        )
        entropy_C, entropy_weight_C = (chunks.take(index, x) for x in (entropy_T, entropy_weight_T))

        def block(number: Array | int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            d_rows_CD, d_head = carry
            logits = blocks.logits(number, rows_CD, target_C)
            # d logprob / d logits = one-hot - softmax.
            shares_CW = jnp.exp(logits.value_CW - peak_C[:, None]) * factor_C[:, None]
            error_CW = (logits.target_CW - shares_CW) * weight_C[:, None]
            if static.entropy_gradient:
                # d entropy / d logits = -softmax * (log softmax + entropy); nothing where softmax is 0.
                log_CW = jnp.where(shares_CW > 0, jnp.log(shares_CW), 0.0)
                surplus_CW = shares_CW * (log_CW + entropy_C[:, None])
                error_CW -= surplus_CW * entropy_weight_C[:, None]
            error_CW *= scale
            if static.softcap is not None:
                error_CW *= 1 - jnp.square(logits.capped_CW / static.softcap)
            error_CW = error_CW.astype(hidden_TD.dtype)
            d_rows_CD += blocks.rows_gradient(number, error_CW)
            return d_rows_CD, blocks.add_gradient(number, d_head, rows_CD, error_CW)

        start = (jnp.zeros(rows_CD.shape, jnp.float32), d_head)
        d_rows_CD, d_head = blocks.loop(block, start)
        return d_hidden_ICD.at[index].set(d_rows_CD), d_head

    d_hidden = jnp.zeros((*chunks.order_IC.shape, hidden_TD.shape[1]), jnp.float32)
    start = (d_hidden, jnp.zeros(head.shape, jnp.float32))
    d_hidden, d_head = jax.lax.fori_loop(0, chunks.count, chunk, start)
    return chunks.restore(d_hidden), d_head


class _Chunks:
    """Tokens, a chunk at a time, those that are wanted first."""

    def __init__(self, static: _Static, wanted_T: Array) -> None:
        self.tokens = len(wanted_T)
        chunk = min(static.chunk, self.tokens)
        order_T = jnp.argsort(~wanted_T, stable=True)
        order_T = jnp.pad(order_T, (0, -self.tokens % chunk), constant_values=self.tokens)
        self.order_IC = order_T.reshape(-1, chunk)
        self.wanted = jnp.sum(wanted_T)
        self.count = -(-self.wanted // chunk)
        """Chunks that hold a token that is wanted."""

    def take(self, index: Array, values: Array) -> Array:
        """[T, ...] to a chunk [C, ...]; 0 where a token isn't wanted, whatever it holds."""
        chunk = self.order_IC.shape[1]
        wanted_C = index * chunk + jnp.arange(chunk) < self.wanted
        part = values.at[self.order_IC[index]].get(mode="clip")
        return jnp.where(jnp.expand_dims(wanted_C, range(1, part.ndim)), part, 0)

    def restore(self, values: Array) -> Array:
        """[I, C, ...] to [T, ...] in the tokens' own order."""
        places = jnp.zeros((self.tokens, *values.shape[2:]), values.dtype)
        flat = values.reshape(-1, *values.shape[2:])
        return places.at[self.order_IC.reshape(-1)].set(flat, mode="drop")


class _Blocks:
    """The vocabulary, a block at a time.

    The last block may begin before the one ahead of it ends, so that all are of one size and the head needs
    no padding; what both hold counts in the one ahead.
    """

    def __init__(self, static: _Static, head: Array, scale: Array) -> None:
        self.static = static
        self.head = head
        self.scale = scale
        self.axis = 0 if static.tied else 1
        self.words: int = head.shape[self.axis]
        even = -(-self.words // -(-self.words // static.vocab_chunk))
        self.width = min(-(-even // _ROUND) * _ROUND, static.vocab_chunk, self.words)
        self.count = -(-self.words // self.width)

    def loop(self, body: Callable[[Array | int, _Carry], _Carry], start: _Carry) -> _Carry:
        """Calls body(block, carry) for each block."""
        if self.count == 1:
            return body(0, start)
        return jax.lax.fori_loop(0, self.count, body, start)

    def logits(self, number: Array | int, rows_CD: Array, target_C: Array) -> _Logits:
        """float32 logits of a block."""
        static = self.static
        capped_CW = _dot(rows_CD, self._kernel(number, rows_CD), 1, 1 - self.axis)
        if static.softcap is not None:
            capped_CW = static.softcap * jnp.tanh(capped_CW / static.softcap)
        value_CW = capped_CW * self.scale
        word_W = self._begin(number) + jnp.arange(self.width)
        counts_W = word_W >= number * self.width
        if self.count > 1:
            value_CW = jnp.where(counts_W, value_CW, _HIDDEN)
        if static.vocab is not None:
            word_W += jax.lax.axis_index(static.vocab) * self.words
        return _Logits(value_CW, capped_CW, (word_W == target_C[:, None]) & counts_W)

    def rows_gradient(self, number: Array | int, error_CW: Array) -> Array:
        """The hidden states' gradient [C, D] from that of a block's logits."""
        return _dot(error_CW, self._kernel(number, error_CW), 1, self.axis)

    def add_gradient(
        self, number: Array | int, d_head: Array, rows_CD: Array, error_CW: Array
    ) -> Array:
        """The head's gradient with that of a block's logits added."""
        left, right = (error_CW, rows_CD) if self.static.tied else (rows_CD, error_CW)
        part = _dot(left, right, 0, 0)
        if self.count == 1:
            return d_head + part
        begin = self._begin(number)
        before = jax.lax.dynamic_slice_in_dim(d_head, begin, self.width, self.axis)
        return jax.lax.dynamic_update_slice_in_dim(d_head, before + part, begin, self.axis)

    def _begin(self, number: Array | int) -> Array | int:
        if self.count == 1:
            return 0
        return jnp.minimum(number * self.width, self.words - self.width)

    def _kernel(self, number: Array | int, like: Array) -> Array:
        """A block of the head, in the other factor's type."""
        kernel = self.head
        if self.count > 1:
            begin = self._begin(number)
            kernel = jax.lax.dynamic_slice_in_dim(kernel, begin, self.width, self.axis)
        return kernel.astype(like.dtype)


def _dot(left: Array, right: Array, left_axis: int, right_axis: int) -> Array:
    """Contracts one axis of each, summed in float32."""
    # XLA's products of bfloat16 on a CPU take ten times as long with a bfloat16 result.
    axes = (((left_axis,), (right_axis,)), ((), ()))
    return jax.lax.dot_general(left, right, axes, preferred_element_type=jnp.float32)


# ---------------------------------------------------------------------- on a mesh


def _free_axes() -> dict[str, int]:
    """Axes of the mesh, and their sizes, less those that a caller has divided the arrays over already."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: size for name, size, kind in axes if kind is not AxisType.Manual}


def _head_spec(static: _Static) -> PartitionSpec:
    return PartitionSpec(static.vocab) if static.tied else PartitionSpec(None, static.vocab)


def _on_each_device(
    static: _Static, function: Callable[..., _Result], outputs: object
) -> Callable[..., _Result]:
    """`function` of each device's own hidden states, head, the scale, targets, and what else tokens have."""
    if not static.rows and static.vocab is None:
        return function
    tokens = PartitionSpec(static.rows or None)

    def spread(*arrays: Array) -> _Result:
        specs = (tokens, _head_spec(static), PartitionSpec(), *(tokens for _ in arrays[3:]))
        return jax.shard_map(
            function,
            in_specs=specs,
            out_specs=outputs,
            axis_names=set(static.axes),
            check_vma=False,
        )(*arrays)

    return spread
