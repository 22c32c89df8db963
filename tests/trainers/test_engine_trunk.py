"""All layers in one call of the kernels: the same as the decoder by XLA, for every family's options.

Axes: T tokens of a step, S picked ones, D model; those of pages are `paged_attention`'s.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gymllm_trainers.compilation import compile_ahead
from gymllm_trainers.engine import EngineConfig, kernels
from gymllm_trainers.engine.batch import StepLayout
from gymllm_trainers.engine.paged_attention import PagedCache
from gymllm_trainers.engine.programs import Programs
from gymllm_trainers.models import Decoder, DecoderConfig, random_decoder
from gymllm_trainers.models.config import RopeScaling

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None and shutil.which("gcc") is None, reason="needs a C compiler"
)
PAGE = 8
SIZES = EngineConfig(
    slots=36, context_length=160, small_batch=4, prefill_tokens=(32,), page_size=PAGE, pages=128
)
LLAMA = DecoderConfig(
    vocab_size=51,
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=128,
    rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_max_position_embeddings=32),
)
GEMMA = replace(
    LLAMA,
    rope_scaling=None,
    hidden_act="gelu_pytorch_tanh",
    norm_offset=True,
    post_norms=True,
    scale_embeddings=True,
    query_pre_attn_scalar=24.0,
    sliding_window=13,
    sliding_layers=(True, False),
)
FAMILIES = {
    "llama3": LLAMA,
    # Widths that no vector and no panel divides.
    "qwen2": replace(LLAMA, qkv_bias=True, head_dim=20, hidden_size=50, intermediate_size=70),
    "qwen3": replace(LLAMA, qk_norm=True, head_dim=128, num_key_value_heads=1),
    "gemma2": replace(GEMMA, head_dim=256, attention_softcap=5.0, num_key_value_heads=4),
    "gemma3": replace(
        GEMMA,
        head_dim=80,
        qk_norm=True,
        rope_local_theta=100.0,
        rope_scaling=RopeScaling(kind="linear", factor=8.0),
    ),
    "biases": replace(
        LLAMA,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_dim=6,
        hidden_size=34,
        intermediate_size=46,
    ),
    # Products of an odd number of terms.
    "odd": replace(LLAMA, hidden_size=33, intermediate_size=1037, head_dim=2, qkv_bias=True),
}
Forward = Callable[..., tuple[jax.Array, PagedCache]]
Numbers = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


@pytest.fixture(scope="module")
def native() -> kernels.Kernels:
    """The kernels as the engine loads them."""
    loaded = kernels.load()
    if loaded is None:
        pytest.skip(str(kernels.unavailable()))
    return loaded


def rough_decoder(config: DecoderConfig, dtype: str) -> Decoder:
    """Random in every parameter: norms and biases, too."""
    graph, state = nnx.split(random_decoder(config, seed=0))
    rng = np.random.default_rng(0)

    def rough(leaf: jax.Array) -> jax.Array:
        kernel = leaf.ndim == 3 or leaf.shape[0] == config.vocab_size
        spread = 0.5 if not kernel else 1.0 if leaf.ndim == 2 else leaf.shape[1] ** -0.5
        noise = spread * rng.normal(size=leaf.shape)
        return jnp.asarray((0 if kernel else leaf) + noise, jnp.float32).astype(dtype)

    decoder = nnx.merge(graph, jax.tree.map(rough, state))
    decoder.compute_dtype = jnp.dtype(dtype)
    return decoder


def make_forward(
    decoder: Decoder,
    shape: tuple[int, int],
    loaded: kernels.Kernels | None,
    *,
    whole: bool,
    cache: str = "float32",
) -> tuple[Forward, list[jax.Array]]:
    """The engine's own step of one shape; `whole` says whether it must be one call of the kernels."""
    graph, state = nnx.split(decoder)
    programs = Programs(graph, state, SIZES, kernels=loaded)
    assert programs._whole == whole
    layout, leaves = StepLayout.of(SIZES, *shape), jax.tree.leaves(state)
    packed, previous = np.zeros(layout.size, np.int32), np.zeros(SIZES.slots, np.int32)
    program = jax.jit(programs.forward_of(layout))
    pages = new_cache(decoder.config, cache)
    return compile_ahead(program, leaves, pages, packed, previous), leaves


def new_cache(config: DecoderConfig, dtype: str = "float32") -> PagedCache:
    """What earlier steps might have written."""
    shape = (config.num_hidden_layers, SIZES.total_pages, config.num_key_value_heads, PAGE)
    rng = np.random.default_rng(1)
    key, value = (rng.normal(size=(*shape, config.head_dim)) for _ in range(2))
    return PagedCache(
        jnp.asarray(key, jnp.float32).astype(dtype), jnp.asarray(value, jnp.float32).astype(dtype)
    )


def pages_of(sequence: int) -> list[int]:
    """Twenty pages a sequence, of which there are six."""
    pages = np.random.default_rng(2).permutation(np.arange(1, SIZES.total_pages))
    return pages[20 * sequence : 20 * sequence + 20].tolist()


def tokens_of(sequence: int) -> list[int]:
    return np.random.default_rng(sequence).integers(LLAMA.vocab_size, size=160).tolist()


def make_step(
    shape: tuple[int, int], rows: dict[int, int], blocks: list[tuple[int, int, int]]
) -> tuple[np.ndarray, int]:
    """A step's array, and how many tokens it has.

    Args:
        shape: Decode rows and blocks.
        rows: Positions of decode rows by their sequences, which are all that came before.
        blocks: Sequence, first position and length of each.
    """
    layout = StepLayout.of(SIZES, *shape)
    packed = np.zeros(layout.size, np.int32)
    token, source, table, start, count, active, pick = layout.views(packed)
    source.fill(-1)
    indices: list[int] = []
    for row, (sequence, position) in enumerate(rows.items()):
        token[row], start[row], count[row] = tokens_of(sequence)[position], position, 1
        table[row] = pages_of(sequence)
        indices.append(row)
    for number, (sequence, first, size) in enumerate(blocks):
        lane, at = layout.rows + number, layout.rows + number * layout.block
        token[at : at + size] = tokens_of(sequence)[first : first + size]
        start[lane], count[lane], table[lane] = first, size, pages_of(sequence)
        indices += range(at, at + size)
    active[0], active[1 : 1 + len(indices)] = len(indices), indices
    pick[: len(indices)] = indices
    return packed, len(indices)


# Decode rows and blocks, whole and broken, of one sequence and of several; some of each are padding.
SHAPE = (4, 4)
MIXED = make_step(SHAPE, {0: 0, 1: 17, 2: 159}, [(3, 5, 3), (4, 64, 8), (4, 72, 5)])


def run(
    decoder: Decoder, loaded: kernels.Kernels | None, *, whole: bool = True, cache: str = "float32"
) -> tuple[Numbers, list[Numbers]]:
    """Hidden states of the mixed step's tokens, and its cache without the page of padding."""
    forward, leaves = make_forward(decoder, SHAPE, loaded, whole=whole, cache=cache)
    packed, count = MIXED
    hidden_SD, pages = forward(
        leaves, new_cache(decoder.config, cache), packed, np.zeros(SIZES.slots, np.int32)
    )
    assert hidden_SD.dtype == decoder.compute_dtype
    kept = [np.asarray(part[:, 1:].astype(jnp.float32)) for part in pages]
    return np.asarray(hidden_SD[:count].astype(jnp.float32)), kept


@pytest.mark.parametrize(
    "name",
    [
        # What these have, others have, too.
        pytest.param(name, marks=[pytest.mark.slow] if name in ("llama3", "biases") else [])
        for name in FAMILIES
    ],
)
def test_trunk_equals_the_decoder(
    native: kernels.Kernels, plain: kernels.Kernels, name: str
) -> None:
    decoder = rough_decoder(FAMILIES[name], "float32")
    expected, expected_cache = run(decoder, None, whole=False)
    for loaded in (native, plain):
        hidden, cache = run(decoder, loaded)
        np.testing.assert_allclose(hidden, expected, rtol=2e-5, atol=5e-5)
        for part, other in zip(cache, expected_cache, strict=True):
            np.testing.assert_allclose(part, other, rtol=2e-5, atol=5e-5)


@pytest.mark.parametrize(("name", "cache_type"), [("gemma2", "bfloat16"), ("biases", "float32")])
def test_trunk_in_bfloat16_is_as_near_as_the_decoder(
    native: kernels.Kernels, plain: kernels.Kernels, name: str, cache_type: str
) -> None:
    """Both round after each operation, so each is compared with the same weights' float32."""
    decoder = rough_decoder(FAMILIES[name], "bfloat16")
    graph, state = nnx.split(decoder)
    exact = nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), state))
    exact.compute_dtype = jnp.dtype("float32")
    truth, true_cache = run(exact, native)
    theirs, their_cache = run(decoder, None, whole=False, cache=cache_type)
    for loaded in (native, plain):
        ours, our_cache = run(decoder, loaded, whole=loaded.multiplies_bfloat16, cache=cache_type)
        for out, other, true in zip(
            (ours, *our_cache), (theirs, *their_cache), (truth, *true_cache), strict=True
        ):
            error, usual = (np.abs(each - true).mean() for each in (out, other))
            assert error < 1.15 * usual + 1e-6
            assert np.abs(out - true).max() < 2 * np.abs(other - true).max() + 1e-6


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama3", "float32"), ("qwen2", "bfloat16"), ("gemma2", "bfloat16"), ("odd", "float32")],
)
def test_a_token_has_the_same_bits_decoded_or_prefilled_in_any_crowd(
    native: kernels.Kernels, name: str, dtype: str
) -> None:
    decoder = rough_decoder(FAMILIES[name], dtype)
    if dtype == "bfloat16" and not native.multiplies_bfloat16:
        pytest.skip("this processor doesn't multiply bfloat16")
    nothing = np.zeros(SIZES.slots, np.int32)
    forwards = {
        shape: make_forward(decoder, shape, native, whole=True) for shape in ((4, 0), SHAPE)
    }

    def step(
        cache: PagedCache,
        shape: tuple[int, int],
        rows: dict[int, int],
        blocks: list[tuple[int, int, int]],
    ) -> tuple[np.ndarray, PagedCache]:
        packed, count = make_step(shape, rows, blocks)
        forward, leaves = forwards[shape]
        hidden_SD, cache = forward(leaves, cache, packed, nothing)
        return np.asarray(hidden_SD[:count]), cache

    def pages(cache: PagedCache, sequence: int) -> list[np.ndarray]:
        return [np.asarray(part[:, np.array(pages_of(sequence)[:3])]) for part in cache]

    # A prompt of 20 tokens in blocks beside others; in one block after another; and token after token.
    crowd, cache = step(
        new_cache(decoder.config),
        SHAPE,
        {1: 17, 2: 90},
        [(0, 0, 8), (0, 8, 8), (0, 16, 4), (3, 0, 5)],
    )
    crowd, whole = crowd[2:22], pages(cache, 0)
    cache, parts = new_cache(decoder.config), []
    for first, size in ((0, 3), (3, 8), (11, 1), (12, 8)):
        hidden, cache = step(cache, SHAPE, {}, [(0, first, size)])
        parts.append(hidden)
    np.testing.assert_array_equal(np.concatenate(parts), crowd)
    for part, other in zip(pages(cache, 0), whole, strict=True):
        np.testing.assert_array_equal(part, other)
    cache, alone = new_cache(decoder.config), []
    for position in range(20):
        others = {1: 30 + position, 2: 100} if position % 3 else {}
        hidden, cache = step(cache, (4, 0), {0: position, **others}, [])
        alone.append(hidden[0])
    np.testing.assert_array_equal(np.stack(alone), crowd)
    for part, other in zip(pages(cache, 0), whole, strict=True):
        np.testing.assert_array_equal(part, other)


def test_a_step_without_tokens_is_nothing(native: kernels.Kernels) -> None:
    decoder = rough_decoder(FAMILIES["biases"], "float32")
    forward, leaves = make_forward(decoder, (4, 0), native, whole=True)
    packed, _ = make_step((4, 0), {}, [])
    cache = new_cache(decoder.config)
    hidden_SD, after = forward(leaves, cache, packed, np.zeros(SIZES.slots, np.int32))
    assert not np.asarray(hidden_SD).any()
    for part, other in zip(after, cache, strict=True):
        np.testing.assert_array_equal(part, other)


def test_what_makes_no_sense_is_refused(native: kernels.Kernels) -> None:
    decoder = rough_decoder(FAMILIES["biases"], "float32")
    forward, leaves = make_forward(decoder, (4, 0), native, whole=True)
    layout, nothing = StepLayout.of(SIZES, 4, 0), np.zeros(SIZES.slots, np.int32)
    part = {"table": 2, "start": 3, "count": 4, "active": 5}
    for name, at, number, said in (
        ("start", 0, 160, "not within its page table"),
        ("start", 0, -1, "not within its page table"),
        ("count", 0, 2, "not within its page table"),
        ("table", (0, 2), 128, "A slot is not in the cache"),
        ("active", 0, 5, "not a number of rows"),
        ("active", 1, 4, "an index that is no row"),
        ("active", 1, -1, "an index that is no row"),
    ):
        packed, _ = make_step((4, 0), {0: 17}, [])
        layout.views(packed)[part[name]][at] = number
        with pytest.raises(jax.errors.JaxRuntimeError, match=said):
            forward(leaves, new_cache(decoder.config), packed, nothing)[0].block_until_ready()
