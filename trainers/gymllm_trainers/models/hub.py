"""The hub's words for a decoder: `config.json` keys and tensor names, both ways.

`load.py` and `gguf.py` read through it and `save.py` writes through it, so that each name stands
here once. A setting that changes what the model computes, and that our decoder doesn't have, is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from jax import Array

from gymllm.errors import ModelError
from gymllm_trainers.models.config import DecoderConfig
from gymllm_trainers.models.decoder import LinearName, linear_shapes

Params = dict[str, Array | dict[str, Array]]
"""A decoder's parameters as `nnx.to_pure_dict` gives them: embedding, layers, norm, head."""

LLAMA, QWEN3 = "LlamaForCausalLM", "Qwen3ForCausalLM"
ARCHITECTURES = (LLAMA, QWEN3)

_T = TypeVar("_T", int, float, bool)

# Where each linear of a layer stands in the hub's checkpoints; there it is [out, in].
_LINEAR_NAMES: dict[LinearName, str] = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}

# Settings that change the arithmetic, each with the only values our decoder computes.
_ONLY: dict[str, tuple[object, ...]] = {
    "attention_bias": (False, None),
    "attention_dropout": (0, None),
    "hidden_act": ("silu",),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
    "rope_interleaved": (False, None),
    "use_sliding_window": (False, None),
}

_PLAIN_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


@dataclass(frozen=True, kw_only=True)
class TensorSlot:
    """One parameter of the decoder and the hub's tensors it is made of."""

    path: tuple[str, ...]
    """Keys in `Params`."""
    names: tuple[str, ...]
    """Hub names: one, or one a layer when the parameter is stacked on a leading layer axis."""
    shape: tuple[int, ...]
    """Shape of each of those tensors as the hub stores it."""
    stacked: bool
    transposed: bool
    """The hub stores [out, in], we keep [in, out]."""


class TensorSource(Protocol):
    """An open checkpoint, seen in the hub's names."""

    where: str
    """What to call it in an error message."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor in it, without reading any."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor; a floating type."""
        ...


def tensor_slots(config: DecoderConfig) -> list[TensorSlot]:
    """Every parameter of a decoder of this shape, in the order that checkpoints have."""

    def top(path: str, name: str, *shape: int, transposed: bool = False) -> TensorSlot:
        return TensorSlot(
            path=(path,), names=(name,), shape=shape, stacked=False, transposed=transposed
        )

    def layer(path: str, name: str, *shape: int, transposed: bool = False) -> TensorSlot:
        names = tuple(f"model.layers.{i}.{name}.weight" for i in range(config.num_hidden_layers))
        return TensorSlot(
            path=("layers", path), names=names, shape=shape, stacked=True, transposed=transposed
        )

    vocabulary = (config.vocab_size, config.hidden_size)
    slots = [top("embedding", "model.embed_tokens.weight", *vocabulary)]
    for name, (inputs, outputs) in linear_shapes(config).items():
        slots.append(layer(name, _LINEAR_NAMES[name], outputs, inputs, transposed=True))
    slots.append(layer("attention_norm", "input_layernorm", config.hidden_size))
    slots.append(layer("mlp_norm", "post_attention_layernorm", config.hidden_size))
    if config.qk_norm:
        slots.append(layer("query_norm", "self_attn.q_norm", config.head_dim))
        slots.append(layer("key_norm", "self_attn.k_norm", config.head_dim))
    slots.append(top("norm", "model.norm.weight", config.hidden_size))
    if not config.tie_word_embeddings:
        slots.append(top("head", "lm_head.weight", *vocabulary, transposed=True))
    return slots


def config_from_hub(settings: Mapping[str, object], *, where: str) -> DecoderConfig:
    """Reads a `config.json`, as transformers 4 and 5 write it.

    Args:
        settings: The file's content.
        where: The file, for error messages.

    Raises:
        ModelError: An architecture or setting that our decoder doesn't compute, a key missing, or a
            value of the wrong type.
    """
    architectures = settings.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{where} says architectures={architectures!r}; supported are "
            f"{' and '.join(ARCHITECTURES)}. Choose a model of one of those."
        )
    for key, allowed in _ONLY.items():
        if key in settings and settings[key] not in allowed:
            _refuse(where, key, settings[key], allowed[0])
    layer_types = settings.get("layer_types")
    if isinstance(layer_types, list) and set(layer_types) != {"full_attention"}:
        _refuse(where, "layer_types", sorted(set(map(str, layer_types))), ["full_attention"])

    def get(key: str, kind: type[_T], default: Callable[[], _T] | None = None) -> _T:
        value = settings.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{where} lacks the key {key!r}, which a {architecture} needs.")
            return default()
        # JSON has one kind of number, but True is an int to Python and not a size to us.
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not kind:
            raise ModelError(f"{where}: {key} must be of type {kind.__name__}, got {value!r}.")
        if kind is not bool and value <= 0:
            raise ModelError(f"{where}: {key} must be positive, got {value!r}.")
        return value  # type: ignore[return-value]  # `type(value) is kind` doesn't narrow a TypeVar

    hidden_size, heads = get("hidden_size", int), get("num_attention_heads", int)
    # What transformers fills in for an absent key: it differs between the two.
    head_dim = (lambda: hidden_size // heads) if architecture == LLAMA else (lambda: 128)
    return DecoderConfig(
        vocab_size=get("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=get("intermediate_size", int),
        num_hidden_layers=get("num_hidden_layers", int),
        num_attention_heads=heads,
        num_key_value_heads=get(
            "num_key_value_heads", int, (lambda: heads) if architecture == LLAMA else None
        ),
        head_dim=get("head_dim", int, head_dim),
        max_position_embeddings=get("max_position_embeddings", int),
        rope_theta=_rope_theta(settings, where),
        rms_norm_eps=get("rms_norm_eps", float, lambda: 1e-6),
        tie_word_embeddings=get("tie_word_embeddings", bool, lambda: False),
        qk_norm=architecture == QWEN3,
    )


def config_to_hub(config: DecoderConfig, *, dtype: str) -> dict[str, object]:
    """Writes a `config.json` that transformers 4 and 5, vLLM and SGLang read.

    Args:
        config: The decoder's shape.
        dtype: Type of the tensors beside it, "float32" or "bfloat16".
    """
    return {
        "architectures": [QWEN3 if config.qk_norm else LLAMA],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": dtype,
    }


def _rope_theta(settings: Mapping[str, object], where: str) -> float:
    """RoPE's base; refuses every scaling. transformers 4 has two keys for it, 5 has one."""
    rope: dict[str, object] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = settings.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise ModelError(f"{where}: {key} must be an object or null, got {value!r}.")
        kind = value.get("rope_type", value.get("type", "default"))
        whole = value.get("partial_rotary_factor", 1) == 1
        if kind != "default" or not whole or set(value) - _PLAIN_ROPE_KEYS:
            _refuse(where, key, value, None)
        rope |= value
    theta = rope.get("rope_theta", settings.get("rope_theta", 10_000.0))
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise ModelError(f"{where}: rope_theta must be a positive number, got {theta!r}.")
    return float(theta)


def _refuse(where: str, key: str, value: object, expected: object) -> None:
    raise ModelError(
        f"{where} sets {key}={value!r}, which changes what the model computes and which our "
        f"decoder doesn't do (it has {key}={expected!r}). Choose a model without it."
    )
