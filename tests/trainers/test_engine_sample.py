"""Sampling in the kernels: what `sampling.sample_plain` draws, whoever else is in the step.

Axes: F rows, S slots, D model, V vocabulary.
"""

from __future__ import annotations

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from gymllm_trainers.engine import kernels
from gymllm_trainers.engine.sampling import DEPTH, PlainInputs, sample_plain
from gymllm_trainers.models.decoder import softcap

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None and shutil.which("gcc") is None, reason="needs a C compiler"
)
Floats = npt.NDArray[np.float32]
by_xla = jax.jit(sample_plain)


@pytest.fixture(scope="module", params=["native", "plain"])
def loaded(request: pytest.FixtureRequest) -> kernels.Kernels:
    """The kernels as the engine loads them, and without a processor's own instructions."""
    if request.param == "plain":
        return request.getfixturevalue("plain")
    native = kernels.load()
    if native is None:
        pytest.skip(str(kernels.unavailable()))
    return native


def unpacked(packed_4F: jax.Array) -> tuple[npt.NDArray[np.int32], Floats, Floats, npt.NDArray]:
    token, logprob, base, bad = np.asarray(packed_4F)
    return token, logprob.view(np.float32), base.view(np.float32), bad.astype(bool)


def random_logits(rows: int, words: int, spread: float = 3.0) -> Floats:
    return np.random.default_rng(words).normal(0, spread, (rows, words)).astype(np.float32)


def on_the_line(
    logits_FV: Floats, token: npt.NDArray[np.int32], temperature: float, cap: float | None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Between which numbers a uniform number draws each row's token, [F]."""
    wide_FV = logits_FV.astype(np.float64)
    if cap:
        wide_FV = cap * np.tanh(wide_FV / cap)
    scaled_FV = (wide_FV - wide_FV.max(axis=1, keepdims=True)) / temperature
    share_FV = np.exp(scaled_FV) / np.exp(scaled_FV).sum(axis=1, keepdims=True)
    words = logits_FV.shape[1]
    width = -(-words // DEPTH)
    line = np.concatenate([np.arange(column, words, width) for column in range(width)])
    upto_FV = np.cumsum(share_FV[:, line], axis=1)
    place = np.argsort(line)[token]
    rows = np.arange(len(token))
    return upto_FV[rows, place] - share_FV[rows, token], upto_FV[rows, place]


@pytest.mark.parametrize("cap", [None, 4.0])
@pytest.mark.parametrize("temperature", [0.0, 1e-30, 0.6, 1.0, 1e30])
@pytest.mark.parametrize(("words", "rows"), [(5, 500), (50, 500), (1280, 500), (49_152, 6)])
def test_draws_what_the_sampler_of_xla_draws(
    loaded: kernels.Kernels, words: int, rows: int, temperature: float, cap: float | None
) -> None:
    logits_FV = random_logits(rows, words)
    uniform_F = np.random.default_rng(1).random(rows, np.float32)
    temperature_F = np.full(rows, temperature, np.float32)
    expected = by_xla(softcap(jnp.asarray(logits_FV), cap), PlainInputs(temperature_F, uniform_F))
    token, logprob, base, bad = unpacked(
        loaded.draw(logits_FV, jnp.asarray(temperature_F), jnp.asarray(uniform_F), softcap=cap)
    )
    assert not bad.any()
    same = token == np.asarray(expected.token)
    if temperature == 0:
        assert same.all()
    else:
        # A uniform number may fall between what two roundings give a token.
        assert np.count_nonzero(~same) <= 0.002 * rows
        low_F, high_F = on_the_line(logits_FV, token, temperature, cap)
        assert ((low_F - 1e-6 <= uniform_F) & (uniform_F <= high_F + 1e-6)).all()
    for ours, theirs in ((logprob, expected.logprob), (base, expected.base_logprob)):
        np.testing.assert_allclose(ours[same], np.asarray(theirs)[same], atol=2e-5, rtol=1e-6)


def test_the_ends_of_the_uniform_range_draw_possible_tokens(loaded: kernels.Kernels) -> None:
    logits_FV = np.full((2, 200), -np.inf, np.float32)
    logits_FV[:, [7, 77, 133]] = 0.0, 1.0, 0.0
    ends_F = np.array([0, np.nextafter(np.float32(1), np.float32(0))], np.float32)
    token, logprob, base, bad = unpacked(
        loaded.draw(logits_FV, jnp.ones(2), jnp.asarray(ends_F), softcap=None)
    )
    assert not bad.any()
    # In columns of four, the second (77, 133) and the last (7).
    assert token.tolist() == [77, 7]
    np.testing.assert_allclose(logprob, base)


@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("words", [5, 50, 1280])
def test_rows_that_cannot_be_drawn_are_marked_and_harm_no_other(
    loaded: kernels.Kernels, words: int, cap: float | None
) -> None:
    logits_FV = random_logits(12, words)
    uniform_F = jnp.linspace(0, 0.99, 12)
    temperature_F = jnp.array([0.0, 0.7, 1.0, 1e-30, 1e30, 1.0] * 2)
    clean = unpacked(loaded.draw(logits_FV, temperature_F, uniform_F, softcap=cap))
    logits_FV[1, words - 1] = np.nan
    logits_FV[2, 0] = np.nan
    logits_FV[4] = np.nan
    logits_FV[6, words // 2] = np.inf
    logits_FV[8] = -np.inf
    logits_FV[10, : words - 1] = -np.inf
    out = unpacked(loaded.draw(logits_FV, temperature_F, uniform_F, softcap=cap))
    expected = by_xla(softcap(jnp.asarray(logits_FV), cap), PlainInputs(temperature_F, uniform_F))
    # With a soft cap an infinite logit is no more than the cap.
    marked = [1, 2, 4] if cap else [1, 2, 4, 6, 8]
    assert np.flatnonzero(out[3]).tolist() == marked
    assert np.flatnonzero(np.asarray(expected.bad)).tolist() == marked
    for row in (0, 3, 5, 7, 9, 11):
        for ours, before in zip(out, clean, strict=True):
            assert ours[row] == before[row]
    if cap is None:
        assert out[0][10] == words - 1
        assert out[1][10] == 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("x_type", "head_type"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")],
)
def test_a_row_has_the_same_bits_alone_among_others_and_from_its_logits(
    loaded: kernels.Kernels, x_type: str, head_type: str, tied: bool
) -> None:
    rng = np.random.default_rng(0)
    slots, depth = 20, 48
    hidden_SD = jnp.asarray(rng.normal(size=(slots, depth)), jnp.float32).astype(x_type)
    for words in (5, 1280, 3333):
        head = rng.normal(size=(words, depth) if tied else (depth, words))
        head = jnp.asarray(head, jnp.float32).astype(head_type)
        logits_SV = loaded.logits_tied(hidden_SD, head) if tied else loaded.logits(hidden_SD, head)
        for cap in (None, 10.0):
            temperature_S = np.tile(np.array([0.0, 0.5, 1.0, 2.0], np.float32), 5)
            uniform_S = rng.random(slots, np.float32)
            drawn = loaded.draw(
                logits_SV, jnp.asarray(temperature_S), jnp.asarray(uniform_S), softcap=cap
            )
            for count, first in ((slots, 0), (1, 3), (2, 9), (3, 0), (9, 11)):
                part = slice(first, first + count)
                rows = min(slots, count + 2)  # more rows than are sampled
                moved = [np.roll(each, -first, axis=0) for each in (temperature_S, uniform_S)]
                packed_4F, previous_S = loaded.sample(
                    jnp.roll(hidden_SD, -first, axis=0),
                    head,
                    jnp.int32(count),
                    *(jnp.asarray(each[:rows]) for each in moved),
                    tied=tied,
                    softcap=cap,
                )
                np.testing.assert_array_equal(packed_4F[:, :count], drawn[:, part])
                assert not np.asarray(packed_4F)[:, count:].any()
                np.testing.assert_array_equal(previous_S[:count], drawn[0, part])
                assert not np.asarray(previous_S)[count:].any()


def test_more_rows_than_there_are_are_refused(loaded: kernels.Kernels) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="count is not a number of rows"):
        loaded.sample(
            jnp.ones((4, 8)),
            jnp.ones((8, 5)),
            jnp.int32(3),
            jnp.ones(2),
            jnp.ones(2),
            tied=False,
            softcap=None,
        )[0].block_until_ready()
