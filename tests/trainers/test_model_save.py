"""What `save_model` writes, and what it leaves behind when it can't."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from gymllm.errors import ModelError
from gymllm_trainers.models import (
    DecoderConfig,
    LoadedModel,
    build_decoder,
    decoder_params,
    load_model,
    random_decoder,
    save_model,
)

FIXTURES = Path(__file__).parent / "fixtures"
FAMILIES = sorted(
    path.name for path in FIXTURES.glob("tiny_*") if not path.name.endswith("_reward")
)


@pytest.fixture(scope="module")
def qwen3() -> LoadedModel:
    return load_model(FIXTURES / "tiny_qwen3")


def save(folder: Path, model: LoadedModel, **options: object) -> None:
    save_model(folder, model.config, model.params, model.tokenizer, **options)


def same_bits(left: LoadedModel, right: LoadedModel) -> bool:
    def equal(a: jax.Array, b: jax.Array) -> bool:
        return a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()

    return jax.tree.all(jax.tree.map(equal, left.params, right.params))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip_is_bit_exact(tmp_path: Path, name: str, dtype: str) -> None:
    model = load_model(FIXTURES / name, dtype=dtype)
    save(tmp_path / "out" / "model", model)
    again = load_model(tmp_path / "out" / "model", dtype=dtype)
    assert again.config == model.config
    assert same_bits(again, model)
    text = "<|im_start|>user\nThe fox<|im_end|>"
    assert again.tokenizer.encode(text, allow_special=True) == model.tokenizer.encode(
        text, allow_special=True
    )
    assert again.tokenizer.stop_token_ids == model.tokenizer.stop_token_ids
    assert again.tokenizer.template is not None
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]


def test_float32_comes_back_from_bfloat16_weights(tmp_path: Path) -> None:
    save(tmp_path / "m", load_model(FIXTURES / "tiny_qwen3", dtype="bfloat16"))
    model = load_model(tmp_path / "m", dtype="float32")
    np.testing.assert_array_equal(
        model.params["norm"],
        load_model(FIXTURES / "tiny_qwen3").params["norm"].astype(jnp.bfloat16),
    )


def test_names_and_shapes_are_those_that_transformers_wrote(
    tmp_path: Path, qwen3: LoadedModel
) -> None:
    save(tmp_path / "m", qwen3)
    shapes = []
    for folder in (tmp_path / "m", FIXTURES / "tiny_qwen3"):
        with safe_open(folder / "model.safetensors", "np") as file:
            shapes.append({name: file.get_slice(name).get_shape() for name in file.keys()})  # noqa: SIM118
            assert file.metadata() == {"format": "pt"}
    assert shapes[0] == shapes[1]


def test_folder_holds_what_other_programs_read(tmp_path: Path, qwen3: LoadedModel) -> None:
    save(tmp_path / "m", qwen3)
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["model_type"] == "qwen3"
    assert config["torch_dtype"] == "float32"
    generation = json.loads((tmp_path / "m" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": None, "pad_token_id": 0, "eos_token_id": [2]}
    tokenizer = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    assert "<|im_start|>" in tokenizer["chat_template"]


def test_large_models_are_sharded(tmp_path: Path, qwen3: LoadedModel) -> None:
    save(tmp_path / "m", qwen3, max_shard_bytes=50_000)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    shards = sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(shards) == 4
    assert shards[0].name == "model-00001-of-00004.safetensors"
    assert set(index["weight_map"].values()) == {path.name for path in shards}
    assert index["metadata"]["total_size"] == 4 * qwen3.config.parameters
    assert all(path.stat().st_size < 60_000 for path in shards)
    assert same_bits(load_model(tmp_path / "m"), qwen3)


def test_existing_folder_is_replaced_only_when_asked(tmp_path: Path, qwen3: LoadedModel) -> None:
    llama = load_model(FIXTURES / "tiny_llama")
    target = tmp_path / "m"
    target.mkdir()
    save(target, llama)
    with pytest.raises(ModelError, match=r"is not empty.*overwrite=True"):
        save(target, qwen3)
    save(target, qwen3, overwrite=True)
    assert load_model(target).config == qwen3.config
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_overwrite_spares_what_is_no_model(tmp_path: Path, qwen3: LoadedModel) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ModelError, match="holds something else than a model"):
        save(tmp_path, qwen3, overwrite=True)
    with pytest.raises(ModelError, match="it is a file"):
        save(tmp_path / "thesis.tex", qwen3, overwrite=True)


@contextmanager
def disk_of(size_bytes: int) -> Iterator[None]:
    """No file of this process can grow past this: a write then fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size_bytes", [0, 4096, 100_000])
def test_full_disk_leaves_nothing_and_keeps_what_was_there(
    tmp_path: Path, qwen3: LoadedModel, size_bytes: int
) -> None:
    target = tmp_path / "m"
    with (
        disk_of(size_bytes),
        pytest.raises(ModelError, match=r"Could not write the model to .*/m \(.*Free some space"),
    ):
        save(target, qwen3)
    assert list(tmp_path.iterdir()) == []

    save(target, qwen3)
    with disk_of(size_bytes), pytest.raises(ModelError, match="Could not write"):
        save(target, load_model(FIXTURES / "tiny_llama"), overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert same_bits(load_model(target), qwen3)


def test_disk_that_fills_up_at_the_tokenizer(tmp_path: Path, qwen3: LoadedModel) -> None:
    config = DecoderConfig(
        vocab_size=320,
        hidden_size=2,
        intermediate_size=2,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=2,
        max_position_embeddings=16,
    )
    abstract = nnx.eval_shape(lambda: random_decoder(config, seed=0))
    params = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), decoder_params(abstract))
    with disk_of(6000), pytest.raises(ModelError, match=r"Could not write .*Free some space"):
        save_model(tmp_path / "m", config, params, qwen3.tokenizer)
    assert list(tmp_path.iterdir()) == []
    save_model(tmp_path / "m", config, params, qwen3.tokenizer)


def test_leftovers_of_a_killed_write_do_not_matter(tmp_path: Path, qwen3: LoadedModel) -> None:
    (tmp_path / ".m.partial").mkdir()
    (tmp_path / ".m.partial" / "model.safetensors").touch()
    save(tmp_path / "m", qwen3)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_parameters_of_another_shape_are_refused(tmp_path: Path, qwen3: LoadedModel) -> None:
    params = dict(qwen3.params)
    del params["norm"]
    with pytest.raises(ModelError, match=r"params\[norm\] must have shape \[32\], got nothing"):
        save_model(tmp_path / "m", qwen3.config, params, qwen3.tokenizer)
    layers = dict(qwen3.params["layers"])
    layers["up"] = layers["up"][:2]
    with pytest.raises(
        ModelError, match=r"params\[layers/up\] must have shape \[3, 32, 64\], got shape \[2, 32"
    ):
        save_model(tmp_path / "m", qwen3.config, qwen3.params | {"layers": layers}, qwen3.tokenizer)
    params = qwen3.params | {"norm": qwen3.params["norm"].astype(jnp.float16)}
    with pytest.raises(ModelError, match="must all be float32 or all bfloat16, got float16, float"):
        save_model(tmp_path / "m", qwen3.config, params, qwen3.tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_adapters_must_be_merged_first(qwen3: LoadedModel) -> None:
    decoder = build_decoder(qwen3.config, qwen3.params)
    decoder.add_adapters(rank=2, alpha=4.0, linears=("query",), rngs=nnx.Rngs(0))
    with pytest.raises(ModelError, match="merge_adapters"):
        decoder_params(decoder)
