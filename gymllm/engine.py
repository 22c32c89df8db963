"""What an inference engine is: token ids in; token ids, log-probabilities and versions out.

Agents hold an `Engine` and nothing else of the machinery behind it; engines know nothing of
conversations. Implementations: the embedded JAX engine in `gymllm_trainers.engine`, the scripted one in
`gymllm.engines.scripted`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from numbers import Integral, Real
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from gymllm.errors import ConfigError

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # a stop token or string, or the end of a grammar; what ended it is in the ids
    LENGTH = "length"  # max_new_tokens, or the engine's context, was reached


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. An engine that can't honour a field raises `ConfigError`.

    The order is: logits; grammar; `logit_bias`; penalties; temperature; `top_k`; `top_p`; `min_p`.
    """

    max_new_tokens: int
    """Most tokens to generate, >= 1."""
    temperature: float = 1.0
    """Softmax temperature; 0 is greedy."""
    top_k: int = 0
    """Only the k likeliest tokens, and those as likely as the k-th; 0 is all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together reach this probability, in (0, 1] (Holtzman et al. 2019,
    arXiv:1904.09751)."""
    min_p: float = 0.0
    """Only tokens at least this share as likely as the likeliest, in [0, 1] (Nguyen et al. 2024,
    arXiv:2407.01082)."""
    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or generated are divided by this where positive, multiplied where
    negative (Keskar et al. 2019, arXiv:1909.05858); > 0, 1 is none."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token that was generated, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token for each time that it was generated, in [-2, 2]."""
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    """Added to the logits of these ids; -inf forbids one."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends after any of these; the stop token is kept in the ids."""
    stop: tuple[str, ...] = ()
    """Generation ends after the token whose text completes any of these strings; it is kept in the ids."""
    regex: str | None = None
    """The text must match this regular expression as a whole."""
    json_schema: str | None = None
    """The text must be JSON that is valid under this schema, itself JSON."""
    choices: tuple[str, ...] = ()
    """The text must be one of these. Of `regex`, `json_schema` and `choices` only one may be given."""
    top_logprobs: int = 0
    """How many of the likeliest tokens come with each token, by the distribution at temperature 1."""
    seed: int = 0
    """Same seed, prompt and weights give the same tokens, whatever else the engine is doing; an engine whose
    sums depend on the batch can differ where two tokens are nearly tied, and says so."""

    def __post_init__(self) -> None:
        self._check_types()
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be >= 1, got {self.max_new_tokens}.")
        for name, fits, expected in (
            ("temperature", 0 <= self.temperature < float("inf"), ">= 0 and finite"),
            ("top_k", self.top_k >= 0, ">= 0 (0 is all)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "> 0 and finite"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]"),
            ("top_logprobs", 0 <= self.top_logprobs <= 20, "from 0 to 20"),
            ("stop", "" not in self.stop, "without empty strings"),
        ):
            if not fits:
                raise ConfigError(f"{name} must be {expected}, got {getattr(self, name)}.")
        bad = [f"{i}: {b}" for i, b in self.logit_bias.items() if not b < float("inf")]
        if bad:
            raise ConfigError(f"logit_bias must be numbers below infinity, got {', '.join(bad)}.")
        if (self.regex is not None) + (self.json_schema is not None) + bool(self.choices) > 1:
            raise ConfigError("only one of regex, json_schema and choices may be given.")

    def _check_types(self) -> None:
        """Refuses what would only be found out in the midst of a step, among other requests' numbers."""
        for names, fits, expected in (
            (("max_new_tokens", "top_k", "top_logprobs", "seed"), _is_integer, "an integer"),
            (
                (
                    "temperature",
                    "top_p",
                    "min_p",
                    "repetition_penalty",
                    "presence_penalty",
                    "frequency_penalty",
                ),
                _is_number,
                "a number",
            ),
            (("regex", "json_schema"), _is_text_or_none, "a text or None"),
            (("stop", "choices"), _are_texts, "a tuple of texts"),
            (("stop_token_ids",), _are_integers, "a tuple of integers"),
            (("logit_bias",), _are_biases, "a mapping from integers to numbers"),
        ):
            for name in names:
                value: object = getattr(self, name)
                if not fits(value):
                    raise ConfigError(f"{name} must be {expected}, got {repr(value)[:200]}.")

    def require_only(self, engine: str, honoured: Sequence[str]) -> None:
        """Refuses what an engine can't honour.

        Args:
            engine: What the engine is called in the message.
            honoured: Names of the fields that it does honour.

        Raises:
            ConfigError: Another field differs from its default; names it.
        """
        for each in fields(self):
            default: object = each.default if each.default is not MISSING else {}
            if each.name not in honoured and getattr(self, each.name) != default:
                raise ConfigError(
                    f"{engine} can't honour {each.name} = {getattr(self, each.name)!r}; it takes "
                    f"{', '.join(honoured)}. Leave it out or choose another engine."
                )


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral)  # NumPy's too


def _is_number(value: object) -> bool:
    """Whether it is a real number, NaN and infinite ones included, that a float can hold."""
    if not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _is_text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


def _are_texts(value: object) -> bool:
    return isinstance(value, tuple | list) and all(
        isinstance(each, str) for each in cast("Sequence[object]", value)
    )


def _are_integers(value: object) -> bool:
    return isinstance(value, tuple | list) and all(
        map(_is_integer, cast("Sequence[object]", value))
    )


def _are_biases(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        _is_integer(token) and _is_number(bias)
        for token, bias in cast("Mapping[object, object]", value).items()
    )


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
    """Log-probability (nats) of each id under the distribution it was sampled from: after grammar, bias,
    penalties, temperature and the cuts by `top_k`, `top_p` and `min_p`. When greedy, that of temperature
    1 in place of the certainty that it is."""
    versions: IntArray
    """Policy version that made each id."""
    finish_reason: FinishReason
    base_logprobs: FloatArray | None = None
    """Log-probability (nats) of each id under the model itself, at temperature 1 and with nothing else
    applied; None where the engine doesn't tell."""
    top_logprobs: tuple[Mapping[int, float], ...] = ()
    """For each id, as many of the likeliest at its place as were asked for, with `base_logprobs`."""
    matched: int | str | None = None
    """The stop token or stop string that ended it."""
    reused_tokens: int = 0
    """Tokens of the prompt that were found computed."""
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
