"""What an optimizer keeps between steps: in fewer bits, in the host's memory, with a mean of the parameters.

Each function here wraps an `optax.GradientTransformation` in one that computes the same, and keeps its state
in another form.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax import Array

from gymllm.errors import ConfigError

Tree = Any
"""A pytree of arrays: JAX's own functions say no more of it."""
StateDtype = Literal["float32", "bfloat16", "int8"]

SMALLEST = 4096
"""Arrays with fewer numbers than this stay float32: norms and counts, which take no memory to speak of."""
_BLOCK = 256
"""Most numbers that share a scale."""
_LEAST_BLOCK = 32
"""Blocks are padded before they get shorter than this."""
_SECOND_MOMENTS = ("nu",)
"""Fields of optax's states that are never negative: all eight bits go to the magnitude."""


# ------------------------------------------------------------------ 8 bits


class Blocks(NamedTuple):
    """An array in 8 bits: codes, and a scale for each block of them along one axis."""

    codes: Array
    """The array's shape; int8, or uint8 where nothing is negative and codes are of square roots."""
    scales: Array
    """Largest magnitude of each block, float32; the array's shape, with one axis in blocks."""


def blocks_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Which axis of an array is cut into blocks, and into how many.

    The last axis, or the one before it where that is longer (an adapter's A, [L, in, rank]): the other axes
    keep their meaning, so that codes and scales are sharded as the parameter is.
    """
    axis = len(shape) - 1
    if len(shape) > 1 and shape[-1] < _BLOCK and shape[-2] > shape[-1]:
        axis -= 1
    length = shape[axis]
    for size in range(min(_BLOCK, length), _LEAST_BLOCK - 1, -1):
        if length % size == 0:
            return axis, length // size
    return axis, -(-length // _BLOCK)


def encode(values: Array, *, signed: bool, seed: Array | int) -> Blocks:
    """Rounds to 8 bits: "block-wise dynamic quantization", Dettmers et al. 2021 (arXiv:2110.02861), sec. 2.

    A code's magnitude has as many leading zeros as the number has decades below the largest of its block,
    and the bits after its leading one divide that decade evenly: 64 steps in the first, half as many in each
    after. What differs from the paper: no table, but arithmetic, which TPUs do faster. Numbers are rounded up
    or down by chance, so that the mean is right: else what a step changes by less than half a code never
    changes. The second moment is kept as its square root, which is what updates divide by, and is never
    rounded to 0 unless it is 0 (Li et al. 2023, arXiv:2309.01507: a divisor of 0 makes updates explode).
    Embeddings are 8 bits as well.

    Args:
        values: float32, any shape of one axis or more, finite.
        signed: Whether numbers may be negative; else the code has eight bits of the square root's magnitude.
        seed: Decides which are rounded up and which down, uint32.

    Returns:
        Codes and scales. The largest of a block is exact; in the first decade a number is off by at most
        1.4 % of the largest (0.7 % without a sign), in each below by a fifth of what it is in the one above.
    """
    grouped, axis = _grouped(values if signed else jnp.sqrt(values))
    scales = jnp.max(jnp.abs(grouped), axis=axis + 1)
    safe = jnp.where(scales > 0, scales, 1)
    share = jnp.abs(grouped) / jnp.expand_dims(safe, axis + 1)
    codes = _code(share, _chance(share.shape, seed), bits=7 if signed else 8)
    if signed:
        codes = jnp.sign(grouped).astype(jnp.int32) * codes
    codes = _ungrouped(codes, values.shape, axis)
    return Blocks(codes.astype(jnp.int8 if signed else jnp.uint8), scales)


def decode(blocks: Blocks) -> Array:
    """The numbers that `encode` rounded, float32."""
    signed = blocks.codes.dtype == jnp.int8
    grouped, axis = _grouped(blocks.codes.astype(jnp.int32))
    share = _value(jnp.abs(grouped), bits=7 if signed else 8)
    if signed:
        share = jnp.sign(grouped).astype(jnp.float32) * share
    values = share * jnp.expand_dims(blocks.scales, axis + 1)
    values = _ungrouped(values, blocks.codes.shape, axis)
    return values if signed else jnp.square(values)


def _code(share: Array, chance: Array, *, bits: int) -> Array:
    """Codes of magnitudes from 0 to 1, int32 from 0 to 2**bits - 1; chance is from 0 to 1."""
    decades = jnp.floor(jnp.log10(jnp.maximum(share, 1e-30))).astype(jnp.int32) + bits
    decades = jnp.clip(decades, 0, bits - 1)
    cells = jnp.left_shift(1, decades)
    part = share * _power_of_ten(bits - 1 - decades)
    place = (part - 0.1) / 0.9 * cells.astype(jnp.float32) - 0.5
    cell = jnp.floor(place + chance).astype(jnp.int32)
    codes = jnp.where(share < 1, cells + jnp.clip(cell, 0, cells - 1), 2**bits - 1)
    # With a sign, what is nearer to 0 than to the smallest code is 0; without one only 0 is.
    least = 0.275 * 10.0 ** (1 - bits) if bits == 7 else 0.0
    return jnp.where(share > least, codes, 0)


def _value(codes: Array, *, bits: int) -> Array:
    decades = 31 - jax.lax.clz(jnp.maximum(codes, 1))
    cells = jnp.left_shift(1, decades)
    middle = ((codes - cells).astype(jnp.float32) + 0.5) / cells.astype(jnp.float32)
    share = (0.1 + 0.9 * middle) / _power_of_ten(bits - 1 - decades)
    share = jnp.where(codes == 2**bits - 1, 1.0, share)  # a block's largest, exactly
    return jnp.where(codes > 0, share, 0.0)


def _chance(shape: tuple[int, ...], seed: Array | int) -> Array:
    """As good as random from 0 to 1: a function of the place and the seed alone, on any mesh.

    A few operations a number, which XLA fuses with the rounding; JAX's own generator would take longer than
    all the rest of the step. The mixing is Wellons' "lowbias32" (2018).
    """
    place = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    bits = place ^ _mixed(jnp.asarray(seed, jnp.uint32) + jnp.uint32(0x9E3779B9))
    return (_mixed(bits) >> 8).astype(jnp.float32) / 2**24


def _mixed(bits: Array) -> Array:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits ^ (bits >> 16)


def _power_of_ten(exponent: Array) -> Array:
    """10**exponent of int32 from 0 to 7, exact, without a table."""
    power = jnp.ones(exponent.shape, jnp.float32)
    for bit in range(3):
        factor = jnp.float32(10.0 ** (1 << bit))
        power = power * jnp.where((exponent >> bit) & 1 == 1, factor, jnp.float32(1))
    return power


def _grouped(values: Array) -> tuple[Array, int]:
    """[..., n, ...] as [..., blocks, n / blocks, ...], with zeros at the end where n doesn't divide."""
    axis, count = blocks_of(values.shape)
    length = values.shape[axis]
    size = -(-length // count)
    if size * count != length:
        room = [(0, size * count - length if at == axis else 0) for at in range(values.ndim)]
        values = jnp.pad(values, room)
    shape = values.shape
    return values.reshape(*shape[:axis], count, size, *shape[axis + 1 :]), axis


def _ungrouped(grouped: Array, shape: tuple[int, ...], axis: int) -> Array:
    whole = grouped.reshape(*shape[:axis], -1, *shape[axis + 1 :])
    return jax.lax.slice_in_dim(whole, 0, shape[axis], axis=axis)


# ------------------------------------------------------------------ how a state is kept


class StoredState(NamedTuple):
    """An optimizer's state in fewer bits."""

    steps: Array
    """Steps taken, uint32 scalar: numbers are rounded by another chance at each."""
    held: Tree
    """The state, with narrow arrays or `Blocks` where large ones were."""


def stored_as(
    inner: optax.GradientTransformation, dtype: StateDtype
) -> optax.GradientTransformation:
    """The same optimizer, whose large moments are kept in `dtype` between steps and float32 within one."""
    if dtype == "float32":
        return inner

    def narrow(state: Tree, steps: Array) -> Tree:
        places = jax.tree_util.tree_leaves_with_path(state)
        return jax.tree.unflatten(
            jax.tree.structure(state),
            [
                narrow_leaf(path, leaf, steps * jnp.uint32(len(places)) + jnp.uint32(number))
                for number, (path, leaf) in enumerate(places)
            ],
        )

    def narrow_leaf(path: tuple[object, ...], leaf: Array, seed: Array) -> Array | Blocks:
        if leaf.size < SMALLEST or leaf.dtype != jnp.float32:
            return leaf
        if dtype == "bfloat16":
            return leaf.astype(jnp.bfloat16)
        fields = {getattr(key, "name", None) for key in path}
        return encode(leaf, signed=fields.isdisjoint(_SECOND_MOMENTS), seed=seed)

    def widen(leaf: Array | Blocks) -> Array:
        if isinstance(leaf, Blocks):
            return decode(leaf)
        return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf

    def init(params: optax.Params) -> Tree:
        steps = jnp.zeros((), jnp.uint32)
        return StoredState(steps, narrow(inner.init(params), steps))

    def update(
        updates: optax.Updates, state: Tree, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Tree]:
        wide = jax.tree.map(widen, state.held, is_leaf=lambda leaf: isinstance(leaf, Blocks))
        updates, wide = inner.update(updates, wide, params)
        steps = state.steps + jnp.uint32(1)
        return updates, StoredState(steps, narrow(wide, steps))

    return optax.GradientTransformation(init, update)


def offloaded(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimizer, whose state lies in the host's memory between steps.

    XLA brings it to the device within the compiled step and back, and overlaps that with arithmetic where it
    can. Small arrays stay on the device: moving them takes longer than it saves.

    Raises:
        ConfigError: The platform has no host memory that its devices can address.
    """
    device = jax.local_devices()[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if "pinned_host" not in kinds:
        raise ConfigError(
            f"optimizer.offload keeps moments in the host's memory, and {device.device_kind} "
            f"({device.platform}) addresses only {', '.join(kinds)}, not pinned_host. Leave "
            "optimizer.offload out; optimizer.state_dtype int8 takes a quarter of the memory."
        )

    host, on_device = jax.memory.Space.Host, jax.memory.Space.Device

    def move(state: Tree, space: object) -> Tree:
        return jax.tree.map(
            lambda leaf: jax.device_put(leaf, space) if leaf.size >= SMALLEST else leaf, state
        )

    def init(params: optax.Params) -> Tree:
        return move(inner.init(params), host)

    def update(
        updates: optax.Updates, state: Tree, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Tree]:
        updates, state = inner.update(updates, move(state, on_device), params)
        return updates, move(state, host)

    return optax.GradientTransformation(init, update)


# ------------------------------------------------------------------ a mean of the parameters


class MeanState(NamedTuple):
    """An optimizer's state, and the mean of the parameters that it has made."""

    mean: Tree
    """Exponential moving average of the parameters, float32."""
    inner: Tree


def with_mean(inner: optax.GradientTransformation, *, decay: float) -> optax.GradientTransformation:
    """The same optimizer, which also keeps mean = decay * mean + (1 - decay) * parameters after each step.

    The mean starts as the parameters, so it is one of parameters at every step, and needs no correction
    (Polyak & Juditsky 1992; as an exponential average Tarvainen & Valpola 2017, arXiv:1703.01780, eq. 1).
    """

    def init(params: optax.Params) -> Tree:
        mean = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), params)
        return MeanState(mean, inner.init(params))

    def update(
        updates: optax.Updates, state: Tree, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Tree]:
        assert params is not None, "the mean is of parameters: pass them to update"
        updates, held = inner.update(updates, state.inner, params)
        after = optax.apply_updates(params, updates)
        mean = jax.tree.map(
            lambda old, new: decay * old + (1 - decay) * new.astype(jnp.float32), state.mean, after
        )
        return updates, MeanState(mean, held)

    return optax.GradientTransformation(init, update)


def mean_parameters(state: Tree, like: Tree) -> Tree | None:
    """The mean of the parameters that an optimizer's state holds, or None.

    Args:
        state: Of an optimizer that `make_optimizer` made.
        like: The parameters: the mean comes back in their tree, dtypes and memory.
    """
    if not isinstance(state, MeanState):
        return None
    chex.assert_trees_all_equal_shapes(state.mean, like)
    return jax.tree.map(
        lambda mean, leaf: jax.device_put(mean, leaf.sharding).astype(leaf.dtype), state.mean, like
    )
