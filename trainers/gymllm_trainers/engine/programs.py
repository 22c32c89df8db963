"""What the embedded engine compiles: one program a shape, and a copy between slots.

Compiled ahead of time into a table, so nothing can be compiled later by accident (invariant 9).
Axes: R rows, C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax import Array

from gymllm_trainers.compilation import compile_ahead
from gymllm_trainers.engine.config import EngineConfig
from gymllm_trainers.models.config import DecoderConfig
from gymllm_trainers.models.decoder import Decoder, KVCache, init_cache

Tree = Any
"""A pytree of arrays."""


class StepInputs(NamedTuple):
    """Inputs of a step; rows that are not in use have `slot` past the last one and `valid` 0."""

    tokens: npt.NDArray[np.int32]
    """[R, C]."""
    slot: npt.NDArray[np.int32]
    """[R]."""
    start: npt.NDArray[np.int32]
    """[R]; tokens that the slot holds already."""
    valid: npt.NDArray[np.int32]
    """[R]; tokens of the row that are valid."""
    temperature: npt.NDArray[np.float32]
    """[R]; 0 is greedy."""
    seed: npt.NDArray[np.uint32]
    """[R]; with the position, it decides what is sampled."""


class Sampled(NamedTuple):
    """What a step samples after each row's last valid token; both [R]."""

    token: Array
    logprob: Array


def empty_inputs(rows: int, chunk: int, *, slots: int) -> StepInputs:
    """Inputs with no row in use."""
    return StepInputs(
        tokens=np.zeros((rows, chunk), np.int32),
        slot=np.full(rows, slots, np.int32),
        start=np.zeros(rows, np.int32),
        valid=np.zeros(rows, np.int32),
        temperature=np.ones(rows, np.float32),
        seed=np.zeros(rows, np.uint32),
    )


def sample(logits_RV: Array, temperature_R: Array, seed_R: Array, position_R: Array) -> Sampled:
    """Draws a token a row: a function of logits, temperature, seed and position alone.

    Inverse transform with one uniform number a row, in blocks: drawing V Gumbel variates a row would cost
    more than the output projection on a CPU.
    """
    greedy_R = temperature_R == 0
    # Less the largest first: a tiny temperature must not make it infinite.
    logits_RV = logits_RV - jnp.max(logits_RV, axis=-1, keepdims=True)
    logits_RV = logits_RV / jnp.where(greedy_R, 1.0, temperature_R)[:, None]
    normaliser_R = jax.nn.logsumexp(logits_RV, axis=-1)
    rows, vocabulary = logits_RV.shape
    block = 128
    share = jnp.exp(logits_RV - normaliser_R[:, None])
    share_RNK = jnp.pad(share, ((0, 0), (0, -vocabulary % block))).reshape(rows, -1, block)
    below_RN = jnp.cumsum(share_RNK.sum(-1), axis=-1)
    keys = jax.vmap(lambda seed, at: jax.random.fold_in(jax.random.key(seed), at))(
        seed_R, position_R
    )
    drawn_R = jax.vmap(jax.random.uniform)(keys) * below_RN[:, -1]
    chosen_R = jnp.minimum(jnp.sum(below_RN <= drawn_R[:, None], axis=-1), below_RN.shape[1] - 1)
    start_R = jnp.where(
        chosen_R > 0,
        jnp.take_along_axis(below_RN, jnp.maximum(chosen_R - 1, 0)[:, None], 1)[:, 0],
        0.0,
    )
    inner_RK = jnp.take_along_axis(share_RNK, chosen_R[:, None, None], axis=1)[:, 0]
    inside_RK = start_R[:, None] + jnp.cumsum(inner_RK, axis=-1)
    offset_R = jnp.sum(inside_RK <= drawn_R[:, None], axis=-1)
    # Rounding can leave the drawn number past the block's end, or, where sums are not taken in order, at
    # an impossible token: then it is the block's likeliest.
    share_R = jnp.take_along_axis(inner_RK, jnp.minimum(offset_R, block - 1)[:, None], axis=1)[:, 0]
    possible_R = (offset_R < block) & (share_R > 0)
    offset_R = jnp.where(possible_R, offset_R, jnp.argmax(inner_RK, axis=-1))
    token_R = jnp.where(greedy_R, jnp.argmax(logits_RV, axis=-1), chosen_R * block + offset_R)
    logprob_R = jnp.take_along_axis(logits_RV, token_R[:, None], axis=-1)[:, 0] - normaliser_R
    return Sampled(token_R.astype(jnp.int32), logprob_R)


class Programs:
    """Every compiled program of one engine."""

    def __init__(self, graph: nnx.GraphDef[Decoder], state: Tree, config: EngineConfig) -> None:
        """Compiles nothing yet: see `compile`."""
        self._graph, self._config = graph, config
        self._state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
        decoder: DecoderConfig = nnx.merge(graph, state).config
        self._new_cache = functools.partial(
            init_cache,
            decoder,
            slots=config.slots,
            length=config.context_length,
            dtype=jnp.dtype(config.cache_dtype),
        )
        self._cache = jax.eval_shape(self._new_cache)
        self._steps: dict[tuple[int, int], Callable[..., tuple[Sampled, KVCache]]] = {}
        self._copy: Callable[..., KVCache] | None = None

    def compile(self, log: Callable[[str], None] = lambda name: None) -> None:
        """Compiles every program; calls `log` with each one's name before it does."""
        for rows, chunk in self._config.shapes:
            log(f"engine step {rows} x {chunk}")
            inputs = empty_inputs(rows, chunk, slots=self._config.slots)
            step = jax.jit(self._step, donate_argnums=(1,))
            self._steps[rows, chunk] = compile_ahead(step, self._state, self._cache, inputs)
        log("engine copy")
        copy = jax.jit(self._copy_slot, donate_argnums=(0,))
        number = jax.ShapeDtypeStruct((), np.int32)
        self._copy = compile_ahead(copy, self._cache, number, number)

    def new_cache(self) -> KVCache:
        """An empty cache."""
        return self._new_cache()

    def step(self, state: Tree, cache: KVCache, inputs: StepInputs) -> tuple[Sampled, KVCache]:
        """Extends slots and samples; the cache is donated."""
        return self._steps[inputs.tokens.shape](state, cache, inputs)

    def copy(self, cache: KVCache, source: int, target: int) -> KVCache:
        """Copies a slot's keys and values; the cache is donated."""
        assert self._copy is not None, "compile() comes first"
        return self._copy(cache, np.int32(source), np.int32(target))

    def __len__(self) -> int:
        return len(self._steps) + (self._copy is not None)

    def _step(self, state: Tree, cache: KVCache, inputs: StepInputs) -> tuple[Sampled, KVCache]:
        tokens, slot, start, valid, temperature, seed = (jnp.asarray(part) for part in inputs)
        decoder = nnx.merge(self._graph, state)
        hidden, cache = decoder.extend(cache, tokens, slot, start, valid)
        return sample(decoder.logits(hidden), temperature, seed, start + valid), cache

    @staticmethod
    def _copy_slot(cache: KVCache, source: Array, target: Array) -> KVCache:
        def copied(part: Array) -> Array:
            row = jax.lax.dynamic_slice_in_dim(part, source, 1, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(part, row, target, axis=1)

        return KVCache(copied(cache.key), copied(cache.value))
