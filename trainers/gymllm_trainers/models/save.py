"""Writes a model folder that transformers, vLLM and `load_model` read."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from safetensors import SafetensorError
from safetensors.numpy import save_file

from gymllm.errors import ModelError
from gymllm_agents.tokenizer import Tokenizer
from gymllm_trainers.models.config import DecoderConfig
from gymllm_trainers.models.decoder import Decoder
from gymllm_trainers.models.hub import Params, config_to_hub, tensor_slots

_DTYPES = ("float32", "bfloat16")


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
    renamed at the end.

    Args:
        folder: Where to; its parents are made.
        config: The decoder's shape.
        params: Its parameters, float32 or bfloat16; written as they are.
        tokenizer: The model's tokenizer, chat template included.
        overwrite: Replace the model folder that is there, once the new one is complete.
        max_shard_bytes: Largest safetensors file; also about what is copied to the host at a time.

    Raises:
        ModelError: The folder is there already, a parameter is missing or of a wrong shape or type,
            or the disk refused (full, read-only); then nothing is left behind and what was there
            stays.
    """
    target = Path(folder).absolute()
    if target.exists() and not target.is_dir():
        raise ModelError(f"Can't write a model to {target}: it is a file. Choose another name.")
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            raise ModelError(
                f"{target} is not empty. Choose another folder, or pass overwrite=True."
            )
        if not (target / "config.json").is_file():
            raise ModelError(f"{target} holds something else than a model: won't overwrite it.")
    dtype = _check(config, params)

    partial = target.with_name(f".{target.name}.partial")
    replaced = target.with_name(f".{target.name}.replaced")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_weights(partial, config, params, dtype, max_shard_bytes)
        _write_json(partial / "config.json", config_to_hub(config, dtype=dtype))
        _write_json(partial / "generation_config.json", _generation_config(tokenizer))
        _write_tokenizer(partial, tokenizer)
        if target.exists():
            target.rename(replaced)
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"Could not write the model to {target} ({error}). Free some space there or choose "
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
        array = _at(params, slot.path)
        shape = slot.shape[::-1] if slot.transposed else slot.shape
        expected = (len(slot.names), *shape) if slot.stacked else shape
        if array is None or array.shape != expected:
            found = "nothing" if array is None else f"shape {list(array.shape)}"
            raise ModelError(
                f"params[{'/'.join(slot.path)}] must have shape {list(expected)}, got {found}."
            )
        dtypes.add(str(array.dtype))
    if len(dtypes) != 1 or not dtypes <= set(_DTYPES):
        raise ModelError(
            f"Parameters must all be float32 or all bfloat16, got {', '.join(sorted(dtypes))}."
        )
    return dtypes.pop()


def _at(params: Params, path: tuple[str, ...]) -> Array | None:
    node: Array | dict[str, Array] | None = params.get(path[0])
    for key in path[1:]:
        node = node.get(key) if isinstance(node, dict) else None
    return None if isinstance(node, dict) else node


def _hub_tensors(config: DecoderConfig, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor under its hub name, brought to the host one parameter at a time."""
    for slot in tensor_slots(config):
        host = np.asarray(_at(params, slot.path))
        for index, name in enumerate(slot.names):
            tensor = host[index] if slot.stacked else host
            yield name, np.ascontiguousarray(tensor.T if slot.transposed else tensor)


def _write_weights(
    folder: Path, config: DecoderConfig, params: Params, dtype: str, max_shard_bytes: int
) -> None:
    """Writes model.safetensors, or shards and their index when that would be too large."""
    # Planned first, because a shard's name says how many there are.
    sizes = [
        math.prod(slot.shape) * jnp.dtype(dtype).itemsize
        for slot in tensor_slots(config)
        for _ in slot.names
    ]
    counts = [0]
    held = 0
    for size in sizes:
        if counts[-1] and held + size > max_shard_bytes:
            counts.append(0)
            held = 0
        counts[-1] += 1
        held += size

    tensors = _hub_tensors(config, params)
    weight_map: dict[str, str] = {}
    for number, count in enumerate(counts, start=1):
        file = "model.safetensors"
        if len(counts) > 1:
            file = f"model-{number:05}-of-{len(counts):05}.safetensors"
        shard = dict(itertools.islice(tensors, count))
        # transformers refuses a file that doesn't say which framework's layout it has.
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    if len(counts) > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    try:
        tokenizer.save(folder)
    except Exception as error:  # what the tokenizers package raises when a write fails
        raise OSError(str(error)) from error


def _generation_config(tokenizer: Tokenizer) -> dict[str, object]:
    """What generation needs beside the stop tokens, which `Tokenizer.save` adds."""
    return {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
