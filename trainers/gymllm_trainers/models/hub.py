"""The hub's words for a decoder: `config.json` keys and tensor names, both ways.

`load.py` and `gguf.py` read through it and `save.py` writes through it, so that each name stands
here once. A setting that changes what the model computes, and that our decoder doesn't have, is
refused.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import NoReturn, TypeGuard, TypeVar, get_args

from jax import Array

from gymllm.errors import ModelError
from gymllm_trainers.models.config import (
    Activation,
    DecoderConfig,
    RopeScaling,
    check_size,
    layer_shapes,
)
from gymllm_trainers.models.decoder import LinearName

Params = dict[str, Array | dict[str, Array]]
"""A decoder's parameters as `nnx.to_pure_dict` gives them: embedding, layers, norm, head."""

_T = TypeVar("_T", int, float, bool)


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What an architecture of the hub says without saying it: its own keys, defaults and arithmetic."""

    model_type: str
    head_dim: int | None = None
    """What transformers takes for an absent head_dim; None: hidden_size / num_attention_heads."""
    gemma: bool = False
    """Norms of 1 + weight and of what is added, scaled embeddings, its own names for activation and caps."""
    softcaps: tuple[float | None, float | None] = (None, None)
    """What it takes for absent soft caps, of scores and of logits."""
    qk_norm: bool = False
    experts: bool = False
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Its settings that change the arithmetic, each with the only values our decoder computes."""


_LLAMA, _QWEN2, _QWEN3 = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
_QWEN3_MOE, _GEMMA2, _GEMMA3 = "Qwen3MoeForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"
_FAMILIES = {
    _LLAMA: _Family(
        model_type="llama",
        only={
            "use_sliding_window": (False, None),
            "sliding_window": (None,),
        },
    ),
    _QWEN2: _Family(model_type="qwen2"),
    _QWEN3: _Family(model_type="qwen3", head_dim=128, qk_norm=True),
    _QWEN3_MOE: _Family(
        model_type="qwen3_moe",
        qk_norm=True,
        experts=True,
        only={"decoder_sparse_step": (1, None), "mlp_only_layers": ([], None)},
    ),
    _GEMMA2: _Family(
        model_type="gemma2",
        head_dim=256,
        gemma=True,
        softcaps=(50.0, 30.0),
        only={"use_bidirectional_attention": (False, None)},
    ),
    _GEMMA3: _Family(
        model_type="gemma3_text",
        head_dim=256,
        gemma=True,
        qk_norm=True,
        # transformers has the key and doesn't apply it.
        only={"use_bidirectional_attention": (False, None), "attn_logit_softcapping": (None,)},
    ),
}
ARCHITECTURES = tuple(_FAMILIES)

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
_EXPERT_NAMES = {"experts_gate": "gate_proj", "experts_up": "up_proj", "experts_down": "down_proj"}
_NORM_NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
}
_GEMMA_NORM_NAMES = _NORM_NAMES | {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}

# Settings that change the arithmetic in every family, each with the only values our decoder computes.
_ONLY: dict[str, tuple[object, ...]] = {
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
    "rope_interleaved": (False, None),
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_LLAMA3_KEYS = {
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
}


@dataclass(frozen=True, kw_only=True)
class TensorSlot:
    """One parameter of the decoder and the hub's tensors it is made of."""

    path: tuple[str, ...]
    """Keys in `Params`."""
    names: tuple[str, ...]
    """Hub names: one, or one a layer when the parameter is stacked on a leading layer axis; of experts
    one a layer and expert, layer by layer, for the two leading axes."""
    shape: tuple[int, ...]
    """Shape of each of those tensors as the hub stores it."""
    stacked: bool
    transposed: bool
    """The hub stores [out, in], we keep [in, out]."""


def tensor_slots(config: DecoderConfig) -> list[TensorSlot]:
    """Every parameter of a decoder of this shape, in the order that checkpoints have."""

    def top(path: str, name: str, *shape: int, transposed: bool = False) -> TensorSlot:
        return TensorSlot(
            path=(path,), names=(name,), shape=shape, stacked=False, transposed=transposed
        )

    vocabulary = (config.vocab_size, config.hidden_size)
    slots = [top("embedding", "model.embed_tokens.weight", *vocabulary)]
    for path, shape in layer_shapes(config).items():
        parts = _parts(config, path)
        names = tuple(
            f"model.layers.{i}.{part}" for i in range(config.num_hidden_layers) for part in parts
        )
        # Kernels, and they alone, have two axes; experts' have a third before them.
        kernel = len(shape) > 1
        slots.append(
            TensorSlot(
                path=("layers", path),
                names=names,
                shape=shape[-2:][::-1] if kernel else shape,
                stacked=True,
                transposed=kernel,
            )
        )
    slots.append(top("norm", "model.norm.weight", config.hidden_size))
    if not config.tie_word_embeddings:
        slots.append(top("head", "lm_head.weight", *vocabulary, transposed=True))
    return slots


def _parts(config: DecoderConfig, path: str) -> list[str]:
    """Hub names, within a layer, of the tensors that a parameter is made of there."""
    if path in _EXPERT_NAMES:
        name = _EXPERT_NAMES[path]
        return [f"mlp.experts.{expert}.{name}.weight" for expert in range(config.num_experts)]
    if path == "router":
        return ["mlp.gate.weight"]
    if path.endswith("_norm"):
        names = _GEMMA_NORM_NAMES if config.post_norms else _NORM_NAMES
        return [f"{names[path]}.weight"]
    kind = "bias" if path.endswith("_bias") else "weight"
    linear: LinearName = path.removesuffix("_bias")  # type: ignore[assignment]  # what remains is one
    return [f"{_LINEAR_NAMES[linear]}.{kind}"]


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
    if architecture == "Gemma3ForConditionalGeneration":
        raise ModelError(
            f"{where} is of {architecture}, which holds a tower for images beside the language model; ours "
            "is for text alone. Choose a text-only model (google/gemma-3-270m-it and google/gemma-3-1b-it "
            "are), or load this one's language model as transformers' Gemma3ForCausalLM and save that."
        )
    if not isinstance(architecture, str) or architecture not in _FAMILIES:
        *most, last = ARCHITECTURES
        raise ModelError(
            f"{where} says architectures={architectures!r}; supported are "
            f"{', '.join(most)} and {last}. Choose a model of one of those."
        )
    return _Reader(settings, where, architecture).config()


class _Reader:
    """One `config.json`, read as its family's defaults have it."""

    def __init__(self, settings: Mapping[str, object], where: str, architecture: str) -> None:
        self._settings, self._where = settings, where
        self._architecture, self._family = architecture, _FAMILIES[architecture]

    def config(self) -> DecoderConfig:
        family = self._family
        for key, allowed in (_ONLY | dict(family.only)).items():
            if key in self._settings and self._settings[key] not in allowed:
                self._refuse(key, self._settings[key], allowed[0])
        hidden_size, heads = self._int("hidden_size"), self._int("num_attention_heads")
        layers = self._int("num_hidden_layers")
        check_size("num_hidden_layers", layers)  # before there is an entry for each
        llama, qwen2 = self._architecture == _LLAMA, self._architecture == _QWEN2
        bias = qwen2 or self._bool("attention_bias", False)
        theta, scaling, local_theta = self._rope()
        window, slides = self._sliding(layers)
        scores_cap, logits_cap = family.softcaps
        return DecoderConfig(
            vocab_size=self._int("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self._int("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=self._int("num_key_value_heads", heads if llama else None),
            head_dim=self._int("head_dim", family.head_dim or hidden_size // heads),
            max_position_embeddings=self._int("max_position_embeddings"),
            rope_theta=theta,
            rope_scaling=scaling,
            rope_local_theta=local_theta,
            rms_norm_eps=self._float("rms_norm_eps", 1e-6),
            tie_word_embeddings=self._bool("tie_word_embeddings", family.gemma),
            qk_norm=family.qk_norm,
            qkv_bias=bias,
            output_bias=bias and not qwen2,
            mlp_bias=llama and self._bool("mlp_bias", False),
            hidden_act=self._activation(),
            norm_offset=family.gemma,
            post_norms=family.gemma,
            scale_embeddings=family.gemma,
            query_pre_attn_scalar=(
                self._float("query_pre_attn_scalar", 256.0) if family.gemma else None
            ),
            attention_softcap=self._cap("attn_logit_softcapping", scores_cap),
            final_softcap=self._cap("final_logit_softcapping", logits_cap),
            sliding_window=window,
            sliding_layers=slides,
            num_experts=self._experts(),
            experts_per_token=self._int("num_experts_per_tok", 8) if family.experts else 0,
            expert_size=self._int("moe_intermediate_size", 768) if family.experts else 0,
            norm_topk_prob=family.experts and self._bool("norm_topk_prob", False),
        )

    def _experts(self) -> int:
        if not self._family.experts:
            return 0
        # Its name on the hub, and the one that transformers 5 writes.
        for key in ("num_experts", "num_local_experts"):
            if self._settings.get(key) is not None:
                return self._int(key)
        return 128

    def _activation(self) -> Activation:
        """Gemma's first configurations say hidden_act="gelu" and mean the approximation; transformers reads
        hidden_activation alone."""
        key = "hidden_activation" if self._family.gemma else "hidden_act"
        default: Activation = "gelu_pytorch_tanh" if self._family.gemma else "silu"
        value = self._settings.get(key)
        if value is None:
            return default
        known: tuple[Activation, ...] = get_args(Activation)
        for activation in known:
            if value == activation:
                return activation
        self._refuse(key, value, default)

    def _cap(self, key: str, default: float | None) -> float | None:
        if not self._family.gemma or (key in self._settings and self._settings[key] is None):
            return None
        return self._float(key, default) if key in self._settings or default else None

    def _sliding(self, layers: int) -> tuple[int | None, tuple[bool, ...]]:
        """The window and which layers slide, by the rules of each family's configuration."""
        kinds = self._settings.get("layer_types")
        if kinds is not None and (
            not isinstance(kinds, list) or not all(kind in (_SLIDING, _FULL) for kind in kinds)
        ):
            self._refuse("layer_types", kinds, [_FULL])
        if kinds is not None and len(kinds) != layers:
            raise ModelError(
                f"{self._where}: layer_types has {len(kinds)} entries for num_hidden_layers={layers}; "
                "expected one a layer."
            )
        if self._architecture == _LLAMA:
            if kinds and _SLIDING in kinds:
                self._refuse("layer_types", kinds, [_FULL])
            return None, ()
        gemma = self._family.gemma
        if not gemma and not self._bool("use_sliding_window", False):
            if kinds and _SLIDING in kinds:
                self._refuse("layer_types", kinds, [_FULL])
            return None, ()
        if "sliding_window" in self._settings and self._settings["sliding_window"] is None:
            return None, ()
        window = self._int("sliding_window", 4096)
        if self._architecture == _QWEN3_MOE:
            slides = [True] * layers
        elif kinds is not None:
            slides = [kind == _SLIDING for kind in kinds]
        elif gemma:
            every = 2 if self._architecture == _GEMMA2 else self._int("sliding_window_pattern", 6)
            slides = [(layer + 1) % every != 0 for layer in range(layers)]
        else:
            first = self._settings.get("max_window_layers", 28)
            if not isinstance(first, int) or isinstance(first, bool) or first < 0:
                raise ModelError(
                    f"{self._where}: max_window_layers must be a number of layers, got {first!r}."
                )
            slides = [layer >= first for layer in range(layers)]
        return (window, tuple(slides)) if any(slides) else (None, ())

    def _rope(self) -> tuple[float, RopeScaling | None, float | None]:
        """RoPE's base, its scaling, and the base of the sliding layers if that is another.

        transformers 4 has rope_theta, rope_scaling and rope_local_base_freq, 5 has rope_parameters, for
        Gemma 3 one in each kind of layer.
        """
        settings = self._settings
        gemma3 = self._architecture == _GEMMA3
        default = 1_000_000.0 if gemma3 else 10_000.0
        rope: dict[str, object] = {"rope_theta": settings.get("rope_theta", default)}
        local: dict[str, object] = {"rope_theta": settings.get("rope_local_base_freq", 10_000.0)}
        scalings: dict[str, RopeScaling | None] = {}
        for key in ("rope_scaling", "rope_parameters"):
            value = settings.get(key)
            if value is None:
                continue
            if not isinstance(value, dict):
                raise ModelError(f"{self._where}: {key} must be an object or null, got {value!r}.")
            if gemma3 and {*value} & {_FULL, _SLIDING}:
                value, sliding = value.get(_FULL) or {}, value.get(_SLIDING) or {}
                if self._scaling(sliding, key) is not None:
                    self._refuse(f"{key} of {_SLIDING}", sliding, "default")
                local |= sliding
            scalings[key] = self._scaling(value, key)
            rope |= value
        if len({*scalings.values()}) > 1:
            raise ModelError(
                f"{self._where}: rope_scaling and rope_parameters contradict each other. Remove one."
            )
        scaling = next(iter(scalings.values()), None)
        return self._theta(rope), scaling, self._theta(local) if gemma3 else None

    def _theta(self, rope: Mapping[str, object]) -> float:
        theta = rope.get("rope_theta")
        if not _is_positive(theta):
            raise ModelError(f"{self._where}: rope_theta must be a positive number, got {theta!r}.")
        return float(theta)

    def _scaling(self, rope: Mapping[str, object], written: str) -> RopeScaling | None:
        kind = rope.get("rope_type", rope.get("type", "default"))
        keys = {"default": set[str](), "linear": {"factor"}, "llama3": _LLAMA3_KEYS}
        shown = {key: value for key, value in rope.items() if key != "rope_theta"}
        if (
            not isinstance(kind, str)
            or kind not in keys
            or rope.get("partial_rotary_factor", 1) != 1
        ):
            self._refuse(written, shown, "one of the types default, linear and llama3")
        if extra := {*rope} - _ROPE_KEYS - keys[kind]:
            self._refuse(written, {key: rope[key] for key in sorted(extra)}, "nothing")
        numbers = {}
        for key in sorted(keys[kind]):
            value = rope.get(key)
            if not _is_positive(value):
                raise ModelError(
                    f"{self._where}: RoPE scaling of the type {kind!r} needs a positive {key}, got {value!r}."
                )
            numbers[key] = float(value)
        if kind == "linear":
            return RopeScaling(kind="linear", factor=numbers["factor"])
        if kind == "llama3":
            original = int(numbers.pop("original_max_position_embeddings"))
            return RopeScaling(kind="llama3", original_max_position_embeddings=original, **numbers)
        return None

    def _int(self, key: str, default: int | None = None) -> int:
        return self._get(key, int, default)

    def _float(self, key: str, default: float | None = None) -> float:
        return self._get(key, float, default)

    def _bool(self, key: str, default: bool) -> bool:
        return self._get(key, bool, default)

    def _get(self, key: str, kind: type[_T], default: _T | None) -> _T:
        value = self._settings.get(key)
        if value is None:
            if default is None:
                raise ModelError(
                    f"{self._where} lacks the key {key!r}, which a {self._architecture} needs."
                )
            return default
        # JSON has one kind of number, but True is an int to Python and not a size to us.
        fits = type(value) is kind or (kind is float and type(value) is int)
        if not fits:
            raise ModelError(
                f"{self._where}: {key} must be of type {kind.__name__}, got {value!r}."
            )
        if kind is not bool and not _is_positive(value):
            raise ModelError(f"{self._where}: {key} must be positive and finite, got {value!r}.")
        return kind(value)  # type: ignore[arg-type]  # `type(value) is kind` doesn't narrow it

    def _refuse(self, key: str, value: object, expected: object) -> NoReturn:
        raise ModelError(
            f"{self._where} sets {key}={value!r}, which changes what the model computes and which our "
            f"decoder doesn't do (it has {key}={expected!r}). Choose a model without it."
        )


def _is_positive(value: object) -> TypeGuard[float]:
    """Whether it is a number above 0 that a float can hold: JSON as Python reads it has NaN, Infinity and
    integers of any length."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= sys.float_info.max


def architecture_of(config: DecoderConfig) -> str:
    """The hub's architecture whose arithmetic this is.

    Raises:
        ModelError: None of those that we know combines these options.
    """
    if config.num_experts:
        architecture = _QWEN3_MOE
    elif config.post_norms:
        architecture = _GEMMA3 if config.qk_norm else _GEMMA2
    elif config.qk_norm:
        architecture = _QWEN3
    elif config.sliding_layers or (config.qkv_bias and not config.output_bias):
        architecture = _QWEN2
    else:
        architecture = _LLAMA
    written = _settings(config, architecture)
    read = config_from_hub(written, where="config.json")
    if read != config:
        names = [f.name for f in fields(config) if getattr(read, f.name) != getattr(config, f.name)]
        raise ModelError(
            f"No architecture of the hub that we write has this model's {', '.join(names)} beside its other "
            f"options; {architecture} comes closest. It can be trained and sampled, but not saved for others."
        )
    return architecture


def config_to_hub(config: DecoderConfig, *, dtype: str) -> dict[str, object]:
    """Writes a `config.json` that transformers 4 and 5, vLLM and SGLang read.

    Args:
        config: The decoder's shape.
        dtype: Type of the tensors beside it, "float32" or "bfloat16".

    Raises:
        ModelError: No architecture of the hub combines these options.
    """
    return _settings(config, architecture_of(config)) | {
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": dtype,
    }


def _settings(config: DecoderConfig, architecture: str) -> dict[str, object]:
    """What a `config.json` of this architecture says about the arithmetic."""
    family = _FAMILIES[architecture]
    settings: dict[str, object] = {
        "architectures": [architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": _scaling_to_hub(config.rope_scaling),
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.qkv_bias,
        "attention_dropout": 0.0,
    }
    kinds = [_SLIDING if slides else _FULL for slides in config.sliding_layers]
    if family.gemma:
        settings |= {
            "hidden_activation": config.hidden_act,
            "query_pre_attn_scalar": config.query_pre_attn_scalar or config.head_dim,
            "attn_logit_softcapping": config.attention_softcap,
            "final_logit_softcapping": config.final_softcap,
            "sliding_window": config.sliding_window,
            "layer_types": kinds or [_FULL] * config.num_hidden_layers,
        }
        # transformers has it as a whole number, and refuses another.
        scalar = settings["query_pre_attn_scalar"]
        if isinstance(scalar, float) and scalar.is_integer():
            settings["query_pre_attn_scalar"] = int(scalar)
    else:
        settings["hidden_act"] = config.hidden_act
    if architecture == _LLAMA:
        settings["mlp_bias"] = config.mlp_bias
    if architecture == _GEMMA3:
        settings["rope_local_base_freq"] = config.rope_local_theta or config.rope_theta
    if architecture in (_QWEN2, _QWEN3, _QWEN3_MOE):
        settings |= {
            "use_sliding_window": any(config.sliding_layers),
            "sliding_window": config.sliding_window,
        }
    if architecture in (_QWEN2, _QWEN3):
        # The first layer that slides, for readers that don't know layer_types.
        slides = (
            (*config.sliding_layers, True)
            if kinds
            else (False,) * config.num_hidden_layers + (True,)
        )
        settings |= {
            "max_window_layers": slides.index(True),
            "layer_types": kinds or [_FULL] * config.num_hidden_layers,
        }
    if family.experts:
        settings |= {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.experts_per_token,
            "moe_intermediate_size": config.expert_size,
            "norm_topk_prob": config.norm_topk_prob,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return settings


def _scaling_to_hub(scaling: RopeScaling | None) -> dict[str, object] | None:
    if scaling is None:
        return None
    settings: dict[str, object] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        settings |= {key: getattr(scaling, key) for key in sorted(_LLAMA3_KEYS)}
    return settings
