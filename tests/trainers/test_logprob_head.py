"""Log-probabilities of given tokens: against NumPy, against dense gradients, by hand; memory; meshes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from gymllm.errors import ConfigError
from gymllm_trainers.models.logprob_head import TokenStatistics, token_statistics

OPTIONS = ("tied", "softcap", "chunk", "vocab_chunk")
statistics = jax.jit(token_statistics, static_argnames=OPTIONS)

Batch = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def batch(tokens: int = 37, *, words: int = 11, share: float = 0.5, seed: int = 0) -> Batch:
    """Hidden states [T, 6], head [6, V], targets, mask."""
    rng = np.random.default_rng(seed)
    return (
        jnp.asarray(rng.normal(size=(tokens, 6)).astype(np.float32)),
        jnp.asarray(rng.normal(size=(6, words)).astype(np.float32)),
        jnp.asarray(rng.integers(words, size=tokens).astype(np.int32)),
        jnp.asarray((rng.random(tokens) < share).astype(np.float32)),
    )


def log_softmax(
    hidden: Any, head: Any, temperature: float = 1.0, softcap: float | None = None
) -> npt.NDArray[np.float64]:
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    logits = logits / temperature
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def check_values(found: TokenStatistics, arrays: Batch, **options: Any) -> None:
    hidden, head, target, mask = arrays
    logprobs, mask = log_softmax(hidden, head, **options), np.asarray(mask)
    expected = logprobs[np.arange(len(mask)), np.asarray(target)] * mask
    np.testing.assert_allclose(found.logprob, expected, atol=2e-6, rtol=1e-6)
    entropy = -(np.exp(logprobs) * logprobs).sum(-1) * mask
    np.testing.assert_allclose(found.entropy, entropy, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.5}, {"temperature": 1.7, "softcap": 1.5}]
)
def test_agrees_with_the_reference(options: dict[str, float]) -> None:
    check_values(statistics(*batch(), chunk=8, **options), batch(), **options)


def test_a_uniform_distribution_by_hand() -> None:
    result = statistics(
        jnp.zeros((2, 3)), jnp.ones((3, 4)), jnp.array([0, 3]), jnp.array([1.0, 0.0])
    )
    np.testing.assert_allclose(result.logprob, [-np.log(4), 0], rtol=1e-6)
    np.testing.assert_allclose(result.entropy, [np.log(4), 0], rtol=1e-6)


@pytest.mark.parametrize(
    ("chunk", "vocab_chunk"), [(1, 11), (5, 4), (5, 10), (37, 1), (37, 6), (512, 512)]
)
def test_chunks_change_nothing(chunk: int, vocab_chunk: int) -> None:
    """Blocks of the vocabulary that overlap, too: 11 words in blocks of 4 or 10."""
    for share in (0.0, 0.2, 1.0):
        arrays = batch(share=share)
        check_values(statistics(*arrays, chunk=chunk, vocab_chunk=vocab_chunk), arrays)


def test_what_is_masked_out_has_no_effect() -> None:
    hidden, head, target, mask = batch(20)
    other = jnp.where(mask[:, None] == 1, hidden, jnp.nan)

    @jax.jit
    def value_and_grad(hidden: jax.Array) -> tuple[Any, Any]:
        def total(hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, TokenStatistics]:
            found = token_statistics(hidden, head, target, mask, chunk=8)
            return found.logprob.sum(), found

        return jax.grad(total, (0, 1), has_aux=True)(hidden, head)

    clean, dirty = value_and_grad(hidden), value_and_grad(other)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, 2.0)])
@pytest.mark.parametrize("vocab_chunk", [11, 4])
def test_gradients_are_the_dense_ones(
    tied: bool, temperature: float, softcap: float | None, vocab_chunk: int
) -> None:
    hidden, head, target, mask = batch(23, share=0.6, seed=3)
    weight = jnp.linspace(-1, 1, 23)

    @jax.jit
    def gradients(hidden: jax.Array, head: jax.Array) -> Any:
        def total(hidden: jax.Array, head: jax.Array) -> jax.Array:
            found = token_statistics(
                hidden,
                head,
                target,
                mask,
                tied=tied,
                temperature=temperature,
                softcap=softcap,
                chunk=8,
                vocab_chunk=vocab_chunk,
            )
            return (found.logprob * weight).sum()

        return jax.grad(total, (0, 1))(hidden, head)

    by_hidden, by_head = gradients(hidden, head.T if tied else head)
    wide_hidden, wide_head = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
    # d logprob / d logits = (one-hot - softmax) / temperature, times the cap's own slope.
    logprobs = log_softmax(hidden, head, temperature, softcap)
    error = (np.eye(11)[np.asarray(target)] - np.exp(logprobs)) / temperature
    error *= np.asarray(weight * mask, np.float64)[:, None]
    if softcap is not None:
        error *= 1 - np.tanh(wide_hidden @ wide_head / softcap) ** 2
    expected_head = wide_hidden.T @ error
    np.testing.assert_allclose(by_hidden, error @ wide_head.T, atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(
        by_head, expected_head.T if tied else expected_head, atol=2e-6, rtol=1e-6
    )


def test_gradients_agree_with_finite_differences() -> None:
    """No formula is used twice: the reference is NumPy's log-softmax, moved a little."""
    hidden, head, target, mask = batch(9, share=1.0, seed=4)
    direction = np.random.default_rng(5).normal(size=head.shape)
    total = lambda head: statistics(hidden, head, target, mask, softcap=2.0).logprob.sum()  # noqa: E731
    slope = (np.asarray(jax.grad(total)(head), np.float64) * direction).sum()

    def moved(step: float) -> float:
        logprobs = log_softmax(hidden, np.asarray(head, np.float64) + step * direction, 1.0, 2.0)
        return logprobs[np.arange(9), np.asarray(target)].sum()

    np.testing.assert_allclose(slope, (moved(1e-5) - moved(-1e-5)) / 2e-5, rtol=1e-5)


@pytest.mark.parametrize("vocab_chunk", [11, 4])
def test_entropy_carries_a_gradient_if_asked_for(vocab_chunk: int) -> None:
    """Against finite differences of NumPy's entropy; the log-probability's gradient beside it."""
    hidden, head, target, mask = batch(9, share=0.7, seed=6)
    direction = np.random.default_rng(7).normal(size=hidden.shape)
    kept = np.asarray(mask)

    @jax.jit
    def slopes(hidden: jax.Array, head: jax.Array) -> Any:
        def total(hidden: jax.Array, head: jax.Array) -> jax.Array:
            found = token_statistics(
                hidden,
                head,
                target,
                mask,
                temperature=0.7,
                softcap=2.0,
                chunk=4,
                vocab_chunk=vocab_chunk,
                entropy_gradient=True,
            )
            return (found.logprob - 3 * found.entropy).sum()

        return jax.grad(total)(hidden, head)

    def moved(step: float) -> float:
        logprobs = log_softmax(np.asarray(hidden, np.float64) + step * direction, head, 0.7, 2.0)
        entropy = -(np.exp(logprobs) * logprobs).sum(-1)
        chosen = logprobs[np.arange(9), np.asarray(target)]
        return float(((chosen - 3 * entropy) * kept).sum())

    slope = (np.asarray(slopes(hidden, head), np.float64) * direction).sum()
    np.testing.assert_allclose(slope, (moved(1e-5) - moved(-1e-5)) / 2e-5, rtol=1e-5)


def test_entropy_and_temperature_carry_no_gradient() -> None:
    hidden, head, target, mask = batch(9, share=1.0)

    def entropy(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return token_statistics(hidden, head, target, mask).entropy.sum()

    assert not any(part.any() for part in jax.jit(jax.grad(entropy, (0, 1)))(hidden, head))

    def by_temperature(temperature: jax.Array) -> jax.Array:
        return token_statistics(hidden, head, target, mask, temperature=temperature).logprob.sum()

    assert jax.jit(jax.grad(by_temperature))(jnp.float32(0.7)) == 0


@pytest.mark.parametrize("tied", [False, True])
def test_bfloat16_has_float32_logits(tied: bool) -> None:
    """Of a head in bfloat16 and of one in float32, which is rounded to it block by block."""
    hidden, head, target, mask = batch(share=1.0)
    narrow, kernel = hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16)
    exact = (narrow.astype(jnp.float32), kernel.astype(jnp.float32), target, mask)
    for given in (kernel, kernel.astype(jnp.float32)):

        def total(hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, TokenStatistics]:
            found = token_statistics(hidden, head, target, mask, tied=tied, vocab_chunk=4)
            return found.logprob.sum(), found

        gradients, found = jax.jit(jax.grad(total, (0, 1), has_aux=True))(
            narrow, given.T if tied else given
        )
        # Products of bfloat16 are exact in float32, and nothing is rounded before the softmax.
        check_values(found, exact)
        assert [x.dtype for x in gradients] == [narrow.dtype, given.dtype]
        error = np.eye(11)[np.asarray(target)] - np.exp(log_softmax(*exact[:2]))
        expected = np.asarray(exact[0], np.float64).T @ error
        np.testing.assert_allclose(
            np.asarray(gradients[1], np.float64), expected.T if tied else expected, atol=0.05
        )


def test_memory_grows_neither_with_tokens_nor_with_the_vocabulary() -> None:
    def held(tokens: int, words: int) -> int:
        """Bytes that the gradient's program holds besides its arguments and results."""

        def total(hidden: jax.Array, head: jax.Array, ids: jax.Array) -> jax.Array:
            found = token_statistics(
                hidden, head, ids, jnp.ones(len(ids)), tied=True, chunk=256, vocab_chunk=1024
            )
            return found.logprob.sum()

        shapes = (
            jax.ShapeDtypeStruct((tokens, 16), jnp.float32),
            jax.ShapeDtypeStruct((words, 16), jnp.float32),
            jax.ShapeDtypeStruct((tokens,), jnp.int32),
        )
        program = jax.jit(jax.grad(total, (0, 1))).lower(*shapes).compile()
        analysis = program.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    small, more_tokens, more_words = held(512, 2048), held(4096, 2048), held(512, 16_384)
    block = 256 * 1024 * 4
    assert small < 8 * block
    # What is added: a few copies of the hidden states and their gradients, or of the head's gradient.
    assert more_tokens - small < 6 * (4096 - 512) * 16 * 4
    assert more_words - small < 3 * (16_384 - 2048) * 16 * 4


# ---------------------------------------------------------------------- many devices

SHARDED = """
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    from gymllm_trainers.models.logprob_head import token_statistics

    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(48, 6)), jnp.float32)
    target, mask = jnp.asarray(rng.integers(24, size=48)), jnp.asarray(rng.random(48) < 0.5)
    weight = jnp.linspace(-1, 1, 48)

    def program(tied):
        def total(hidden, head):
            found = token_statistics(hidden, head, target, mask, tied=tied, softcap=3.0, chunk=4,
                                     vocab_chunk=5)
            return (found.logprob * weight).sum(), found
        return jax.jit(jax.grad(total, (0, 1), has_aux=True))

    # 21 words can't be divided by 2: then each device has all.
    for words, tied in ((24, False), (24, True), (21, True)):
        head = jnp.asarray(rng.normal(size=(words, 6) if tied else (6, words)), jnp.float32)
        expected = program(tied)(hidden, head)
        mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), (jax.sharding.AxisType.Auto,) * 3)
        vocab = "tensor" if words == 24 else None
        spec = P(vocab, "fsdp") if tied else P("fsdp", vocab)
        with jax.set_mesh(mesh):
            found = program(tied)(
                jax.device_put(hidden, NamedSharding(mesh, P(("data", "fsdp")))),
                jax.device_put(head, NamedSharding(mesh, spec)),
            )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, expected)
        local = found[0][1].sharding.shard_shape(head.shape)
        assert local[0 if tied else 1] == (12 if words == 24 else 21), local
    print("equal")
"""


def test_a_mesh_changes_nothing() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(SHARDED)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
    )
    assert result.stdout == "equal\n", result.stderr


# ---------------------------------------------------------------------- what can't be done


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature must be > 0, got 0.0"),
        ({"softcap": -1.0}, "softcap must be > 0, got -1.0"),
        ({"chunk": 0}, "chunk must be >= 1, got 0"),
        ({"vocab_chunk": 0}, "vocab_chunk must be >= 1, got 0"),
    ],
)
def test_what_cannot_be_done_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        token_statistics(*batch(), **options)
