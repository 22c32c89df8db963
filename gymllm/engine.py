"""What an inference engine is: token ids in; token ids, log-probabilities and versions out.

Agents hold an `Engine` and nothing else of the machinery behind it; engines know nothing of
conversations. Implementations: the embedded JAX engine in `gymllm_trainers.engine`, the scripted one in
`gymllm.engines.scripted`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gymllm.errors import ConfigError

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # a stop token was sampled; it is the last of the ids
    LENGTH = "length"  # max_new_tokens, or the engine's context, was reached


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. An engine that can't honour a field raises `ConfigError`."""

    max_new_tokens: int
    """Most tokens to generate, >= 1."""
    temperature: float = 1.0
    """Softmax temperature; 0 is greedy. Log-probabilities are those of logits / temperature (of the
    logits themselves when greedy)."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends after any of these; the stop token is kept in the ids."""
    seed: int = 0
    """Same seed, prompt and weights give the same tokens, whatever else the engine is doing."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be >= 1, got {self.max_new_tokens}.")
        if not self.temperature >= 0:
            raise ConfigError(f"temperature must be >= 0, got {self.temperature}.")


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One call of an engine."""

    prompt_ids: Sequence[int] | IntArray
    """The whole prompt, every earlier turn included; an array is not written to. An engine finds shared
    prefixes by itself."""
    sampling: SamplingParams
    request_id: str = ""
    """A name for traces and errors."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What an engine made of one request. All arrays have shape [N], N >= 1."""

    token_ids: IntArray
    """Generated ids, the stop token included."""
    logprobs: FloatArray
    """Log-probability (nats) of each id under the distribution it was sampled from."""
    versions: IntArray
    """Policy version that made each id."""
    finish_reason: FinishReason
    queued_s: float = 0.0
    """Seconds the request waited for a slot."""
    metadata: dict[str, float] = field(default_factory=dict[str, float])
    """Further numbers an engine wants on the timeline."""


class Engine(Protocol):
    """An inference engine. Cancelling `generate` frees what the request held."""

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and generation together."""
        ...

    @property
    def version(self) -> int:
        """Policy version of the weights that the next token is made with."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generates until a stop token or a limit.

        Raises:
            ContextLengthError: The prompt fills the context.
            EngineError: The engine broke; the caller may retry elsewhere.
        """
        ...

    async def aclose(self) -> None:
        """Ends every request with `EngineError` and frees the device. Idempotent."""
        ...
