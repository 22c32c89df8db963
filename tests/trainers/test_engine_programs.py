"""Sampling, and the table of compiled programs."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gymllm_trainers.engine.config import EngineConfig
from gymllm_trainers.engine.programs import Programs, Sampled, empty_inputs, sample
from gymllm_trainers.models import Decoder

draw = jax.jit(sample)


def drawn(
    logits: np.ndarray, *, seeds: np.ndarray, temperature: float = 1.0, position: int = 3
) -> Sampled:
    """Draws once with each seed from the same logits."""
    rows = len(seeds)
    token, logprob = draw(
        jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (rows, logits.shape[-1])),
        np.full(rows, temperature, np.float32),
        seeds.astype(np.uint32),
        np.full(rows, position, np.int32),
    )
    return Sampled(np.asarray(token), np.asarray(logprob))


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    scaled = logits.astype(np.float64) / temperature
    shares = np.exp(scaled - scaled.max())
    return shares / shares.sum()


@pytest.mark.parametrize("vocabulary", [5, 128, 300])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_frequencies_are_those_of_softmax(vocabulary: int, temperature: float) -> None:
    logits = np.random.default_rng(vocabulary).normal(size=vocabulary)
    result = drawn(logits, seeds=np.arange(20_000), temperature=temperature)
    shares = softmax(logits, temperature)
    counts = np.bincount(result.token, minlength=vocabulary)
    chi_square = ((counts - 20_000 * shares) ** 2 / (20_000 * shares)).sum()
    # Mean k, standard deviation sqrt(2 k): within four of them.
    degrees = vocabulary - 1
    assert abs(chi_square - degrees) < 4 * (2 * degrees) ** 0.5
    np.testing.assert_allclose(result.logprob, np.log(shares)[result.token], atol=1e-5)


def test_positions_are_independent() -> None:
    logits, seeds = np.zeros(16), np.arange(4_000)
    left, right = (drawn(logits, seeds=seeds, position=p).token for p in (7, 8))
    counts = np.histogram2d(left, right, bins=16)[0]
    chi_square = ((counts - 4_000 / 256) ** 2 / (4_000 / 256)).sum()
    assert abs(chi_square - 255) < 4 * (2 * 255) ** 0.5


def test_a_draw_is_a_function_of_logits_temperature_seed_and_position_alone() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(8, 200)).astype(np.float32)
    temperature = rng.choice([0.0, 0.5, 1.3], size=8).astype(np.float32)
    seed = rng.integers(2**32, size=8).astype(np.uint32)
    position = rng.integers(100, size=8).astype(np.int32)
    together = draw(logits, temperature, seed, position)
    order = rng.permutation(8)
    shuffled = draw(logits[order], temperature[order], seed[order], position[order])
    np.testing.assert_array_equal(together.token[order], shuffled.token)
    np.testing.assert_array_equal(together.logprob[order], shuffled.logprob)
    others = rng.normal(size=(8, 200)).astype(np.float32)
    others[3] = logits[3]
    beside = draw(others, np.full(8, temperature[3]), np.full(8, seed[3]), np.full(8, position[3]))
    assert beside.token[3] == together.token[3]


def test_temperature_zero_is_greedy_with_the_logits_own_probabilities() -> None:
    logits = np.random.default_rng(0).normal(size=300)
    result = drawn(logits, seeds=np.arange(50), temperature=0.0)
    assert set(result.token.tolist()) == {int(logits.argmax())}
    np.testing.assert_allclose(result.logprob, np.log(softmax(logits, 1.0)).max(), atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 1e-3, 1e-36])
def test_a_certain_token_is_drawn_at_any_temperature(temperature: float) -> None:
    logits = np.zeros(200)
    logits[150] = 1e4
    result = drawn(logits, seeds=np.arange(500), temperature=temperature)
    assert set(result.token.tolist()) == {150}
    np.testing.assert_array_equal(result.logprob, 0)


@pytest.mark.parametrize("vocabulary", [5, 257, 1024])
def test_impossible_tokens_are_never_drawn(vocabulary: int) -> None:
    """Half of all logits, whole blocks among them, are minus infinity."""
    rng = np.random.default_rng(vocabulary)
    rows = 40_000
    logits = rng.normal(scale=3, size=(64, vocabulary)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.5] = -np.inf
    if vocabulary > 256:
        logits[::2, :128] = -np.inf
        logits[1::2, -129:] = -np.inf
    logits[
        :,
        rng.integers(
            130 if vocabulary > 256 else 0, vocabulary - 130 if vocabulary > 300 else vocabulary
        ),
    ] = 0.0
    logits = np.tile(logits, (rows // 64, 1))
    result = draw(
        logits,
        np.ones(len(logits), np.float32),
        np.arange(len(logits), dtype=np.uint32),
        np.zeros(len(logits), np.int32),
    )
    chosen = logits[np.arange(len(logits)), np.asarray(result.token)]
    assert np.isfinite(chosen).all()
    assert np.isfinite(result.logprob).all()


def test_extreme_draws_stay_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest and the largest uniform numbers there are choose possible tokens."""
    logits = np.full((3, 300), -np.inf, np.float32)
    logits[0, [140, 141]] = 0
    logits[1, [0, 299]] = [0, -80]
    logits[2, :7] = np.log(np.float32(1 / 7))
    for number in (0.0, 1 - 2**-24, 1 - 2**-23):
        monkeypatch.setattr(jax.random, "uniform", lambda key, number=number: jnp.float32(number))
        result = sample(
            jnp.asarray(logits), jnp.ones(3), jnp.zeros(3, jnp.uint32), jnp.zeros(3, jnp.int32)
        )
        assert np.isfinite(result.logprob).all()
    assert result.token.tolist() == [141, 0, 6]


# ---------------------------------------------------------------------- the table

CONFIG = EngineConfig(slots=3, context_length=16, small_batch=2, prefill_chunks=(4,))


@pytest.fixture(scope="module")
def names() -> list[str]:
    return []


@pytest.fixture(scope="module")
def state(make_decoder: Callable[..., Decoder]) -> nnx.State:
    return nnx.state(make_decoder(0))


@pytest.fixture(scope="module")
def programs(make_decoder: Callable[..., Decoder], names: list[str]) -> Programs:
    made = Programs(*nnx.split(make_decoder(0)), CONFIG)
    assert len(made) == 0
    made.compile(names.append)
    return made


def test_programs_are_few_named_and_counted(
    programs: Programs, state: nnx.State, names: list[str], compilations: list[str]
) -> None:
    sizes = ["2 x 1", "3 x 1", "2 x 4", "3 x 4"]
    assert names == [*(f"engine step {size}" for size in sizes), "engine copy"]
    assert len(programs) == len(names)
    cache = programs.new_cache()
    del compilations[:]
    for rows, chunk in CONFIG.shapes:
        _, cache = programs.step(state, cache, empty_inputs(rows, chunk, slots=3))
    cache = programs.copy(cache, 0, 2)
    assert compilations == []


def test_rows_not_in_use_write_nothing_and_a_copy_copies_one_slot(
    programs: Programs, state: nnx.State
) -> None:
    _, cache = programs.step(state, programs.new_cache(), empty_inputs(3, 4, slots=3))
    assert not any(part.any() for part in cache)
    inputs = empty_inputs(2, 4, slots=3)
    inputs.tokens[0], inputs.slot[0], inputs.valid[0] = [5, 6, 7, 8], 1, 3
    _, cache = programs.step(state, cache, inputs)
    # [L, S, K, M, H]: three cells of slot 1 in every layer, and nothing else.
    written = np.asarray(cache.key != 0).any(axis=(2, 4))
    assert written[:, 1, :3].all()
    assert written.sum() == 2 * 3
    kept = [np.asarray(part) for part in cache]
    cache = programs.copy(cache, 1, 2)
    for part, before in zip(cache, kept, strict=True):
        np.testing.assert_array_equal(part[:, 2], before[:, 1])
        np.testing.assert_array_equal(part[:, :2], before[:, :2])
