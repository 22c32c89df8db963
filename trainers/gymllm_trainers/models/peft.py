"""Reads and writes LoRA adapters as PEFT does, so that PEFT and vLLM load ours and we load theirs.

A folder holds adapter_config.json and adapter_model.safetensors, with A [r, in] and B [out, r] of each linear
that is adapted in each layer. Ours are stacked over layers, of one rank and one scale. What PEFT lets differ
from linear to linear (rank_pattern, alpha_pattern, layers_to_transform) becomes that and the sum stays:
A and B are padded with zeros, which stay zero in training, and B takes up the difference of the scales.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from safetensors import SafetensorError, safe_open

from gymllm.errors import ConfigError, ModelError, UnknownNameError
from gymllm_trainers.models.config import DecoderConfig
from gymllm_trainers.models.decoder import LINEARS, Decoder, LinearName, linear_shapes
from gymllm_trainers.models.hub import tensor_slots
from gymllm_trainers.models.load import all_finite
from gymllm_trainers.models.save import whole_folder, write_json, write_safetensors
from gymllm_trainers.models.sharding import shard_decoder

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_MOST_RANK = 2**16  # no linear has more
_PREFIX = "base_model.model."
_TENSOR = re.compile(re.escape(_PREFIX) + r"(?P<module>.+)\.lora_(?P<part>[AB])\.weight")

# Settings of PEFT that we obey, or that have no part in what a loaded adapter computes. Any other one that is
# set would change the arithmetic.
_OBEYED = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
_WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}
# Ways to start that leave the base model as it is; the others (PiSSA, OLoRA, ...) change it too.
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")

_Number = TypeVar("_Number", int, float)


def choose_linears(which: str | Sequence[str], config: DecoderConfig) -> tuple[LinearName, ...]:
    """The linears that a user's words stand for, to give to `Decoder.add_adapters`.

    Args:
        which: "all-linear"; a list of names, ours ("query") or the hub's ("q_proj"); or a regular expression
            that matches whole names of either kind, the hub's also with their block ("self_attn.q_proj").
        config: The decoder's shape.

    Raises:
        UnknownNameError: No linear of this model is called that.
        ConfigError: Not a regular expression.
    """
    names: dict[LinearName, tuple[str, str, str]] = {}
    for linear, (module, *_) in _modules(config).items():
        block, _, short = module.removeprefix("model.layers.0.").rpartition(".")
        names[linear] = (linear, short, f"{block}.{short}")
    known = [word for words in names.values() for word in words[:2]]
    if which == "all-linear":
        return tuple(names)
    if isinstance(which, str):
        try:
            pattern = re.compile(which)
        except re.error as error:
            raise ConfigError(
                f"{which!r} is not a regular expression ({error}). Give one that matches the names of "
                f"linears, such as '[qv]_proj', or a list of names, or 'all-linear'."
            ) from error
        chosen = {linear for linear, words in names.items() if any(map(pattern.fullmatch, words))}
        unknown = [] if chosen else [which]
    else:
        chosen = {linear for linear, words in names.items() if set(words) & set(which)}
        unknown = [word for word in which if not any(word in words for words in names.values())]
    if unknown:
        raise UnknownNameError("linear", unknown[0], known, 'Or "all-linear" for every one.')
    return tuple(linear for linear in names if linear in chosen)


def save_adapters(
    folder: str | Path, decoder: Decoder, base_name: str, *, overwrite: bool = False
) -> None:
    """Writes a decoder's adapters for PEFT's `PeftModel.from_pretrained` and vLLM; for a whole model, give
    `merge_adapters(decoder)` to `save_model`.

    Args:
        folder: Where to; its parents are made. It appears whole or not at all.
        decoder: Has adapters, float32 or bfloat16.
        base_name: The base model's hub name or folder, which PEFT's users load it by.
        overwrite: Replace the adapters that are there.

    Raises:
        ModelError: There are no adapters, the folder is there already, or the disk refused.
    """
    adapters = decoder.adapters
    if adapters is None:
        raise ModelError("The decoder has no adapters to save: `add_adapters` first.")
    modules = _modules(decoder.config)
    params = nnx.to_pure_dict(nnx.state(adapters, nnx.Param))
    dtypes = {str(array.dtype) for array in params.values()}
    if len(dtypes) != 1 or not dtypes <= {"float32", "bfloat16"}:
        raise ModelError(
            f"Adapters must all be float32 or all bfloat16, got {', '.join(sorted(dtypes))}."
        )
    rank = params[f"{adapters.linears[0]}_a"].shape[-1]
    alpha = adapters.scale * rank
    settings: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": rank,
        # vLLM declares it a whole number.
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": sorted(
            modules[linear][0].rpartition(".")[2] for linear in adapters.linears
        ),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "inference_mode": True,
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for linear in adapters.linears:
        for part in ("a", "b"):
            _, rows, columns = params[f"{linear}_{part}"].shape
            for module in modules[linear]:
                shapes[f"{_PREFIX}{module}.lora_{part.upper()}.weight"] = (columns, rows)

    def tensors() -> Iterator[np.ndarray]:
        for linear in adapters.linears:
            for part in ("a", "b"):
                for matrix in np.asarray(params[f"{linear}_{part}"]):
                    yield matrix.T

    with whole_folder(
        folder, what="set of adapters", marker=_CONFIG, overwrite=overwrite
    ) as partial:
        write_safetensors(partial / _WEIGHTS, shapes, dtypes.pop(), tensors())
        write_json(partial / _CONFIG, settings)


def load_adapters(folder: str | Path, decoder: Decoder) -> None:
    """Gives a decoder the adapters in a folder that PEFT or `save_adapters` wrote.

    They lie on the decoder's mesh, if it is on one, and take the type of its parameters. A setting of PEFT
    that changes the arithmetic is obeyed or refused by name; `lora_dropout`, which is for training, is left
    out.

    Args:
        folder: Holds adapter_config.json and adapter_model.safetensors.
        decoder: The base model; has no adapters yet.

    Raises:
        ModelError: No adapters there, adapters of another model or of a kind that our decoder doesn't
            compute, or damaged ones; or the decoder has some already.
    """
    path = Path(folder)
    if decoder.adapters is not None:
        raise ModelError(
            "The decoder has adapters already: fold them in with `merge_adapters`, or load the base again."
        )
    settings = _Settings.read(path / _CONFIG)
    config, weights = decoder.config, path / _WEIGHTS
    if not weights.is_file():
        raise ModelError(
            f"{path} lacks {_WEIGHTS}. Expected the folder that PEFT's save_pretrained wrote, with "
            "safe_serialization."
        )
    try:
        with safe_open(weights, framework="np") as file:
            pairs = _pairs(weights, list(file.keys()), config)
            read = {
                place: (file.get_tensor(pair["A"]), file.get_tensor(pair["B"]))
                for place, pair in pairs.items()
            }
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{weights} can't be read as safetensors ({error}). It is damaged or only partly "
            "downloaded: download it again."
        ) from error
    modules = _modules(config)
    scales: dict[tuple[LinearName, int], float] = {}
    for (linear, layer), (down, up) in read.items():
        module = modules[linear][layer]
        rank, scales[linear, layer] = settings.rank_and_scale(module)
        inputs, outputs = linear_shapes(config)[linear]
        if kinds := {str(part.dtype) for part in (down, up)} - set(_FLOATS):
            raise ModelError(
                f"{weights}: the adapter of {module} is stored as {', '.join(sorted(kinds))}; expected "
                f"{', '.join(_FLOATS)}. Choose adapters that are not quantized."
            )
        if down.shape != (rank, inputs) or up.shape != (outputs, rank):
            raise ModelError(
                f"{weights}: the adapter of {module} has A {list(down.shape)} and B {list(up.shape)}, "
                f"expected {[rank, inputs]} and {[outputs, rank]}: it is of another model, or of another "
                f"rank than {_CONFIG} says."
            )
    _attach(decoder, weights, read, scales)


def _attach(
    decoder: Decoder,
    where: Path,
    read: Mapping[tuple[LinearName, int], tuple[np.ndarray, np.ndarray]],
    scales: Mapping[tuple[LinearName, int], float],
) -> None:
    """Stacks adapters of any ranks and scales as those of the largest rank and its scale."""
    config, dtype = decoder.config, np.dtype(decoder.norm[...].dtype)
    rank = max(down.shape[0] for down, _ in read.values())
    common = max(scales.values())
    linears: tuple[LinearName, ...] = tuple(
        linear for linear in LINEARS if any(linear == name for name, _ in read)
    )
    stacks: dict[str, np.ndarray] = {}
    for linear in linears:
        inputs, outputs = linear_shapes(config)[linear]
        stacks[f"{linear}_a"] = np.zeros((config.num_hidden_layers, inputs, rank), dtype)
        stacks[f"{linear}_b"] = np.zeros((config.num_hidden_layers, rank, outputs), dtype)
    for (linear, layer), (down, up) in read.items():
        # In the order of the factors: no rounding where all scales are one.
        ratio = scales[linear, layer] / common if common else 0.0
        stacks[f"{linear}_a"][layer, :, : down.shape[0]] = down.T
        stacks[f"{linear}_b"][layer, : up.shape[1]] = (
            up.T if ratio == 1 else up.T.astype(np.float32) * ratio
        )
    for name, stack in stacks.items():
        if not all_finite(stack):
            raise ModelError(
                f"{where}: an adapter of the linear {name[:-2]!r} holds values that are NaN, or infinite as "
                f"{dtype.name}."
            )
    decoder.add_adapters(rank=rank, alpha=common * rank, linears=linears, rngs=nnx.Rngs(0))
    assert decoder.adapters is not None
    for name, stack in stacks.items():
        getattr(decoder.adapters, name)[...] = jnp.asarray(stack)
    sharding = decoder.norm[...].sharding
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        shard_decoder(decoder, sharding.mesh)


def _modules(config: DecoderConfig) -> dict[LinearName, list[str]]:
    """The hub's module of each linear in each layer, such as "model.layers.0.self_attn.q_proj"."""
    slots = {slot.path[-1]: slot for slot in tensor_slots(config)}
    return {
        linear: [name.removesuffix(".weight") for name in slots[linear].names]
        for linear in linear_shapes(config)
    }


def _pairs(
    where: Path, keys: Sequence[str], config: DecoderConfig
) -> dict[tuple[LinearName, int], dict[str, str]]:
    """Names of each adapter's A and B, by linear and layer."""
    modules = _modules(config)
    places: dict[str, tuple[LinearName, int]] = {
        module: (linear, layer)
        for linear, names in modules.items()
        for layer, module in enumerate(names)
    }
    pairs: dict[tuple[LinearName, int], dict[str, str]] = {}
    for key in keys:
        match = _TENSOR.fullmatch(key)
        place = places.get(match["module"]) if match else None
        if match is None or place is None:
            kinds = ", ".join(names[0].rpartition(".")[2] for names in modules.values())
            raise ModelError(
                f"{where} holds {key!r}, for which our decoder has no place: this model takes LoRA on "
                f"{kinds} of its {config.num_hidden_layers} layers."
            )
        pairs.setdefault(place, {})[match["part"]] = key
    if not pairs:
        raise ModelError(f"{where} holds no adapters.")
    for (linear, layer), pair in pairs.items():
        if len(pair) < 2:
            raise ModelError(
                f"{where} holds lora_{min(pair)} of {modules[linear][layer]} without its other half. It is "
                "damaged: save or download it again."
            )
    return pairs


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """What adapter_config.json says about the arithmetic."""

    where: Path
    rank: int
    alpha: float
    rank_stabilised: bool
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> _Settings:
        if not path.is_file():
            raise ModelError(
                f"No {path.name} in {path.parent}: expected the folder that PEFT's save_pretrained wrote."
            )
        try:
            settings: object = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelError(f"{path} can't be read ({error.strerror}).") from error
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path} is not valid JSON ({error}). Download it again.") from error
        if not isinstance(settings, dict):
            raise ModelError(f"{path} must hold a JSON object, got {type(settings).__name__}.")
        if settings.get("peft_type") != "LORA":
            _refuse(path, "peft_type", settings.get("peft_type"), "LORA")
        if settings.get("init_lora_weights", True) not in _STARTS:
            raise ModelError(
                f"{path} sets init_lora_weights={settings['init_lora_weights']!r}, which changes the base "
                "model as well. Save it as a plain LoRA: PEFT's save_pretrained with "
                "path_initial_model_for_weight_conversion."
            )
        for key, value in settings.items():
            known = key in _OBEYED or key in _WITHOUT_EFFECT
            if not known and value and not (key == "bias" and value == "none"):
                _refuse(path, key, value, "none" if key == "bias" else None)
        return cls(
            where=path,
            rank=_rank(path, "r", settings.get("r", 8)),
            alpha=_alpha(path, "lora_alpha", settings.get("lora_alpha", 8)),
            rank_stabilised=bool(settings.get("use_rslora")),
            ranks={
                key: _rank(path, "rank_pattern", value)
                for key, value in _pattern(path, "rank_pattern", settings).items()
            },
            alphas={
                key: _alpha(path, "alpha_pattern", value)
                for key, value in _pattern(path, "alpha_pattern", settings).items()
            },
        )

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Rank of a module's adapter, and what its product is scaled by (rsLoRA: arXiv:2312.03732, eq. 4)."""
        rank = self._of(self.ranks, module, self.rank)
        alpha = self._of(self.alphas, module, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.rank_stabilised else rank)

    def _of(self, patterns: Mapping[str, _Number], module: str, default: _Number) -> _Number:
        # PEFT's own rule: the first pattern that matches the end of the module's name.
        for pattern, value in patterns.items():
            try:
                if re.match(rf"(.*\.)?({pattern})$", module):
                    return value
            except re.error as error:
                raise ModelError(
                    f"{self.where}: the pattern {pattern!r} is not a regular expression ({error})."
                ) from error
        return default


def _pattern(path: Path, key: str, settings: Mapping[str, object]) -> Mapping[str, object]:
    value = settings.get(key) or {}
    if not isinstance(value, dict):
        raise ModelError(f"{path}: {key} must be an object, got {value!r}.")
    return value


def _rank(path: Path, key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_RANK:
        raise ModelError(f"{path}: {key} must be a rank from 1 to {_MOST_RANK}, got {value!r}.")
    return value


def _alpha(path: Path, key: str, value: object) -> float:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else 0
    if not 0 < number <= sys.float_info.max:  # JSON's integers may be longer
        raise ModelError(f"{path}: {key} must be a number > 0, got {value!r}.")
    return number


def _refuse(path: Path, key: str, value: object, expected: object) -> None:
    raise ModelError(
        f"{path} sets {key}={value!r}, which changes what the adapters compute and which our decoder doesn't "
        f"do (it has {key}={expected!r}). Choose adapters without it, or merge them with PEFT and load the "
        "whole model."
    )
