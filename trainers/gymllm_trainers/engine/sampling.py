"""Draws tokens from logits: the last part of the engine's compiled step.

Two programs: `sample_plain` knows temperatures alone and costs a few passes over the logits; `sample_full`
knows every field of `SamplingParams` that acts on logits, in the order of its docstring. Both are functions
of a row alone: a row gives the same bits whatever F is and whatever the other rows hold. Hence

- sums of floats are written out as adds of halves, whose order no compiler changes;
- tokens are drawn, and cuts by `top_k` and `top_p` found, with integers, whose sums are exact in any order.

A token is drawn by inverse transform from one uniform number a row: V Gumbel variates a row would cost more
than the output projection on a CPU. The uniform number comes from the host (`uniform`): a step takes no key.

Axes: F rows, V vocabulary; N columns of K = DEPTH tokens, column n holding the tokens n, n + N, n + 2N, ...;
X ids that were seen, B ids with a bias, W = ceil(V / 32) words of a bit mask, C candidates for a cut.
"""

from __future__ import annotations

from typing import NamedTuple, final

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array, lax

DEPTH = 64
"""Tokens of a column, a power of two."""
MAX_TOP_LOGPROBS = 20
"""Likeliest tokens that `sample_full` tells; the most that `SamplingParams.top_logprobs` can ask for."""
_CANDIDATES = 64  # cuts among so many likeliest tokens need no search through all
_ONE = 2**30  # the weight of a certain token: V rounding errors more still fit int32
_NO_CUT = np.int32(0x7F800000)  # bits of infinity: nothing is further from the likeliest
_TOP_P_SLACK = 1e-6  # what rounding can take off a sum of shares: 0.5 + 0.3 reaches 0.8

RowArray = npt.NDArray[np.float32] | Array
IdArray = npt.NDArray[np.int32] | Array
MaskArray = npt.NDArray[np.uint32] | Array


class PlainInputs(NamedTuple):
    """Inputs of `sample_plain`."""

    temperature: RowArray
    """[F] float32; 0 is greedy."""
    uniform: RowArray
    """[F] float32 in [0, 1), from `uniform`."""


class FullInputs(NamedTuple):
    """Inputs of `sample_full`; `neutral_inputs` makes some that change nothing."""

    temperature: RowArray
    """[F] float32; 0 is greedy."""
    uniform: RowArray
    """[F] float32 in [0, 1), from `uniform`."""
    top_k: IdArray
    """[F] int32; 0 is all."""
    top_p: RowArray
    """[F] float32 in (0, 1]."""
    min_p: RowArray
    """[F] float32 in [0, 1]."""
    repetition_penalty: RowArray
    """[F] float32 > 0; 1 is none."""
    presence_penalty: RowArray
    """[F] float32."""
    frequency_penalty: RowArray
    """[F] float32."""
    seen_ids: IdArray
    """[F, X] int32; ids in the prompt or generated, each once, then -1."""
    seen_count: IdArray
    """[F, X] int32; how many times each was generated, 0 for those of the prompt only."""
    bias_ids: IdArray
    """[F, B] int32; ids with a bias, each once, then -1."""
    bias: RowArray
    """[F, B] float32 below infinity; -inf forbids."""
    allowed: MaskArray
    """[F, W] uint32; token i may be drawn if bit i % 32 of word i // 32 is set."""
    plain: npt.NDArray[np.bool_] | Array
    """[F] bool; nothing above changes the row, so that it may be drawn by `sample_plain`."""


class Sampled(NamedTuple):
    """What was drawn; all [F]."""

    token: Array
    """int32."""
    logprob: Array
    """float32, nats, of `token` under what it was drawn from; when greedy, `base_logprob`."""
    base_logprob: Array
    """float32, nats, of `token` under the logits themselves, at temperature 1."""
    bad: Array
    """bool; nothing could be drawn: a logit is NaN or inf, or no token is allowed. The rest is then void."""


class FullSampled(NamedTuple):
    """What was drawn, and what else was likely."""

    sampled: Sampled
    top_ids: Array
    """[F, 20] int32; the likeliest tokens under the logits themselves, the likeliest first; with fewer tokens
    than 20, the rest are -1."""
    top_logprobs: Array
    """[F, 20] float32; their log-probabilities at temperature 1, -inf where there is none."""


def uniform(seed: npt.ArrayLike, position: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """The uniform numbers for some requests at some positions, on the host.

    SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", doi:
    10.1145/2660193.2660195), started at a hash of the seed and `position` steps on: a pure function of both.

    Args:
        seed: Integers from -2^63 to 2^64 - 1, of any shape; taken modulo 2^64.
        position: Integers >= 0, of a shape that goes with it.

    Returns:
        float32 in [0, 1), multiples of 2^-24.
    """
    # Arrays of one axis or more wrap around; scalars warn.
    start = _mixed(np.atleast_1d(seed).astype(np.uint64) + _GOLDEN)
    steps = np.atleast_1d(position).astype(np.uint64) + np.uint64(1)
    bits = _mixed(start + steps * _GOLDEN) >> np.uint64(40)
    value = bits.astype(np.float32) * np.float32(2**-24)
    return value.reshape(np.broadcast_shapes(np.shape(seed), np.shape(position)))


def neutral_inputs(rows: int, vocabulary: int, *, seen: int = 0, biases: int = 0) -> FullInputs:
    """Inputs of `sample_full` with which it draws as `sample_plain` does, as arrays to write to.

    Args:
        rows: F.
        vocabulary: V.
        seen: X.
        biases: B.
    """
    return FullInputs(
        temperature=np.ones(rows, np.float32),
        uniform=np.zeros(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
        repetition_penalty=np.ones(rows, np.float32),
        presence_penalty=np.zeros(rows, np.float32),
        frequency_penalty=np.zeros(rows, np.float32),
        seen_ids=np.full((rows, seen), -1, np.int32),
        seen_count=np.zeros((rows, seen), np.int32),
        bias_ids=np.full((rows, biases), -1, np.int32),
        bias=np.zeros((rows, biases), np.float32),
        allowed=np.full((rows, -(-vocabulary // 32)), 0xFFFFFFFF, np.uint32),
        plain=np.ones(rows, np.bool_),
    )


@final
class SeenTokens:
    """The distinct tokens of one request's prompt and generation, on the host, for `FullInputs`."""

    def __init__(self, prompt_ids: npt.ArrayLike, max_new_tokens: int) -> None:
        """Starts with nothing generated.

        Args:
            prompt_ids: Integers, shape [N].
            max_new_tokens: Most tokens that will be added.
        """
        distinct = np.unique(np.asarray(prompt_ids, np.int32))
        self._size = len(distinct)
        self._ids = np.concatenate([distinct, np.full(max_new_tokens, -1, np.int32)])
        self._count = np.zeros(len(self._ids), np.int32)
        self._places = {int(token_id): place for place, token_id in enumerate(distinct)}

    def __len__(self) -> int:
        """How many there are: what X must be at least."""
        return self._size

    def add(self, token_id: int) -> None:
        """Counts a generated token."""
        place = self._places.setdefault(token_id, self._size)
        self._ids[place] = token_id
        self._count[place] += 1
        self._size = len(self._places)

    def fill(self, seen_ids: npt.NDArray[np.int32], seen_count: npt.NDArray[np.int32]) -> None:
        """Writes them to a row of `FullInputs.seen_ids` and of `seen_count`, both [X]."""
        seen_ids[: self._size], seen_ids[self._size :] = self._ids[: self._size], -1
        seen_count[: self._size], seen_count[self._size :] = self._count[: self._size], 0


def sample_plain(logits_FV: Array, inputs: PlainInputs) -> Sampled:
    """Draws a token a row from the softmax of its logits over its temperature.

    Args:
        logits_FV: float32.
        inputs: See there.
    """
    assert logits_FV.dtype == jnp.float32
    top_F = jnp.max(logits_FV, axis=-1)
    base_FV = logits_FV - top_F[:, None]
    base_sum_F = _sum(jnp.exp(_columns(base_FV)))
    scaled_FV = _scaled(base_FV, inputs.temperature)
    drawn_F, logprob_F = _draw(scaled_FV, inputs.uniform)
    return _chosen(logits_FV, top_F, base_FV, base_sum_F, inputs.temperature, drawn_F, logprob_F)


def sample_full(logits_FV: Array, inputs: FullInputs) -> FullSampled:
    """Draws a token a row, with everything that `SamplingParams` can ask for.

    The cuts keep ties: every token as likely as the last one kept is kept, too. Shares within 1e-6 of `top_p`
    reach it.

    Args:
        logits_FV: float32.
        inputs: See there.
    """
    assert logits_FV.dtype == jnp.float32
    inputs = FullInputs(*(jnp.asarray(part) for part in inputs))
    base_top_F = jnp.max(logits_FV, axis=-1)
    base_FV = logits_FV - base_top_F[:, None]
    base_sum_F = _sum(jnp.exp(_columns(base_FV)))
    top_logits_FC, top_ids_FC = _likeliest(base_FV, MAX_TOP_LOGPROBS)
    top_logprobs_FC = top_logits_FC - jnp.log(base_sum_F)[:, None]

    weighed_FV = _penalised(_biased(_masked(logits_FV, inputs.allowed), inputs), inputs)
    top_F = jnp.max(weighed_FV, axis=-1)
    scaled_FV = _scaled(weighed_FV - top_F[:, None], inputs.temperature)
    kept_FV = jnp.where(
        _distance(scaled_FV) <= _cut(scaled_FV, inputs)[:, None], scaled_FV, -jnp.inf
    )
    drawn_F, logprob_F = _draw(kept_FV, inputs.uniform)
    sampled = _chosen(
        weighed_FV, top_F, base_FV, base_sum_F, inputs.temperature, drawn_F, logprob_F
    )
    # Says nothing new, but a maximum with one use is fused with the subtraction by XLA on CPUs, and the whole
    # then takes over twice as long (jaxlib 0.10.2).
    sampled = sampled._replace(bad=sampled.bad | ~jnp.isfinite(base_top_F))
    return FullSampled(sampled, top_ids_FC, top_logprobs_FC)


# --- Columns ------------------------------------------------------------------------------------


def _columns(value_FV: Array) -> Array:
    """[F, DEPTH, N], padded with -inf."""
    rows, vocabulary = value_FV.shape
    padded = jnp.pad(value_FV, ((0, 0), (0, -vocabulary % DEPTH)), constant_values=-jnp.inf)
    return padded.reshape(rows, DEPTH, -1)


def _column(value_FV: Array, column_FC: Array) -> Array:
    """Some columns, [F, C, DEPTH], padded with -inf."""
    rows, vocabulary = value_FV.shape
    width = -(-vocabulary // DEPTH)
    ids = (column_FC[:, :, None] + jnp.arange(DEPTH, dtype=jnp.int32) * width).reshape(rows, -1)
    value = jnp.take_along_axis(value_FV, jnp.minimum(ids, vocabulary - 1), axis=1)
    return jnp.where(ids < vocabulary, value, -jnp.inf).reshape(rows, -1, DEPTH)


def _sum(value_FKN: Array) -> Array:
    """Sums of floats over both axes, [F], in an order that the code says."""
    while value_FKN.shape[1] > 1:
        half = value_FKN.shape[1] // 2
        value_FKN = value_FKN[:, :half] + value_FKN[:, half:]
    value_FN = value_FKN[:, 0]
    while value_FN.shape[1] > 1:
        half = (value_FN.shape[1] + 1) // 2
        rest = jnp.pad(value_FN[:, half:], ((0, 0), (0, 2 * half - value_FN.shape[1])))
        value_FN = value_FN[:, :half] + rest
    return value_FN[:, 0]


def _likeliest(value_FV: Array, count: int) -> tuple[Array, Array]:
    """The largest values, the largest first, and their tokens, [F, count]; -inf and -1 past the last.

    They are in the columns with the largest maxima, so few values need sorting.
    """
    columns = _columns(value_FV)
    width = columns.shape[2]
    _, column_FC = lax.top_k(jnp.max(columns, axis=1), min(count, width))
    within_FC = _column(value_FV, column_FC).reshape(value_FV.shape[0], -1)
    value_FC, place_FC = lax.top_k(within_FC, min(count, within_FC.shape[1]))
    chosen_FC = jnp.take_along_axis(column_FC, place_FC // DEPTH, axis=1)
    ids_FC = jnp.where(value_FC > -jnp.inf, chosen_FC + place_FC % DEPTH * width, -1)
    missing = ((0, 0), (0, count - value_FC.shape[1]))
    return (
        jnp.pad(value_FC, missing, constant_values=-jnp.inf),
        jnp.pad(ids_FC, missing, constant_values=-1).astype(jnp.int32),
    )


# --- Logits -------------------------------------------------------------------------------------


def _masked(logits_FV: Array, allowed_FW: MaskArray) -> Array:
    rows, vocabulary = logits_FV.shape
    bits = allowed_FW[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & jnp.uint32(1)
    return jnp.where(bits.reshape(rows, -1)[:, :vocabulary] != 0, logits_FV, -jnp.inf)


def _biased(logits_FV: Array, inputs: FullInputs) -> Array:
    row = jnp.arange(logits_FV.shape[0])[:, None]
    ids_FB = _droppable(inputs.bias_ids, logits_FV.shape[1])
    return logits_FV.at[row, ids_FB].add(inputs.bias, mode="drop", unique_indices=False)


def _penalised(logits_FV: Array, inputs: FullInputs) -> Array:
    row = jnp.arange(logits_FV.shape[0])[:, None]
    ids_FX = _droppable(inputs.seen_ids, logits_FV.shape[1])
    seen_FX = logits_FV.at[row, ids_FX].get(mode="fill", fill_value=0)
    penalty_F1 = inputs.repetition_penalty[:, None]
    seen_FX = seen_FX / jnp.where(seen_FX > 0, penalty_F1, 1 / penalty_F1)
    seen_FX -= jnp.where(inputs.seen_count > 0, inputs.presence_penalty[:, None], 0)
    seen_FX -= inputs.frequency_penalty[:, None] * inputs.seen_count.astype(jnp.float32)
    return logits_FV.at[row, ids_FX].set(seen_FX, mode="drop")


def _droppable(ids: IdArray, vocabulary: int) -> Array:
    """Padding moved past the end: JAX counts negative ids from the end."""
    return jnp.where(ids < 0, vocabulary, ids)


def _scaled(below_FV: Array, temperature_F: RowArray) -> Array:
    """Logits less their largest, over the temperature; as they are when greedy, where none is drawn."""
    temperature_F = jnp.asarray(temperature_F)
    # Within what has a reciprocal, which XLA may multiply by: -inf times 0 would be NaN.
    divisor_F = jnp.where(temperature_F == 0, 1.0, jnp.clip(temperature_F, 1e-30, 1e37))
    return below_FV / divisor_F[:, None]


# --- Cuts ---------------------------------------------------------------------------------------


def _distance(scaled_FV: Array) -> Array:
    """How far below the likeliest, as the bits of a float: int32 >= 0 in the order of the distances."""
    return lax.bitcast_convert_type(jnp.abs(scaled_FV), jnp.int32)


def _weights(scaled: Array, sum_F: Array) -> Array:
    """Shares as integers; together about `_ONE`."""
    share = jnp.exp(scaled) / sum_F.reshape(-1, *[1] * (scaled.ndim - 1))
    return jnp.round(share * _ONE).astype(jnp.int32)


def _cut(scaled_FV: Array, inputs: FullInputs) -> Array:
    """The largest `_distance` that `top_k`, `top_p` and `min_p` keep, [F]."""
    vocabulary = scaled_FV.shape[1]
    distance_FV = _distance(scaled_FV)
    likeliest_FC, _ = _likeliest(scaled_FV, min(_CANDIDATES, vocabulary))
    candidates_FC = _distance(likeliest_FC)

    needs_k_F = (inputs.top_k > 0) & (inputs.top_k < vocabulary)
    k_F = _smallest_reaching(
        jnp.where(needs_k_F, inputs.top_k, 0),
        distance_FV,
        jnp.ones_like(distance_FV),
        candidates_FC,
        jnp.ones_like(candidates_FC),
    )
    k_F = jnp.where(needs_k_F, k_F, _NO_CUT)

    needs_p_F = inputs.top_p < 1
    sum_F = _sum(jnp.exp(_columns(scaled_FV)))
    weight_FV = jnp.where(distance_FV <= k_F[:, None], _weights(scaled_FV, sum_F), 0)
    weight_FC = jnp.where(candidates_FC <= k_F[:, None], _weights(likeliest_FC, sum_F), 0)
    total_F = jnp.sum(weight_FV, axis=-1).astype(jnp.float32)
    target_F = (total_F * (inputs.top_p - _TOP_P_SLACK)).astype(jnp.int32)
    p_F = _smallest_reaching(
        jnp.where(needs_p_F, jnp.maximum(target_F, 1), 0),
        distance_FV,
        weight_FV,
        candidates_FC,
        weight_FC,
    )
    p_F = jnp.where(needs_p_F, p_F, _NO_CUT)

    m_F = _distance(jnp.log(inputs.min_p))
    return jnp.minimum(jnp.minimum(k_F, p_F), m_F)


def _smallest_reaching(
    target_F: Array, distance_FV: Array, weight_FV: Array, near_FC: Array, near_weight_FC: Array
) -> Array:
    """The smallest distance within which weights sum to a target, [F].

    Most often it is among the likeliest tokens; only then where a row's is not are the bits of its distance
    found one after another, by a pass over all tokens each.

    Args:
        target_F: Integers; a row with 0 is left out.
        distance_FV: See `_distance`.
        weight_FV: Integers >= 0 that sum to the target or more.
        near_FC: The smallest distances, the smallest first.
        near_weight_FC: Their weights.
    """
    sums_FC = jnp.cumsum(near_weight_FC, axis=-1)
    place_F = jnp.sum(sums_FC < target_F[:, None], axis=-1)
    count = near_FC.shape[1]
    found_F = jnp.take_along_axis(near_FC, jnp.minimum(place_F, count - 1)[:, None], axis=1)[:, 0]
    # Others may be as far as the last of the near ones, so below it is all that is known.
    low_F = jnp.where(place_F < count, found_F, near_FC[:, -1]) - 1
    high_F = jnp.where(place_F < count, found_F, _NO_CUT)

    def unfinished(bounds: tuple[Array, Array]) -> Array:
        low_F, high_F = bounds
        return jnp.any(high_F - low_F > 1)

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low_F, high_F = bounds
        middle_F = low_F + (high_F - low_F) // 2
        within_F = jnp.sum(jnp.where(distance_FV <= middle_F[:, None], weight_FV, 0), axis=-1)
        low_F = jnp.where(within_F < target_F, middle_F, low_F)
        high_F = jnp.where(within_F < target_F, high_F, middle_F)
        # An exact hit ends the search: smaller distances that reach the target keep the same tokens.
        return jnp.where(within_F == target_F, middle_F - 1, low_F), high_F

    return lax.while_loop(unfinished, halve, (low_F, high_F))[1]


# --- Draws --------------------------------------------------------------------------------------


def _draw(scaled_FV: Array, uniform_F: RowArray) -> tuple[Array, Array]:
    """A token a row from the softmax of `scaled_FV`, which is at most 0, and its log-probability."""
    columns = _columns(scaled_FV)
    sum_F = _sum(jnp.exp(columns))
    upto_FN = jnp.cumsum(jnp.sum(_weights(columns, sum_F), axis=1), axis=-1)
    total_F = upto_FN[:, -1]
    target_F = jnp.minimum((uniform_F * total_F.astype(jnp.float32)).astype(jnp.int32), total_F - 1)
    column_F = jnp.sum(upto_FN <= target_F[:, None], axis=-1, dtype=jnp.int32)
    before_F = jnp.take_along_axis(upto_FN, jnp.maximum(column_F - 1, 0)[:, None], axis=1)[:, 0]
    before_F = jnp.where(column_F > 0, before_F, 0)

    inside_FK = _column(scaled_FV, column_F[:, None])[:, 0]
    within_FK = before_F[:, None] + jnp.cumsum(_weights(inside_FK, sum_F), axis=-1)
    place_F = jnp.sum(within_FK <= target_F[:, None], axis=-1, dtype=jnp.int32)
    # Two programs' weights of one token may differ in the last bit: past the end is the likeliest.
    place_F = jnp.where(place_F < DEPTH, place_F, jnp.argmax(inside_FK, axis=-1))
    token_F = column_F + place_F * columns.shape[2]
    logprob_F = jnp.take_along_axis(inside_FK, place_F[:, None], axis=1)[:, 0] - jnp.log(sum_F)
    return token_F.astype(jnp.int32), logprob_F


def _chosen(
    logits_FV: Array,
    top_F: Array,
    base_FV: Array,
    base_sum_F: Array,
    temperature_F: RowArray,
    drawn_F: Array,
    logprob_F: Array,
) -> Sampled:
    """The drawn token, or the first of the likeliest when greedy (`argmax` is slow on a CPU)."""
    vocabulary = logits_FV.shape[1]
    ids = jnp.arange(vocabulary, dtype=jnp.int32)
    first_F = jnp.min(jnp.where(logits_FV == top_F[:, None], ids, vocabulary), axis=-1)
    greedy_F = jnp.asarray(temperature_F) == 0
    token_F = jnp.clip(jnp.where(greedy_F, first_F, drawn_F), 0, vocabulary - 1)
    base_F = jnp.take_along_axis(base_FV, token_F[:, None], axis=1)[:, 0] - jnp.log(base_sum_F)
    return Sampled(
        token=token_F,
        logprob=jnp.where(greedy_F, base_F, logprob_F),
        base_logprob=base_F,
        # A maximum may pass over a NaN (XLA's choice on CPUs), a sum never does.
        bad=~(jnp.isfinite(top_F) & jnp.isfinite(base_sum_F)),
    )


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mixed(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
