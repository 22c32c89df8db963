"""Writes a model folder that transformers, vLLM and `load_model` read."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from gymllm.errors import ModelError
from gymllm_agents.tokenizer import Tokenizer
from gymllm_trainers.models.config import DecoderConfig
from gymllm_trainers.models.decoder import Decoder
from gymllm_trainers.models.hub import Params, config_to_hub, tensor_slots
from gymllm_trainers.models.load import parameter_shape
from gymllm_trainers.models.sharding import leaf_at

_SAFETENSORS_TYPES = {"float32": "F32", "bfloat16": "BF16"}


def decoder_params(decoder: Decoder) -> Params:
    """The decoder's parameters as `save_model` takes them; no copy.

    Raises:
        ModelError: It has adapters, which a model folder can't hold; merge them first.
    """
    if decoder.adapters is not None:
        raise ModelError(
            "A decoder with adapters can't be written as a model folder: save "
            "`merge_adapters(decoder)` instead."
        )
    return nnx.to_pure_dict(nnx.state(decoder, nnx.Param))


def save_model(
    folder: str | Path,
    config: DecoderConfig,
    params: Params,
    tokenizer: Tokenizer,
    *,
    overwrite: bool = False,
    max_shard_bytes: int = 2 * 2**30,
) -> None:
    """Writes config.json, weights, tokenizer and generation_config.json.

    The folder appears whole or not at all: everything goes into a hidden folder beside it, which is
    renamed at the end. Where several processes share the arrays, all of them call this, and the first writes.

    Args:
        folder: Where to; its parents are made.
        config: The decoder's shape.
        params: Its parameters, float32 or bfloat16; written as they are, on the host one at a time, wherever
            they lie.
        tokenizer: The model's tokenizer, chat template included.
        overwrite: Replace the model folder that is there, once the new one is complete.
        max_shard_bytes: Largest safetensors file, unless one tensor is larger.

    Raises:
        ModelError: The folder is there already, a parameter is missing or of a wrong shape or type,
            or the disk refused (full, read-only); then nothing is left behind and what was there
            stays.
    """
    dtype = _check(config, params)
    settings = config_to_hub(config, dtype=dtype)
    tensors = _hub_tensors(config, params)
    try:
        if jax.process_index() == 0:
            with whole_folder(
                folder, what="model", marker="config.json", overwrite=overwrite
            ) as partial:
                _write_weights(partial, config, tensors, dtype, max_shard_bytes)
                write_json(partial / "config.json", settings)
                write_json(partial / "generation_config.json", _generation_config(tokenizer))
                _write_tokenizer(partial, tokenizer)
    finally:
        if jax.process_count() > 1:
            # All processes gather each parameter together: one that stops early leaves the others waiting.
            for _ in tensors:
                pass


@contextmanager
def whole_folder(folder: str | Path, *, what: str, marker: str, overwrite: bool) -> Iterator[Path]:
    """A hidden folder to write into, which becomes `folder` at the end, or else leaves no trace.

    Args:
        folder: Where to; its parents are made.
        what: What is written, for messages.
        marker: A file that a folder has which may be overwritten.
        overwrite: Replace the folder that is there, once the new one is complete.

    Raises:
        ModelError: The folder is there already, or the disk refused.
    """
    target = Path(folder).absolute()
    if target.exists() and not target.is_dir():
        raise ModelError(f"Can't write a {what} to {target}: it is a file. Choose another name.")
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            raise ModelError(
                f"{target} is not empty. Choose another folder, or pass overwrite=True."
            )
        if not (target / marker).is_file():
            raise ModelError(f"{target} holds something else than a {what}: won't overwrite it.")
    partial = target.with_name(f".{target.name}.partial")
    replaced = target.with_name(f".{target.name}.replaced")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if target.exists():
            target.rename(replaced)
        partial.rename(target)
    except OSError as error:
        raise ModelError(
            f"Could not write the {what} to {target} ({error}). Free some space there or choose "
            "another folder; nothing was left behind."
        ) from error
    finally:
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        shutil.rmtree(replaced, ignore_errors=True)
        shutil.rmtree(partial, ignore_errors=True)


def _check(config: DecoderConfig, params: Params) -> str:
    """Checks every parameter's shape and type before a byte is written; returns their type."""
    dtypes: set[str] = set()
    for slot in tensor_slots(config):
        array, expected = leaf_at(params, slot.path), parameter_shape(slot, config)
        if array is None or array.shape != expected:
            found = "nothing" if array is None else f"shape {list(array.shape)}"
            raise ModelError(
                f"params[{'/'.join(slot.path)}] must have shape {list(expected)}, got {found}."
            )
        dtypes.add(str(array.dtype))
    if len(dtypes) != 1 or not dtypes <= set(_SAFETENSORS_TYPES):
        raise ModelError(
            f"Parameters must all be float32 or all bfloat16, got {', '.join(sorted(dtypes))}."
        )
    return dtypes.pop()


def _hub_tensors(config: DecoderConfig, params: Params) -> Iterator[np.ndarray]:
    """Every tensor as the hub has it, brought to the host one parameter at a time."""
    for slot in tensor_slots(config):
        array = leaf_at(params, slot.path)
        assert array is not None
        if not array.is_fully_addressable:
            array = multihost_utils.process_allgather(array, tiled=True)
        host = np.asarray(array)  # gathers what is divided over this process's devices
        for tensor in host.reshape(len(slot.names), *host.shape[host.ndim - len(slot.shape) :]):
            yield tensor.T if slot.transposed else tensor


def _write_weights(
    folder: Path,
    config: DecoderConfig,
    tensors: Iterator[np.ndarray],
    dtype: str,
    max_shard_bytes: int,
) -> None:
    """Writes model.safetensors, or shards and their index when that would be too large."""
    # Planned first, because a shard's name says how many there are.
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    itemsize, held, total = jnp.dtype(dtype).itemsize, 0, 0
    for slot in tensor_slots(config):
        size = math.prod(slot.shape) * itemsize
        for name in slot.names:
            if shards[-1] and held + size > max_shard_bytes:
                shards.append({})
                held = 0
            shards[-1][name] = slot.shape
            held += size
            total += size

    weight_map: dict[str, str] = {}
    for number, shapes in enumerate(shards, start=1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_safetensors(folder / file, shapes, dtype, tensors)
        weight_map |= dict.fromkeys(shapes, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str, tensors: Iterator[np.ndarray]
) -> None:
    """Writes the next tensors as one file, each as it comes: `safetensors` wants them all at once.

    The format: the header's length (8 bytes, little endian), the header (JSON), the tensors' bytes.

    Args:
        path: The file.
        shapes: Name and shape of each tensor.
        dtype: Of them all, "float32" or "bfloat16".
        tensors: They come in this order; no more are taken than there are shapes.
    """
    # transformers refuses a file that doesn't say which framework's layout it has.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    kind, itemsize, offset = _SAFETENSORS_TYPES[dtype], jnp.dtype(dtype).itemsize, 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * itemsize
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # what follows is aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _ in shapes:
            file.write(np.ascontiguousarray(next(tensors)).view(np.uint8).data)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    try:
        tokenizer.save(folder)
    except Exception as error:  # what the tokenizers package raises when a write fails
        raise OSError(str(error)) from error


def _generation_config(tokenizer: Tokenizer) -> dict[str, object]:
    """What generation needs beside the stop tokens, which `Tokenizer.save` adds."""
    return {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}


def write_json(path: Path, content: dict[str, object]) -> None:
    """Writes one file of settings."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
