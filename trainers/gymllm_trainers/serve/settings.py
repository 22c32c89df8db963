"""What the command line of `gymllm-serve` can say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import tyro

from gymllm.errors import ConfigError
from gymllm_trainers.engine import EngineConfig

TINY = "tiny"
"""Names gymllm's own tiny model with random weights: to try clients out."""

DEFAULT_CONTEXT = 4096
"""Tokens; less where the model was made for less."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """A model, and how it is served."""

    model: str
    """A model folder, a run's folder, a .gguf file, a hub name, "smollm2"; or "tiny": random weights, to
    try clients out."""
    name: str = ""
    """What clients call the model; empty: as --model has it."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every one this machine has. Set a key then."""
    port: int = 8000
    """0 takes a free one, which is printed."""
    api_key: str = field(default="", repr=False)
    """Clients must send it as "Authorization: Bearer KEY". Empty: the environment variable
    GYMLLM_API_KEY, which other users of this machine can't see; if that is empty too, anybody may ask."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and arithmetic."""
    engine: EngineConfig = field(
        default_factory=lambda: EngineConfig(slots=16, context_length=DEFAULT_CONTEXT)
    )
    """Sizes of the engine."""
    queue: int = 128
    """Sequences that may wait beside those that generate; more are refused with 429."""
    max_body_mb: int = 16
    """Longest body of a request, in MiB; longer ones are refused with 413."""
    seed: int = 0
    """Of the weights of "tiny"."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be from 0 to 65535, got {self.port}.")
        if self.queue < 0:
            raise ConfigError(f"--queue must be >= 0, got {self.queue}.")
        if self.max_body_mb < 1:
            raise ConfigError(f"--max-body-mb must be >= 1, got {self.max_body_mb}.")

    @property
    def served_name(self) -> str:
        """What clients call the model."""
        return self.name or self.model


def load_settings(argv: Sequence[str]) -> ServeSettings:
    """Reads the command line.

    A mistake in a flag, and `--help`, end the program as usual for command lines (`SystemExit`).

    Raises:
        ConfigError: A value that can't be used.
    """
    words = list(argv)
    for place in range(len(words) - 1):  # "--model random tiny" is what people call it
        if words[place : place + 3] == ["--model", "random", TINY]:
            del words[place + 1]
            break
    return tyro.cli(
        ServeSettings,
        args=words,
        prog="gymllm-serve",
        description="Serves a model over HTTP, by OpenAI's protocol and SGLang's.",
    )
