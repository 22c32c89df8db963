"""What `load_model` reads, and what it answers to a folder it can't use."""

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from gymllm.errors import ConfigError, ModelError, UnknownNameError
from gymllm_trainers.models import (
    DecoderConfig,
    build_decoder,
    decoder_params,
    load_model,
    random_decoder,
    tiny_config,
)
from gymllm_trainers.models.hub import config_from_hub, config_to_hub, tensor_slots

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the Qwen3 checkpoint that a test may damage."""
    return Path(shutil.copytree(FIXTURES / "tiny_qwen3", tmp_path / "model"))


def edit_config(folder: Path, **changes: object) -> None:
    """Changes keys of config.json; `...` takes one out."""
    path = folder / "config.json"
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not ...}))


def edit_tensors(folder: Path, edit: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_reads_shape_weights_and_tokenizer() -> None:
    model = load_model(FIXTURES / "tiny_qwen3")
    assert model.config == config_from_hub(
        config_to_hub(model.config, dtype="float32"), where="config.json"
    )
    assert model.config.qk_norm
    assert model.config.tie_word_embeddings
    assert model.config.rope_theta == 1_000_000
    tensors = load_file(FIXTURES / "tiny_qwen3" / "model.safetensors")
    layers = model.params["layers"]
    assert isinstance(layers, dict)
    np.testing.assert_array_equal(
        layers["key"][2], tensors["model.layers.2.self_attn.k_proj.weight"].T
    )
    np.testing.assert_array_equal(model.params["norm"], tensors["model.norm.weight"])
    assert model.tokenizer.eos_token == "<|im_end|>"


def test_reads_shards_and_an_own_head() -> None:
    model = load_model(FIXTURES / "tiny_llama")
    assert not model.config.qk_norm
    assert model.params["head"].shape == (32, 320)
    assert model.tokenizer.template is not None


def test_parameters_are_those_of_a_new_decoder() -> None:
    for name in ("tiny_qwen3", "tiny_llama"):
        model = load_model(FIXTURES / name)
        fresh = nnx.eval_shape(lambda config=model.config: random_decoder(config, seed=0))
        shapes = jax.tree.map(lambda array: (array.shape, array.dtype), decoder_params(fresh))
        ours = jax.tree.map(lambda array: (array.shape, array.dtype), model.params)
        assert ours == shapes


def test_built_decoder_shares_the_parameters() -> None:
    model = load_model(FIXTURES / "tiny_qwen3")
    decoder = build_decoder(model.config, model.params)
    assert decoder.embedding[...] is model.params["embedding"]
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, decoder_params(decoder), model.params))


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_stored_floats_are_converted(folder: Path, stored: type) -> None:
    edit_tensors(
        folder,
        lambda tensors: tensors.update({name: t.astype(stored) for name, t in tensors.items()}),
    )
    expected = load_file(folder / "model.safetensors")["model.norm.weight"].astype(np.float32)
    model = load_model(folder)
    assert {str(array.dtype) for array in jax.tree.leaves(model.params)} == {"float32"}
    np.testing.assert_array_equal(model.params["norm"], expected)


def test_weights_are_kept_in_the_asked_dtype() -> None:
    model = load_model(FIXTURES / "tiny_llama", dtype="bfloat16")
    assert {str(array.dtype) for array in jax.tree.leaves(model.params)} == {"bfloat16"}
    with pytest.raises(ConfigError, match=r"dtype must be one of float32, .*, got 'int8'"):
        load_model(FIXTURES / "tiny_llama", dtype="int8")


def test_older_rope_keys_are_read(folder: Path) -> None:
    edit_config(folder, rope_parameters=..., rope_theta=5000, rope_scaling=None)
    assert load_model(folder).config.rope_theta == 5000.0
    edit_config(folder, rope_theta=..., rope_scaling={"type": "default"})
    assert load_model(folder).config.rope_theta == 10_000.0


def test_head_of_a_tied_checkpoint_is_left_out(folder: Path) -> None:
    edit_tensors(
        folder, lambda tensors: tensors.update({"lm_head.weight": np.ones((320, 32), np.float32)})
    )
    assert "head" not in load_model(folder).params


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {"attention_dropout": 0.1},
        {"hidden_act": "gelu"},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"quantization_config": {"quant_method": "gptq"}},
        {"rope_interleaved": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_setting_that_we_do_not_compute_is_refused(folder: Path, change: dict) -> None:
    edit_config(folder, **change)
    (key,) = change
    with pytest.raises(ModelError, match=rf"config\.json sets {key}=.*Choose a model without it"):
        load_model(folder)


def test_other_architecture_is_refused(folder: Path) -> None:
    edit_config(folder, architectures=["GPT2LMHeadModel"])
    with pytest.raises(
        ModelError, match=r"GPT2LMHeadModel.*LlamaForCausalLM, .* and Gemma3ForCausalLM"
    ):
        load_model(folder)
    edit_config(folder, architectures=...)
    with pytest.raises(ModelError, match=r"architectures=None"):
        load_model(folder)


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "num_hidden_layers", "num_key_value_heads", "intermediate_size"],
)
def test_missing_key_is_named(folder: Path, key: str) -> None:
    edit_config(folder, **{key: ...})
    with pytest.raises(ModelError, match=rf"lacks the key '{key}'"):
        load_model(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "32"}, "hidden_size must be of type int, got '32'"),
        ({"hidden_size": True}, "hidden_size must be of type int, got True"),
        ({"num_attention_heads": 0}, "num_attention_heads must be positive and finite, got 0"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be positive"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta must be a positive number, got -1"),
        ({"rope_parameters": "default"}, "rope_parameters must be an object or null"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be positive and finite, got nan"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be positive and finite, got 1000"),
        ({"rope_parameters": {"rope_theta": math.inf}}, "rope_theta must be a positive number"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 10**400}},
            "needs a positive factor, got 1000",
        ),
        ({"layer_types": [[]]}, "sets layer_types=[[]]"),
        ({"vocab_size": 2**31}, "vocab_size must be from 1 to 2147483647, got 2147483648"),
        ({"num_hidden_layers": 2**70}, "num_hidden_layers must be from 1 to 4096, got 1180591620"),
        ({"num_hidden_layers": 4000, "layer_types": ...}, "too few for num_hidden_layers = 4000"),
    ],
)
def test_wrong_value_is_named(folder: Path, change: dict, message: str) -> None:
    edit_config(folder, **change)
    with pytest.raises(ModelError, match=re.escape(message)):
        load_model(folder)


def test_missing_tensor_is_named(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=rf"lacks the tensor '{name}' of shape \[64, 32\]"):
        load_model(folder)


def test_tensor_of_a_wrong_shape_says_both_shapes(folder: Path) -> None:
    edit_config(folder, intermediate_size=65)
    with pytest.raises(
        ModelError, match=r"gate_proj.weight' has shape \[64, 32\], expected \[65, 32"
    ):
        load_model(folder)


def test_tensor_that_is_not_ours_is_refused(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    edit_tensors(folder, lambda tensors: tensors.update({name: np.ones(64, np.float32)}))
    with pytest.raises(ModelError, match=rf"1 tensors that our decoder has no use for.*'{name}'"):
        load_model(folder)


def test_integer_weights_are_refused(folder: Path) -> None:
    edit_tensors(
        folder, lambda tensors: tensors.update({"model.norm.weight": np.ones(32, np.int8)})
    )
    with pytest.raises(ModelError, match=r"'model.norm.weight' is stored as I8; expected F64"):
        load_model(folder)


def test_folder_without_weights_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks weights: .model\.safetensors. not found"):
        load_model(folder)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "tiny_llama", tmp_path / "model"))
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks weights: .model-00002-of-00003\.safetensors"):
        load_model(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json lacks \"weight_map\""):
        load_model(folder)


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "tiny_llama", tmp_path / "model"))
    path = folder / "model-00003-of-00003.safetensors"
    name = min(load_file(folder / "model-00001-of-00003.safetensors"))
    save_file(load_file(path) | {name: np.ones(1, np.float32)}, path)
    with pytest.raises(
        ModelError, match=rf"both model-00001-\S+ and model-00003-\S+ hold the tensor '{name}'"
    ):
        load_model(folder)


def test_index_that_names_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "tiny_llama", tmp_path / "model"))
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    shard = places["model.norm.weight"]
    index.write_text(json.dumps({"weight_map": places | {"model.extra.weight": shard}}))
    with pytest.raises(
        ModelError,
        match=rf"index\.json says that {shard} holds .*'model\.extra\.weight', and it do",
    ):
        load_model(folder)
    for elsewhere in ("../secret.safetensors", 3):
        index.write_text(json.dumps({"weight_map": places | {"model.norm.weight": elsewhere}}))
        with pytest.raises(ModelError, match=r"'model\.norm\.weight' must be in a file beside it"):
            load_model(folder)


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_values_that_are_not_finite_are_refused(folder: Path, stored: type, value: float) -> None:
    name = "model.layers.2.self_attn.k_proj.weight"

    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = tensors[name].astype(stored)
        tensors[name][5, 3] = value

    edit_tensors(folder, spoil)
    with pytest.raises(
        ModelError, match=rf"'{name}' holds values that are NaN, or infinite as float32"
    ):
        load_model(folder)


def test_values_too_large_for_the_asked_dtype_are_refused(folder: Path) -> None:
    edit_tensors(
        folder, lambda tensors: tensors["model.norm.weight"].__setitem__(0, np.float32(1e5))
    )
    assert load_model(folder).params["norm"][0] == 1e5
    with (
        pytest.warns(RuntimeWarning, match="overflow"),
        pytest.raises(ModelError, match=r"infinite as float16.*needs a wider dtype"),
    ):
        load_model(folder, dtype="float16")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells it")
def test_peak_memory_is_the_model_and_one_parameter(tmp_path: Path) -> None:
    config = DecoderConfig(
        vocab_size=320,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=16,
    )
    model_bytes, largest_bytes = 4 * config.parameters, 4 * 6 * 512 * 2048
    folder = shutil.copytree(FIXTURES / "tiny_qwen3", tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(config_to_hub(config, dtype="float32")))
    # float16 on disk: the file's own pages, which count as memory of who maps it, are half of the model.
    save_file(
        {
            name: np.ones(slot.shape, np.float16)
            for slot in tensor_slots(config)
            for name in slot.names
        },
        folder / "model.safetensors",
    )
    done = subprocess.run(
        [sys.executable, "-c", MEASURE_PEAK, folder, tmp_path / "copy"],
        capture_output=True,
        check=True,
        timeout=120,
    )
    start, loaded, saved = json.loads(done.stdout)
    file, slack = model_bytes // 2, 16 * 2**20
    assert loaded - start > model_bytes
    assert loaded - start < model_bytes + largest_bytes + file + slack
    # Writing what was read takes no more.
    assert saved - loaded < slack


MEASURE_PEAK = """
import json, re, sys
from pathlib import Path

import jax
from gymllm_trainers.models import load_model, save_model


def peak_bytes():
    # Not `getrusage`: that counts what this process was forked from.
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", status)[1])


jax.numpy.zeros(1).block_until_ready()
peaks = [peak_bytes()]
model = load_model(sys.argv[1])
jax.block_until_ready(model.params)
peaks.append(peak_bytes())
save_model(sys.argv[2], model.config, model.params, model.tokenizer)
print(json.dumps([*peaks, peak_bytes()]))
"""


@pytest.mark.parametrize("keep", [0, 5, 1000, 150_000])
def test_truncated_weights_are_refused(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors can't be read as safetensors"):
        load_model(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not valid JSON"), ("[]", "must hold a JSON object, got list")],
)
def test_broken_config_is_refused(folder: Path, content: str, message: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_folder_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"No config\.json in .*Expected config\.json, \*\.safe"):
        load_model(tmp_path)


def test_tokenizer_larger_than_the_model_is_refused(folder: Path) -> None:
    edit_config(folder, vocab_size=319)
    edit_tensors(
        folder,
        lambda tensors: tensors.update(
            {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"][:319].copy()}
        ),
    )
    with pytest.raises(ModelError, match=r"has 320 tokens and the model only 319 embeddings"):
        load_model(folder)


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "runs/a/b", "~/nothing", "a.gguf"])
def test_missing_path_is_named(name: str) -> None:
    with pytest.raises(ModelError, match=r"No model at .*no such file or folder"):
        load_model(name)


def test_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match=r"model\.bin is a file; expected a \.gguf file"):
        load_model(tmp_path / "model.bin")


def test_misspelt_name_gets_a_suggestion() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean smollm2"):
        load_model("smolm2")


def test_hub_name_without_a_network_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The hub's own switch for "no network": its cache is still looked at.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ModelError, match=r"'gymllm/no-such-model' is no folder here.*hf auth login"
    ):
        load_model("gymllm/no-such-model")


def test_hub_name_in_the_cache_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0" * 40
    cached = tmp_path / "models--gymllm--tiny"
    shutil.copytree(FIXTURES / "tiny_qwen3", cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert load_model("gymllm/tiny").config == load_model(FIXTURES / "tiny_qwen3").config


def test_llama_defaults_are_those_of_transformers() -> None:
    settings: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
    }
    config = config_from_hub(settings, where="config.json")
    assert (config.head_dim, config.num_key_value_heads) == (8, 4)
    assert (config.rope_theta, config.rms_norm_eps) == (10_000.0, 1e-6)
    assert not config.tie_word_embeddings


def test_tiny_model_is_qwen3_and_small() -> None:
    config = tiny_config(512)
    assert config.qk_norm
    assert 2_000_000 < config.parameters < 4_000_000
    names = [name for slot in tensor_slots(config) for name in slot.names]
    assert len(names) == len(set(names)) == config.num_hidden_layers * 11 + 2


def test_random_weights_are_a_function_of_the_seed() -> None:
    # Square in every way, so that few random functions are compiled.
    config = DecoderConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=16,
    )
    first, again, other = (decoder_params(random_decoder(config, seed=seed)) for seed in (1, 1, 2))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), first, again))
    assert (first["embedding"] != other["embedding"]).any()
    # A normal of spread 1 cut at 3 has a spread of 0.987.
    assert 0.018 < float(first["embedding"].std()) < 0.022
    layers = first["layers"]
    assert isinstance(layers, dict)
    assert 0.4 < float(layers["down"].std() / layers["up"].std()) < 0.6


def test_experts_without_number_are_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "tiny_qwen3_moe", tmp_path / "model"))
    edit_config(folder, num_experts=2**14)
    with pytest.raises(ModelError, match=r"too few for .* with num_experts = 16384"):
        load_model(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", b"[" * 100_000, "config.json is not valid JSON"),
        ("config.json", b"\xff\xfe", "config.json is not valid JSON"),
        ("tokenizer_config.json", b"[" * 100_000, "tokenizer_config.json is not JSON"),
        ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja is not UTF-8"),
        (
            "model.safetensors.index.json",
            json.dumps({"weight_map": {"norm": "x" * 5_000}}).encode(),
            "lacks weights: 'xxx",
        ),
    ],
    ids=str,
)
def test_garbage_in_a_folder_is_named(
    folder: Path, file: str, content: bytes, message: str
) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_stop_tokens_that_are_no_ids_are_left_out(folder: Path) -> None:
    ids = [-1, 2**32, 10**30, None, "x"]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert load_model(folder).tokenizer.stop_token_ids


@pytest.mark.parametrize("name", ["x" * 5_000, "~nobody-of-this-name/model", "/" + "x" * 5_000])
def test_path_that_cannot_be_is_named(name: str) -> None:
    with pytest.raises((ModelError, UnknownNameError), match=r"No model at|Unknown model"):
        load_model(name)
