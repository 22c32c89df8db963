"""What lies in a checkpoint beside arrays, so that a copy of it can be exported by itself."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gymllm.errors import ModelError
from gymllm_agents.tokenizer import Tokenizer
from gymllm_trainers.models import DecoderConfig
from gymllm_trainers.models.hub import config_from_hub, config_to_hub
from gymllm_trainers.models.load import read_json
from gymllm_trainers.models.save import write_json

CONFIG = "config.yaml"
"""The run's configuration."""
MODEL = "model"
"""A folder in the hub's format, without weights."""


def checkpoint_files(
    config_yaml: str, shape: DecoderConfig, tokenizer: Tokenizer, *, dtype: str
) -> dict[str, bytes]:
    """Files for `Checkpointer.save`.

    Args:
        config_yaml: The run's configuration.
        shape: The decoder's.
        tokenizer: The model's.
        dtype: Of its weights, "float32" or "bfloat16".

    Returns:
        Content by path in the checkpoint.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_json(folder / "config.json", config_to_hub(shape, dtype=dtype))
        tokenizer.save(folder)
        files = {f"{MODEL}/{file.name}": file.read_bytes() for file in folder.iterdir()}
    return {CONFIG: config_yaml.encode(), **files}


def read_model_files(checkpoint: Path) -> tuple[DecoderConfig, Tokenizer] | None:
    """The decoder's shape and the tokenizer that a checkpoint holds; None in one of an older version.

    Raises:
        ModelError: They can't be read.
    """
    folder = checkpoint / MODEL
    if not folder.is_dir():
        return None
    where = folder / "config.json"
    if not where.is_file():
        raise ModelError(f"{folder} lacks config.json: copy the checkpoint again, or take another.")
    return config_from_hub(read_json(where), where=str(where)), Tokenizer.from_folder(folder)
