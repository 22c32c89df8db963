"""What is drawn from logits: against float64 NumPy written from `SamplingParams`' docstring alone."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import numpy as np
import numpy.typing as npt
import pytest

from gymllm_trainers.compilation import _QUICK_ON_CPU
from gymllm_trainers.engine.sampling import (
    _GOLDEN,
    FullInputs,
    FullSampled,
    PlainInputs,
    Sampled,
    SeenTokens,
    _mixed,
    neutral_inputs,
    sample_full,
    sample_plain,
    uniform,
)

Floats = npt.NDArray[np.float64]


# As the engine compiles them. Few shapes, because compiling is what these tests take their time for.
def _options() -> dict[str, bool | int] | None:
    if jax.default_backend() != "cpu":
        return None
    try:
        jax.jit(lambda x: -x).lower(1.0).compile(compiler_options=_QUICK_ON_CPU)
    except jax.errors.JaxRuntimeError:
        return None  # another release of XLA, for which the engine leaves them out too
    return _QUICK_ON_CPU


_OPTIONS = _options()
plain = jax.jit(sample_plain, compiler_options=_OPTIONS)
full = jax.jit(sample_full, compiler_options=_OPTIONS)
SMALL, LARGE = (4096, 300), (64, 3001)


def host(tree):  # any named tuple of arrays, as NumPy's
    return jax.tree.map(np.asarray, tree)


def draw_plain(
    logits: npt.NDArray[np.float32], temperature: float, draws: npt.NDArray[np.float32]
) -> Sampled:
    rows = np.full(len(draws), temperature, np.float32)
    return host(
        plain(np.broadcast_to(logits, (len(draws), logits.shape[-1])), PlainInputs(rows, draws))
    )


def make_inputs(rows: int, vocabulary: int, **options) -> FullInputs:
    """Neutral inputs but for some; `seen` and `bias` are mappings, `allowed` ids, one for all rows."""
    seen: Mapping[int, int] = options.pop("seen", {})
    bias: Mapping[int, float] = options.pop("bias", {})
    allowed = options.pop("allowed", None)
    inputs = neutral_inputs(rows, vocabulary, seen=16, biases=4)
    inputs.seen_ids[:, : len(seen)] = list(seen)
    inputs.seen_count[:, : len(seen)] = list(seen.values())
    inputs.bias_ids[:, : len(bias)] = list(bias)
    inputs.bias[:, : len(bias)] = list(bias.values())
    if allowed is not None:
        inputs.allowed[:] = 0
        for token in allowed:
            inputs.allowed[:, token // 32] |= np.uint32(1 << token % 32)
    for name, value in options.items():
        getattr(inputs, name)[:] = value
    return inputs


def reference(logits: npt.NDArray[np.float32], **options) -> Floats:
    """The distribution's log-probabilities, -inf where nothing is drawn."""
    z = logits.astype(np.float64)
    if "allowed" in options:
        z[[i for i in range(len(z)) if i not in options["allowed"]]] = -np.inf
    for token, bias in options.get("bias", {}).items():
        z[token] += bias
    for token, count in options.get("seen", {}).items():
        penalty = options.get("repetition_penalty", 1.0)
        z[token] = z[token] / penalty if z[token] > 0 else z[token] * penalty
        z[token] -= options.get("presence_penalty", 0.0) * (count > 0)
        z[token] -= options.get("frequency_penalty", 0.0) * count
    z = z / options.get("temperature", 1.0)
    k = options.get("top_k", 0)
    if k:
        z[z < np.sort(z)[::-1][min(k, len(z)) - 1]] = -np.inf
    p = np.exp(log_softmax(z))
    if options.get("top_p", 1.0) < 1:
        likeliest = np.sort(p)[::-1]
        last = np.searchsorted(np.cumsum(likeliest), options["top_p"] - 1e-6)
        z[p < likeliest[last]] = -np.inf
    z[p < options.get("min_p", 0.0) * p.max()] = -np.inf
    return log_softmax(z)


def log_softmax(z: Floats) -> Floats:
    z = z - z.max()
    return z - np.log(np.exp(z).sum())


OPTIONS = {
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 5},
    "wide top-k": {"top_k": 130},
    "more than all": {"top_k": 10_000},
    "top-p": {"top_p": 0.7},
    "wide top-p": {"top_p": 0.98, "temperature": 1.8},
    "tiny top-p": {"top_p": 1e-8},
    "min-p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.7, "seen": {3: 0, 250: 2, 299: 1}},
    "presence": {"presence_penalty": 1.5, "seen": {3: 0, 250: 2, 299: 1}},
    "frequency": {"frequency_penalty": -0.8, "seen": {3: 0, 250: 2, 299: 5}},
    "bias": {"bias": {7: 4.0, 8: -2.5, 299: -np.inf}},
    "grammar": {"allowed": {1, 31, 32, 64, 200, 299}},
    "one allowed": {"allowed": {299}},
    "k within a grammar": {"allowed": {1, 31, 32}, "top_k": 20},
    "p of the k": {"top_k": 100, "top_p": 0.9, "temperature": 2.0},
    "p of few": {"top_k": 4, "top_p": 0.8},
    "everything": {
        "temperature": 1.3,
        "top_k": 90,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "seen": {5: 1, 6: 3, 7: 0, 150: 1},
        "bias": {6: 3.0, 9: 1.0, 11: -np.inf},
        "allowed": set(range(0, 300, 2)) | {5, 7, 9, 11},
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_full_draws_from_the_documented_distribution(options) -> None:
    rows, vocabulary = SMALL
    logits = np.random.default_rng(1).normal(size=vocabulary).astype(np.float32) * 2
    expected = reference(logits, **options)
    draws = uniform(11, np.arange(rows))
    out = host(
        full(
            np.broadcast_to(logits, (rows, vocabulary)),
            make_inputs(rows, vocabulary, uniform=draws, **options),
        )
    )
    token, base = out.sampled.token, log_softmax(logits.astype(np.float64))
    assert np.isfinite(expected[token]).all()
    assert not out.sampled.bad.any()
    np.testing.assert_allclose(out.sampled.logprob, expected[token], atol=1e-5)
    np.testing.assert_allclose(out.sampled.base_logprob, base[token], atol=1e-5)
    counts, shares = np.bincount(token, minlength=vocabulary), np.exp(expected)
    assert set(np.flatnonzero(shares > 0.01)) <= set(token.tolist())
    assert chi_square_fits(counts, shares)
    likeliest = np.argsort(-base, kind="stable")[:20]
    np.testing.assert_array_equal(out.top_ids[0], likeliest)
    np.testing.assert_allclose(out.top_logprobs[0], base[likeliest], atol=1e-5)


def chi_square_fits(counts: npt.NDArray[np.int64], shares: Floats) -> bool:
    """Whether counts are within what happens once in a million draws of them (Wilson and Hilferty 1931)."""
    expected = shares * counts.sum()
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1]
    freedom = len(expected) - 1
    if freedom < 1:
        return True
    statistic = ((observed - expected) ** 2 / expected).sum()
    spread = 2 / (9 * freedom)
    return bool(((statistic / freedom) ** (1 / 3) - (1 - spread)) / np.sqrt(spread) < 4.75)


@pytest.mark.parametrize("vocabulary", [1, 65, 300])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_plain_draws_from_the_softmax(vocabulary: int, temperature: float) -> None:
    logits = np.random.default_rng(2).normal(size=vocabulary).astype(np.float32) * 2
    out = draw_plain(logits, temperature, uniform(5, np.arange(4096)))
    expected = log_softmax(logits.astype(np.float64) / np.float32(temperature))
    assert chi_square_fits(np.bincount(out.token, minlength=vocabulary), np.exp(expected))
    np.testing.assert_allclose(out.logprob, expected[out.token], atol=1e-5)
    base = log_softmax(logits.astype(np.float64))
    np.testing.assert_allclose(out.base_logprob, base[out.token], atol=1e-5)


def test_the_uniform_number_goes_through_all_tokens_evenly() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    even = (np.arange(4096, dtype=np.float32) + 0.5) / 4096
    counts = np.bincount(draw_plain(logits, 1.0, even).token)
    assert counts.tolist() == [2048, 1024, 512, 512]


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    logits = np.zeros(LARGE, np.float32)
    logits[0, [2999, 130, 7]] = 2
    logits[1, 64] = -1
    logits[2] = -np.inf
    logits[2, 400] = -1e30
    zero, draws = np.zeros(len(logits), np.float32), uniform(0, np.arange(len(logits)))
    out = host(plain(logits, PlainInputs(zero, draws)))
    assert out.token[:3].tolist() == [7, 0, 400]
    np.testing.assert_array_equal(out.logprob, out.base_logprob)
    expected = log_softmax(logits[0].astype(np.float64))[7]
    np.testing.assert_allclose(out.base_logprob[0], expected, atol=1e-5)
    assert out.base_logprob[2] == 0
    options = {"temperature": 0.0, "bias": {130: 0.5, 9: 3.0}, "top_k": 3}
    of_full = host(full(logits, make_inputs(*LARGE, uniform=draws, **options))).sampled
    assert of_full.token[:3].tolist() == [9, 9, 400]
    np.testing.assert_array_equal(of_full.logprob, of_full.base_logprob)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, {0, 1, 2, 3}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.4}, {0, 1, 2, 3}),
        ({"top_p": 0.3}, {0}),
        ({"top_p": 0.9}, {0, 1, 2, 3}),
        ({"min_p": 0.66}, {0, 1, 2, 3}),
        ({"min_p": 0.67}, {0}),
        ({"min_p": 1.0}, {0}),
    ],
)
def test_cuts_keep_ties(options: dict[str, float], kept: set[int]) -> None:
    rows, vocabulary = SMALL
    logits = np.full(vocabulary, -np.inf, np.float32)
    logits[:5] = np.log([0.3, 0.2, 0.2, 0.2, 0.1])
    inputs = make_inputs(rows, vocabulary, uniform=uniform(3, np.arange(rows)), **options)
    out = host(full(np.broadcast_to(logits, SMALL), inputs))
    assert set(out.sampled.token.tolist()) == kept


@pytest.mark.parametrize("value", [0.0, 1e-3, -5.0])
@pytest.mark.parametrize("options", [{"top_k": 100}, {"top_p": 0.1}])
def test_a_cut_through_a_thousand_ties_keeps_them_all(
    value: float, options: dict[str, float]
) -> None:
    rows, vocabulary = LARGE
    logits = np.full(vocabulary, value - 1, np.float32)
    logits[2000:3000] = value
    even = np.linspace(0, 1, rows, endpoint=False, dtype=np.float32)
    inputs = make_inputs(rows, vocabulary, uniform=even, **options)
    out = host(full(np.broadcast_to(logits, LARGE), inputs)).sampled
    assert ((out.token >= 2000) & (out.token < 3000)).all()
    assert len(np.unique(out.token)) == rows
    np.testing.assert_allclose(out.logprob, -np.log(1000), atol=1e-5)


@functools.cache
def batch() -> tuple[npt.NDArray[np.float32], FullInputs]:
    """64 rows that ask for different things."""
    rng, rows, vocabulary = np.random.default_rng(4), *LARGE
    logits = rng.normal(size=(rows, vocabulary)).astype(np.float32) * rng.uniform(
        0.1, 6, (rows, 1)
    ).astype(np.float32)
    inputs = neutral_inputs(rows, vocabulary, seen=16, biases=4)
    inputs.uniform[:] = uniform(np.arange(rows), 3)
    inputs.temperature[:] = rng.choice([0, 0.5, 1, 1, 2.3], rows)
    inputs.top_k[:] = rng.choice([0, 1, 40, 700], rows)
    inputs.top_p[:] = rng.choice([1, 0.3, 0.95, 0.999], rows)
    inputs.min_p[:] = rng.choice([0, 0, 0.02], rows)
    inputs.repetition_penalty[:] = rng.choice([1, 1.3], rows)
    inputs.presence_penalty[:] = rng.choice([0, 0.7], rows)
    inputs.frequency_penalty[:] = rng.choice([0, 0.31], rows)
    for row in range(rows):
        inputs.seen_ids[row, :10] = rng.choice(vocabulary, 10, replace=False)
        inputs.seen_count[row, :10] = rng.integers(0, 4, 10)
        inputs.bias_ids[row, :3] = rng.choice(vocabulary, 3, replace=False)
        inputs.bias[row, :3] = rng.normal(size=3)
    inputs.allowed[::3] = rng.integers(0, 2**32, inputs.allowed[::3].shape, np.uint32)
    return logits, inputs


def take(tree, rows):
    return jax.tree.map(lambda part: part[rows], tree)


def assert_same_bits(one, other) -> None:
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("size", [1, 3, 17])
def test_a_row_gives_the_same_bits_in_any_batch(size: int) -> None:
    logits, inputs = batch()
    simple = PlainInputs(inputs.temperature, inputs.uniform)
    whole, whole_plain = host(full(logits, inputs)), host(plain(logits, simple))
    order = np.random.default_rng(size).permutation(len(logits))
    for start in range(0, min(len(order), 4 * size), size):
        rows = np.resize(order[start:], size)
        assert_same_bits(host(full(logits[rows], take(inputs, rows))), take(whole, rows))
        assert_same_bits(host(plain(logits[rows], take(simple, rows))), take(whole_plain, rows))


PER_ROW = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def test_rows_of_a_mixed_batch_agree_with_the_reference() -> None:
    logits, inputs = batch()
    out = host(full(logits, inputs))
    for row in np.flatnonzero(inputs.temperature > 0):
        words = inputs.allowed[row]
        options = {name: float(getattr(inputs, name)[row]) for name in PER_ROW}
        expected = reference(
            logits[row],
            **options,
            top_k=int(inputs.top_k[row]),
            seen=dict(zip(inputs.seen_ids[row, :10], inputs.seen_count[row, :10], strict=True)),
            bias=dict(
                zip(inputs.bias_ids[row, :3], inputs.bias[row, :3].astype(float), strict=True)
            ),
            allowed={i for i in range(logits.shape[1]) if words[i // 32] >> (i % 32) & 1},
        )
        token = out.sampled.token[row]
        np.testing.assert_allclose(out.sampled.logprob[row], expected[token], atol=2e-5)


def test_neutral_inputs_draw_what_plain_draws() -> None:
    logits, inputs = batch()
    neutral = neutral_inputs(*logits.shape)._replace(
        uniform=inputs.uniform, temperature=inputs.temperature
    )
    out = host(plain(logits, PlainInputs(inputs.temperature, inputs.uniform)))
    assert_same_bits(host(full(logits, neutral)).sampled, out)


@pytest.mark.parametrize("temperature", [1e-37, 1e-6, 1e6, 1e30])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e37])
def test_extreme_temperatures_and_logits(temperature: float, scale: float) -> None:
    logits = np.random.default_rng(6).normal(size=300).astype(np.float32) * np.float32(scale)
    logits[100:130] = -np.inf
    out = draw_plain(logits, temperature, uniform(1, np.arange(4096)))
    assert not out.bad.any()
    assert np.isfinite(out.logprob).all()
    assert not np.isin(out.token, np.arange(100, 130)).any()
    if temperature <= 1e-6:
        assert (out.token == logits.argmax()).all()
        assert (out.logprob == 0).all()
    if temperature >= 1e6 and scale == 1:
        np.testing.assert_allclose(out.logprob, -np.log(270), atol=1e-4)


@pytest.mark.parametrize("last", [0.0, 1 - 2**-24])
def test_the_ends_of_the_uniform_range_draw_possible_tokens(last: float) -> None:
    logits = np.full(LARGE, -np.inf, np.float32)
    logits[:, 1000:2000] = np.random.default_rng(0).normal(size=(len(logits), 1000))
    rows = np.ones(len(logits), np.float32)
    out = host(plain(logits, PlainInputs(rows, rows * np.float32(last))))
    assert ((out.token >= 1000) & (out.token < 2000)).all()
    assert np.isfinite(out.logprob).all()


def test_rows_that_cannot_be_drawn_are_marked_and_harm_no_other() -> None:
    logits = np.random.default_rng(8).normal(size=LARGE).astype(np.float32)
    good = logits.copy()
    logits[0, 150] = np.nan
    logits[1, 3] = np.inf
    logits[2] = -np.inf
    logits[4, 5] = np.nan
    inputs = make_inputs(*LARGE, uniform=0.3, top_p=0.9)
    inputs.allowed[3] = 0
    inputs.allowed[4, 0] = ~np.uint32(1 << 5)  # a NaN that the grammar forbids
    out, untouched = host(full(logits, inputs)), host(full(good, inputs))
    assert np.flatnonzero(out.sampled.bad).tolist() == [0, 1, 2, 3, 4]
    assert np.flatnonzero(untouched.sampled.bad).tolist() == [3]
    assert_same_bits(take(out, slice(5, None)), take(untouched, slice(5, None)))
    assert ((out.sampled.token >= 0) & (out.sampled.token < LARGE[1])).all()
    simple = host(plain(logits, PlainInputs(inputs.temperature, inputs.uniform)))
    assert np.flatnonzero(simple.bad).tolist() == [0, 1, 2, 4]


def test_few_tokens_have_few_likeliest() -> None:
    logits = np.full(SMALL, -np.inf, np.float32)
    logits[:, [7, 299]] = 0, 1
    out: FullSampled = host(full(logits, make_inputs(*SMALL)))
    assert out.top_ids[0].tolist() == [299, 7] + [-1] * 18
    np.testing.assert_allclose(np.exp(out.top_logprobs[0]).sum(), 1, atol=1e-6)


def test_seen_tokens_are_distinct_and_counted() -> None:
    seen = SeenTokens([7, 3, 7, 9], 4)
    ids, count = np.full(8, 55, np.int32), np.full(8, 55, np.int32)
    for token in (3, 20, 3, 20):
        seen.add(token)
    seen.fill(ids, count)
    assert len(seen) == 4
    assert dict(zip(ids[:4], count[:4], strict=True)) == {7: 0, 3: 2, 9: 0, 20: 2}
    assert ids[4:].tolist() == [-1] * 4
    assert count[4:].tolist() == [0] * 4


# --- Uniform numbers ----------------------------------------------------------------------------


def test_uniform_numbers_are_a_function_of_seed_and_position() -> None:
    seeds, positions = np.arange(50)[:, None], np.arange(40)[None]
    table = uniform(seeds, positions)
    assert table.dtype == np.float32
    assert table.shape == (50, 40)
    assert table[7, 9] == uniform(7, 9) == uniform([7], [9])[0]
    assert uniform(7, 9).shape == ()
    assert len(np.unique(table)) > 1990


def test_uniform_numbers_are_splitmix64s() -> None:
    # First outputs for the state 1234567, from rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64.
    state = np.uint64([1234567]) + np.arange(1, 6, dtype=np.uint64) * _GOLDEN
    assert _mixed(state).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_uniform_numbers_are_even_along_seeds_and_positions() -> None:
    for numbers in (
        uniform(np.arange(60_000), 0),
        uniform(0, np.arange(60_000)),
        uniform(-1, np.arange(60_000) * 8),
    ):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        counts = np.bincount((numbers * 64).astype(int), minlength=64)
        assert chi_square_fits(counts, np.full(64, 1 / 64))
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.02


def test_large_and_negative_seeds_are_seeds() -> None:
    numbers = [float(uniform(seed, 0)) for seed in (-(2**63), -1, 0, 2**63 + 1, 2**64 - 2)]
    assert len(set(numbers)) == 5
