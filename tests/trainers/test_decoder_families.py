"""Each option of each family matters: the recorded logits come out with it, and not without it.

The options are switched off one by one in a decoder of plain NumPy, so that nothing is compiled for each.
That ours computes the recorded logits too (decoder parity) then says that it has all of them.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from gymllm_trainers.models import DecoderConfig, LoadedModel, load_model
from gymllm_trainers.models.config import RopeScaling

FIXTURES = Path(__file__).parent / "fixtures"
Weights = dict[str, np.ndarray]


def norm(x: np.ndarray, weight: np.ndarray, config: DecoderConfig) -> np.ndarray:
    x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config.rms_norm_eps)
    return x * (1 + weight if config.norm_offset else weight)


def activation(x: np.ndarray, config: DecoderConfig) -> np.ndarray:
    if config.hidden_act == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def rotate(x_TNH: np.ndarray, config: DecoderConfig, slides: bool) -> np.ndarray:
    half = config.head_dim // 2
    local = slides and config.rope_local_theta is not None
    theta = config.rope_local_theta if local else config.rope_theta
    frequency = np.array([theta ** (-i / half) for i in range(half)])
    scaling = None if local else config.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        frequency = frequency / scaling.factor
    elif scaling is not None:
        for i, f in enumerate(frequency):
            turns = scaling.original_max_position_embeddings * f / (2 * np.pi)
            if turns < scaling.low_freq_factor:
                frequency[i] = f / scaling.factor
            elif turns < scaling.high_freq_factor:
                span = scaling.high_freq_factor - scaling.low_freq_factor
                kept = (turns - scaling.low_freq_factor) / span
                frequency[i] = kept * f + (1 - kept) * f / scaling.factor
    turned = np.exp(1j * np.arange(len(x_TNH))[:, None, None] * frequency)
    turned = (x_TNH[..., :half] + 1j * x_TNH[..., half:]) * turned
    return np.concatenate([turned.real, turned.imag], axis=-1)


def capped(x: np.ndarray, cap: float | None) -> np.ndarray:
    return x if cap is None else cap * np.tanh(x / cap)


def softmax(x: np.ndarray) -> np.ndarray:
    shares = np.exp(x - x.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)


def feed_forward(x: np.ndarray, w: Weights, config: DecoderConfig) -> np.ndarray:
    def dense(x: np.ndarray, prefix: str, index: int | tuple[()]) -> np.ndarray:
        def linear(x: np.ndarray, name: str) -> np.ndarray:
            return x @ w[f"{prefix}{name}"][index] + w.get(f"{name}_bias", np.zeros(1))

        gated = activation(linear(x, "gate"), config) * linear(x, "up")
        return linear(gated, "down")

    if not config.num_experts:
        return dense(x, "", ())
    out = np.zeros_like(x)
    for token, shares in enumerate(softmax(x @ w["router"])):
        chosen = np.argsort(-shares)[: config.experts_per_token]
        total = shares[chosen].sum() if config.norm_topk_prob else 1
        for expert in chosen:
            out[token] += shares[expert] / total * dense(x[token], "experts_", int(expert))
    return out


def logits(config: DecoderConfig, params: dict, ids_T: np.ndarray) -> np.ndarray:
    """[T, V] of one sequence, in float64, straight from the families' papers."""
    x = params["embedding"][ids_T]
    if config.scale_embeddings:
        x = x * np.sqrt(config.hidden_size)
    tokens, groups = len(ids_T), config.num_attention_heads // config.num_key_value_heads
    age = np.arange(tokens)[:, None] - np.arange(tokens)
    for layer in range(config.num_hidden_layers):
        w = {name: stack[layer] for name, stack in params["layers"].items()}
        slides = bool(config.sliding_layers) and config.sliding_layers[layer]

        def heads(x: np.ndarray, name: str, w: Weights = w, slides: bool = slides) -> np.ndarray:
            out = x @ w[name] + (w[f"{name}_bias"] if config.qkv_bias else 0)
            out = out.reshape(len(x), -1, config.head_dim)
            if name == "value":
                return out
            if config.qk_norm:
                out = norm(out, w[f"{name}_norm"], config)
            return rotate(out, config, slides)

        inner = norm(x, w["attention_norm"], config)
        key, value = (
            np.repeat(heads(inner, name), groups, axis=1).swapaxes(0, 1)
            for name in ("key", "value")
        )
        scale = (config.query_pre_attn_scalar or config.head_dim) ** -0.5
        scores = heads(inner, "query").swapaxes(0, 1) @ key.swapaxes(1, 2) * scale
        seen = (age >= 0) & (age < (config.sliding_window if slides else tokens))
        shares = softmax(np.where(seen, capped(scores, config.attention_softcap), -np.inf))
        mixed = (shares @ value).swapaxes(0, 1).reshape(tokens, -1)
        mixed = mixed @ w["output"] + (w["output_bias"] if config.output_bias else 0)
        x = x + (norm(mixed, w["attention_post_norm"], config) if config.post_norms else mixed)
        mixed = feed_forward(norm(x, w["mlp_norm"], config), w, config)
        x = x + (norm(mixed, w["mlp_post_norm"], config) if config.post_norms else mixed)
    x = norm(x, params["norm"], config)
    head = params["embedding"].T if config.tie_word_embeddings else params["head"]
    return capped(x @ head, config.final_softcap)


@functools.cache
def family(name: str) -> tuple[LoadedModel, dict]:
    model = load_model(FIXTURES / name)
    return model, jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), model.params)


def error(name: str, **changes: object) -> float:
    """Largest difference to the recorded logits, of the family with some options changed."""
    model, params = family(name)
    recorded = np.load(FIXTURES / name / "logits.npz")
    config = replace(model.config, **changes)
    if not config.mlp_bias and model.config.mlp_bias:
        layers = {k: v for k, v in params["layers"].items() if k[:-5] not in ("gate", "up", "down")}
        params = params | {"layers": layers}
    ours = logits(config, params, recorded["ids"][0])
    return float(np.abs(ours - recorded["logits"][0]).max())


@pytest.mark.parametrize(
    "name",
    [
        "tiny_gemma2",
        "tiny_gemma3",
        "tiny_llama",
        "tiny_llama3",
        "tiny_qwen2",
        "tiny_qwen3",
        "tiny_qwen3_moe",
        "tiny_smollm2",
    ],
)
def test_reference_computes_what_transformers_recorded(name: str) -> None:
    assert error(name) < 1e-4


LLAMA3 = RopeScaling(kind="llama3", factor=8.0, original_max_position_embeddings=64)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tiny_llama", {"rms_norm_eps": 1e-1}),
        ("tiny_llama3", {"rope_scaling": None}),
        ("tiny_llama3", {"rope_scaling": replace(LLAMA3, kind="linear")}),
        ("tiny_llama3", {"rope_scaling": replace(LLAMA3, high_freq_factor=2.0)}),
        ("tiny_llama3", {"rope_scaling": replace(LLAMA3, low_freq_factor=2.0)}),
        ("tiny_llama3", {"rope_scaling": replace(LLAMA3, original_max_position_embeddings=128)}),
        ("tiny_llama3", {"qkv_bias": False}),
        ("tiny_llama3", {"output_bias": False}),
        ("tiny_llama3", {"mlp_bias": False}),
        ("tiny_smollm2", {"rope_theta": 10_000.0}),
        ("tiny_qwen2", {"qkv_bias": False}),
        ("tiny_qwen2", {"sliding_layers": ()}),
        ("tiny_qwen2", {"sliding_layers": (True, True)}),
        ("tiny_qwen3", {"qk_norm": False}),
        ("tiny_qwen3_moe", {"qk_norm": False}),
        ("tiny_qwen3_moe", {"norm_topk_prob": False}),
        ("tiny_qwen3_moe", {"experts_per_token": 1}),
        ("tiny_qwen3_moe", {"experts_per_token": 3}),
        ("tiny_gemma2", {"norm_offset": False}),
        ("tiny_gemma2", {"post_norms": False}),
        ("tiny_gemma2", {"scale_embeddings": False}),
        ("tiny_gemma2", {"hidden_act": "silu"}),
        ("tiny_gemma2", {"query_pre_attn_scalar": None}),
        ("tiny_gemma2", {"attention_softcap": None}),
        ("tiny_gemma2", {"final_softcap": None}),
        ("tiny_gemma2", {"sliding_layers": ()}),
        ("tiny_gemma2", {"sliding_layers": (False, True)}),
        ("tiny_gemma2", {"sliding_window": 4}),
        ("tiny_gemma2", {"sliding_window": 6}),
        ("tiny_gemma3", {"qk_norm": False}),
        ("tiny_gemma3", {"post_norms": False}),
        ("tiny_gemma3", {"query_pre_attn_scalar": None}),
        ("tiny_gemma3", {"rope_local_theta": None}),
        ("tiny_gemma3", {"rope_scaling": None}),
        ("tiny_gemma3", {"rope_theta": 10_000.0}),
        ("tiny_gemma3", {"sliding_window": 7}),
        ("tiny_gemma3", {"sliding_layers": (True, False, True)}),
    ],
    ids=str,
)
def test_logits_differ_without_the_option(name: str, changes: dict[str, object]) -> None:
    assert error(name, **changes) > 1e-2
