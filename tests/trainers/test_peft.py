"""Adapters that PEFT wrote and ours, read and written; fixtures by scripts/make_peft_fixture.py."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from gymllm.errors import ConfigError, ModelError, UnknownNameError
from gymllm_trainers.models import Decoder, decoder_params, load_model, save_model
from gymllm_trainers.models.decoder import LINEARS, LoRAParam, merge_adapters
from gymllm_trainers.models.peft import choose_linears, load_adapters, save_adapters

FIXTURES = Path(__file__).parent / "fixtures"


def qwen3(dtype: str = "float32") -> Decoder:
    return load_model(FIXTURES / "tiny_qwen3", dtype=dtype).decoder()


def adapted(name: str) -> Decoder:
    decoder = qwen3()
    load_adapters(FIXTURES / "peft" / name, decoder)
    return decoder


@nnx.jit
def compute(decoder: Decoder, ids_BT: jax.Array) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(ids_BT.shape[1]), ids_BT.shape)
    ends_BT = jnp.full_like(ids_BT, ids_BT.shape[1])
    return decoder.logits(decoder.hidden(ids_BT, positions, ends_BT))


def logits(decoder: Decoder, ids_BT: np.ndarray) -> np.ndarray:
    return np.asarray(compute(decoder, jnp.asarray(ids_BT, jnp.int32)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the plain adapters that a test may damage."""
    return Path(shutil.copytree(FIXTURES / "peft" / "plain", tmp_path / "adapters"))


def edit_settings(folder: Path, **changes: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, edit: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


# ------------------------------------------------------------------ what PEFT wrote


@pytest.mark.parametrize("name", ["plain", "patterns"])
def test_logits_are_those_of_peft(name: str) -> None:
    recorded = np.load(FIXTURES / "peft" / name / "logits.npz")
    ours = logits(adapted(name), recorded["ids"])
    np.testing.assert_allclose(ours, recorded["logits"], atol=1e-4)
    # Without the adapters they would be far off.
    assert np.abs(logits(qwen3(), recorded["ids"]) - recorded["logits"]).max() > 1


def test_merged_decoder_computes_the_same() -> None:
    recorded = np.load(FIXTURES / "peft" / "patterns" / "logits.npz")
    merged = merge_adapters(adapted("patterns"))
    assert merged.adapters is None
    np.testing.assert_allclose(logits(merged, recorded["ids"]), recorded["logits"], atol=1e-4)


def test_ranks_and_scales_that_differ_become_one() -> None:
    adapters = adapted("patterns").adapters
    assert adapters is not None
    assert adapters.linears == ("query", "value", "down")
    assert adapters.scale == pytest.approx(6)  # 6 / sqrt(1), of the query in layer 2
    tensors = load_file(FIXTURES / "peft" / "patterns" / "adapter_model.safetensors")
    module = "base_model.model.model.layers.2.self_attn.q_proj"
    query_a, query_b = adapters.query_a[...], adapters.query_b[...]
    assert query_a.shape == (3, 32, 4)
    np.testing.assert_array_equal(query_a[2, :, :1], tensors[f"{module}.lora_A.weight"].T)
    np.testing.assert_array_equal(query_b[2, :1], tensors[f"{module}.lora_B.weight"].T)
    assert not query_a[2, :, 1:].any()
    assert not query_b[2, 1:].any()
    assert not query_b[1].any()  # a layer that is not adapted


def test_adapters_take_the_type_of_the_parameters() -> None:
    decoder = qwen3("bfloat16")
    load_adapters(FIXTURES / "peft" / "plain", decoder)
    leaves = nnx.to_pure_dict(nnx.state(decoder.adapters, LoRAParam)).values()
    assert {str(leaf.dtype) for leaf in leaves} == {"bfloat16"}


# ------------------------------------------------------------------ what we write


def test_export_has_the_tensors_that_peft_wrote(tmp_path: Path) -> None:
    save_adapters(tmp_path / "a", adapted("plain"), "tiny_qwen3")
    ours = load_file(tmp_path / "a" / "adapter_model.safetensors")
    theirs = load_file(FIXTURES / "peft" / "plain" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor)
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    recorded = json.loads((FIXTURES / "peft" / "plain" / "adapter_config.json").read_text())
    assert settings["target_modules"] == sorted(recorded["target_modules"])
    same = ("peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "bias")
    assert {key: settings[key] for key in same} == {key: recorded[key] for key in same}
    assert settings.keys() <= recorded.keys()


@pytest.mark.parametrize("name", ["tiny_qwen3", "tiny_qwen3_moe", "tiny_gemma3"])
def test_own_adapters_come_back(tmp_path: Path, name: str) -> None:
    model = load_model(FIXTURES / name)
    decoder = model.decoder()
    decoder.add_adapters(rank=2, alpha=3.0, rngs=nnx.Rngs(1))
    for seed, (_, variable) in enumerate(nnx.to_flat_state(nnx.state(decoder.adapters, LoRAParam))):
        noise = np.random.default_rng(seed).normal(size=variable[...].shape)
        variable[...] = jnp.asarray(noise, jnp.float32)
    save_adapters(tmp_path / "a", decoder, name)
    again = model.decoder()
    load_adapters(tmp_path / "a", again)
    assert again.adapters is not None
    assert decoder.adapters is not None
    assert again.adapters.scale == decoder.adapters.scale == 1.5
    for linear in decoder.adapters.linears:
        for part in (f"{linear}_a", f"{linear}_b"):
            np.testing.assert_array_equal(
                getattr(again.adapters, part)[...], getattr(decoder.adapters, part)[...]
            )


def test_merged_export_is_a_model(tmp_path: Path) -> None:
    decoder = adapted("plain")
    merged = merge_adapters(decoder)
    tokenizer = load_model(FIXTURES / "tiny_qwen3").tokenizer
    save_model(tmp_path / "m", merged.config, decoder_params(merged), tokenizer)
    ids = np.load(FIXTURES / "peft" / "plain" / "logits.npz")["ids"]
    np.testing.assert_allclose(
        logits(load_model(tmp_path / "m").decoder(), ids), logits(decoder, ids), atol=1e-4
    )


def test_existing_adapters_are_replaced_only_when_asked(tmp_path: Path) -> None:
    decoder = adapted("plain")
    save_adapters(tmp_path / "a", decoder, "base")
    with pytest.raises(ModelError, match=r"is not empty.*overwrite=True"):
        save_adapters(tmp_path / "a", decoder, "base")
    save_adapters(tmp_path / "a", decoder, "base", overwrite=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").touch()
    with pytest.raises(ModelError, match="holds something else than a set of adapters"):
        save_adapters(tmp_path / "b", decoder, "base", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_decoder_without_adapters_has_none_to_save(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no adapters to save: `add_adapters` first"):
        save_adapters(tmp_path / "a", qwen3(), "base")


# ------------------------------------------------------------------ what can't be read


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "IA3"),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("fan_in_fan_out", True),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("trainable_token_indices", [1]),
        ("a_setting_of_next_year", {"on": True}),
    ],
)
def test_setting_that_we_do_not_compute_is_refused(folder: Path, key: str, value: object) -> None:
    edit_settings(folder, **{key: value})
    decoder = qwen3()
    message = rf"adapter_config\.json sets {key}={re.escape(repr(value))}, .*merge them with PEFT"
    with pytest.raises(ModelError, match=message):
        load_adapters(folder, decoder)
    assert decoder.adapters is None


def test_start_that_changes_the_base_is_refused(folder: Path) -> None:
    edit_settings(folder, init_lora_weights="pissa_niter_4")
    with pytest.raises(ModelError, match=r"init_lora_weights='pissa_niter_4'.* changes the base"):
        load_adapters(folder, qwen3())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 0}, "r must be a rank from 1 to 65536, got 0"),
        ({"r": True}, "r must be a rank from 1 to 65536, got True"),
        ({"r": 10**400}, "r must be a rank from 1 to 65536, got 1000"),
        ({"lora_alpha": math.inf}, "lora_alpha must be a number > 0, got inf"),
        ({"lora_alpha": "8"}, "lora_alpha must be a number > 0, got '8'"),
        ({"rank_pattern": {"q_proj": 1.5}}, "rank_pattern must be a rank from 1 to 65536, got 1.5"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object, got [1]"),
        ({"alpha_pattern": {"(": 1}}, "the pattern '(' is not a regular expression"),
        ({"r": 4}, "down_proj has A [3, 64] and B [32, 3], expected [4, 64] and [32, 4]"),
    ],
)
def test_wrong_setting_is_named(folder: Path, changes: dict[str, object], message: str) -> None:
    edit_settings(folder, **changes)
    with pytest.raises(ModelError, match=re.escape(message)):
        load_adapters(folder, qwen3())


def test_adapters_of_another_model_are_refused() -> None:
    with pytest.raises(ModelError, match=r"holds '.*layers\.2\..*no place: .* of its 2 layers"):
        load_adapters(FIXTURES / "peft" / "plain", load_model(FIXTURES / "tiny_llama3").decoder())


def test_adapter_of_something_else_than_a_linear_is_refused(folder: Path) -> None:
    name = "base_model.model.lm_head.lora_A.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: np.ones((3, 32), np.float32)}))
    with pytest.raises(ModelError, match=rf"holds '{name}'.*takes LoRA on q_proj, k_proj, .*down"):
        load_adapters(folder, qwen3())


def test_half_an_adapter_is_refused(folder: Path) -> None:
    module = "base_model.model.model.layers.1.mlp.up_proj"
    edit_tensors(folder, lambda tensors: tensors.pop(f"{module}.lora_B.weight"))
    with pytest.raises(
        ModelError, match=r"lora_A of model\.layers\.1\.mlp\.up_proj without its other half"
    ):
        load_adapters(folder, qwen3())
    edit_tensors(folder, dict.clear)
    with pytest.raises(ModelError, match="holds no adapters"):
        load_adapters(folder, qwen3())


def test_values_that_are_not_finite_are_refused(folder: Path) -> None:
    module = "base_model.model.model.layers.1.mlp.up_proj"

    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{module}.lora_B.weight"][3, 1] = np.nan

    edit_tensors(folder, spoil)
    with pytest.raises(
        ModelError, match=r"an adapter of the linear 'up' holds values that are NaN"
    ):
        load_adapters(folder, qwen3())


def test_integers_are_refused(folder: Path) -> None:
    edit_tensors(
        folder,
        lambda tensors: tensors.update({n: t.astype(np.int8) for n, t in tensors.items()}),
    )
    with pytest.raises(ModelError, match=r"stored as int8; expected float64, .* not quantized"):
        load_adapters(folder, qwen3())


def test_missing_and_damaged_files_are_named(folder: Path) -> None:
    weights, settings = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors can't be read"):
        load_adapters(folder, qwen3())
    weights.unlink()
    with pytest.raises(ModelError, match=r"lacks adapter_model\.safetensors"):
        load_adapters(folder, qwen3())
    settings.write_text("{")
    with pytest.raises(ModelError, match="is not valid JSON"):
        load_adapters(folder, qwen3())
    settings.unlink()
    with pytest.raises(ModelError, match=r"No adapter_config\.json in .*save_pretrained"):
        load_adapters(folder, qwen3())


def test_second_set_of_adapters_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"has adapters already: .*`merge_adapters`"):
        load_adapters(folder, adapted("plain"))


# ------------------------------------------------------------------ which linears


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ("all-linear", LINEARS),
        ("[qv]_proj", ("query", "value")),
        (r"mlp\..*", ("gate", "up", "down")),
        ("query|output", ("query", "output")),
        (["o_proj", "query"], ("query", "output")),
    ],
)
def test_linears_are_chosen_by_name_or_pattern(
    which: str | list[str], expected: tuple[str, ...]
) -> None:
    assert choose_linears(which, qwen3().config) == expected


def test_all_linears_of_a_mixture_are_those_of_attention() -> None:
    config = load_model(FIXTURES / "tiny_qwen3_moe").config
    assert choose_linears("all-linear", config) == ("query", "key", "value", "output")


def test_linear_that_is_not_there_is_named() -> None:
    config = qwen3().config
    with pytest.raises(UnknownNameError, match=r"Unknown linear 'q_porj'. Did you mean q_proj"):
        choose_linears(["q_porj"], config)
    with pytest.raises(UnknownNameError, match=r"Unknown linear 'lm_head'.*all-linear"):
        choose_linears("lm_head", config)
    with pytest.raises(ConfigError, match=r"'\(' is not a regular expression"):
        choose_linears("(", config)
