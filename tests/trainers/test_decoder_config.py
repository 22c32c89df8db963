"""Shapes, and the `config.json` they are read from and written to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gymllm.errors import ModelError
from gymllm_trainers.models import DecoderConfig
from gymllm_trainers.models.config import NO_WINDOW, RopeScaling, rope_frequencies
from gymllm_trainers.models.hub import config_from_hub, config_to_hub, tensor_slots
from gymllm_trainers.plan import SHAPES

FIXTURES = Path(__file__).parent / "fixtures"
FAMILIES = sorted(
    path.parent.name
    for path in FIXTURES.glob("tiny_*/config.json")
    if not path.parent.name.endswith("_reward")  # they have a score head
)


def settings(name: str) -> dict[str, object]:
    return json.loads((FIXTURES / name / "config.json").read_text())


def read(name: str, **changes: object) -> DecoderConfig:
    """A fixture's config.json with some keys changed; `...` removes one."""
    changed = {k: v for k, v in (settings(name) | changes).items() if v is not ...}
    return config_from_hub(changed, where="config.json")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # As their hub pages count the tensors.
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008),
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("Qwen/Qwen2.5-3B-Instruct", 3_085_938_688),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400),
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
        ("google/gemma-2-2b-it", 2_614_341_888),
        ("google/gemma-2-9b-it", 9_241_705_984),
        ("google/gemma-3-270m-it", 268_098_176),
        ("google/gemma-3-1b-it", 999_885_952),
    ],
)
def test_known_models_have_as_many_parameters_as_published(name: str, parameters: int) -> None:
    assert SHAPES[name].parameters == parameters


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_known_shape_survives_its_own_config_json(config: DecoderConfig) -> None:
    written = json.loads(json.dumps(config_to_hub(config, dtype="bfloat16")))
    assert config_from_hub(written, where="config.json") == config


@pytest.mark.parametrize("name", FAMILIES)
def test_config_json_is_written_as_it_was_read(name: str) -> None:
    config = read(name)
    written = config_to_hub(config, dtype="float32")
    assert config_from_hub(written, where="config.json") == config
    theirs = settings(name)
    for key in ("architectures", "model_type", "layer_types", "sliding_window"):
        if theirs.get(key) is not None:
            assert written[key] == theirs[key]


@pytest.mark.parametrize("name", FAMILIES)
def test_slots_cover_every_parameter_once(name: str) -> None:
    config = read(name)
    slots = tensor_slots(config)
    names = [n for slot in slots for n in slot.names]
    assert len(names) == len(set(names))
    assert sum(len(s.names) * int(np.prod(s.shape)) for s in slots) == config.parameters


def test_gemma_3_of_transformers_4_says_the_same_in_other_keys() -> None:
    """Before layer_types and rope_parameters: google/gemma-3-1b-it's own keys, at the fixture's size."""
    older = read(
        "tiny_gemma3",
        layer_types=...,
        _sliding_window_pattern=...,
        rope_parameters=...,
        rope_theta=1000.0,
        rope_local_base_freq=50,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
        sliding_window_pattern=3,
    )
    assert older == read("tiny_gemma3")
    plain = read(
        "tiny_gemma3",
        layer_types=...,
        rope_parameters=...,
        sliding_window_pattern=...,
        head_dim=...,
    )
    assert (plain.rope_theta, plain.rope_local_theta, plain.rope_scaling) == (1e6, 1e4, None)
    assert plain.head_dim == 256
    assert plain.sliding_layers == (True,) * 3, "one in six is global"


def test_gemma_2_takes_what_transformers_does_for_absent_keys() -> None:
    absent = dict.fromkeys(
        [
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "query_pre_attn_scalar",
            "layer_types",
        ],
        ...,
    )
    config = read("tiny_gemma2", tie_word_embeddings=..., **absent)
    assert (config.attention_softcap, config.final_softcap) == (50.0, 30.0)
    assert config.query_pre_attn_scalar == 256.0
    assert config.sliding_layers == (True, False)
    assert config.tie_word_embeddings
    off = read("tiny_gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (off.attention_softcap, off.final_softcap) == (None, None)


def test_qwen_slides_from_max_window_layers_on_and_only_if_it_says_so() -> None:
    config = read("tiny_qwen2", layer_types=...)
    assert config.sliding_layers == (False, True)
    assert config.windows == (NO_WINDOW, 7)
    off = read("tiny_qwen2", use_sliding_window=False, layer_types=...)
    assert off.windows is None
    every = read("tiny_qwen3_moe", use_sliding_window=True, sliding_window=9)
    assert every.windows == (9, 9)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("tiny_qwen3_moe", {"decoder_sparse_step": 2}, "sets decoder_sparse_step=2"),
        ("tiny_qwen3_moe", {"mlp_only_layers": [0]}, r"sets mlp_only_layers=\[0\]"),
        ("tiny_qwen3_moe", {"num_experts_per_tok": 7}, r"between 1 and num_experts \(6\), got 7"),
        ("tiny_gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("tiny_gemma3", {"attn_logit_softcapping": 50.0}, "sets attn_logit_softcapping=50.0"),
        ("tiny_gemma3", {"hidden_activation": "gelu"}, "sets hidden_activation='gelu'"),
        (
            "tiny_gemma3",
            {"layer_types": ["full_attention"]},
            "layer_types has 1 entries for num_hidden_layers=3",
        ),
        ("tiny_gemma3", {"layer_types": ["chunked_attention"] * 3}, "sets layer_types="),
        ("tiny_gemma3", {"sliding_window": 0}, "sliding_window must be positive and finite, got 0"),
        (
            "tiny_gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "sets rope_parameters of sliding_attention=",
        ),
        ("tiny_qwen2", {"use_sliding_window": False}, "sets layer_types="),
        ("tiny_qwen2", {"max_window_layers": -1, "layer_types": None}, "max_window_layers must be"),
        (
            "tiny_llama3",
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            "of the type 'llama3' needs a positive high_freq_factor, got None",
        ),
        (
            "tiny_llama3",
            {"rope_parameters": {"rope_type": "yarn", "factor": 8.0}},
            "'yarn'.*default, linear",
        ),
        (
            "tiny_llama3",
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            "rope_scaling and rope_parameters contradict",
        ),
        (
            "tiny_gemma3",
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            "a tower for images.*google/gemma-3-1b-it",
        ),
        (
            "tiny_llama3",
            {"architectures": ["Llama4ForCausalLM"]},
            "supported are LlamaForCausalLM, ",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(
    name: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(name, **changes)


def test_mixtures_that_no_architecture_has_are_not_written() -> None:
    llama = read("tiny_llama")
    with pytest.raises(
        ModelError, match=r"has this model's attention_softcap beside.*LlamaForCausalLM"
    ):
        config_to_hub(replace(llama, attention_softcap=5.0), dtype="float32")
    sliding = replace(llama, sliding_window=4, sliding_layers=(True, False, False))
    with pytest.raises(ModelError, match=r"qkv_bias.*Qwen2ForCausalLM"):
        config_to_hub(sliding, dtype="float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of"),
        ({"head_dim": 7}, "head_dim must be even for RoPE, got 7"),
        ({"sliding_layers": (True,)}, "sliding_layers has 1 entries for num_hidden_layers=3"),
        ({"sliding_layers": (True,) * 3}, "sliding_window must be >= 1, got None"),
        ({"num_experts": 4, "experts_per_token": 2}, "expert_size must be >= 1, got 0"),
    ],
)
def test_shapes_that_make_no_sense_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(read("tiny_llama"), **changes)


def test_scalings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ModelError, match=r"factor must be > 0 and finite, got 0"):
        RopeScaling(kind="linear", factor=0)
    with pytest.raises(
        ModelError, match=r"high_freq_factor > low_freq_factor > 0, got 1.0 and 1.0"
    ):
        RopeScaling(kind="llama3", factor=8.0, high_freq_factor=1.0)


def test_llama_3_scaling_keeps_fast_frequencies_and_divides_slow_ones() -> None:
    """Llama 3.1's own numbers: of a head of 128, 29 pairs turn more than 4 times in 8192 tokens."""
    config = SHAPES["meta-llama/Llama-3.1-8B-Instruct"]
    before = rope_frequencies(replace(config, rope_scaling=None))
    after = rope_frequencies(config)
    turns = 8192 * before / (2 * np.pi)
    np.testing.assert_array_equal(after[turns > 4], before[turns > 4])
    np.testing.assert_array_equal(after[turns < 1], before[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert (turns > 4).sum() == 29
    assert between.any()
    assert ((before / 8 < after) & (after < before))[between].all()
