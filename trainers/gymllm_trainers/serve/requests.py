"""How a client wants to have it sampled, in the engine's terms; and prompts."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from gymllm.engine import SamplingParams
from gymllm_trainers.serve.fields import Unsupported, as_list
from gymllm_trainers.serve.problems import RefusedError

MOST_SEQUENCES = 128
"""`n` of one prompt."""

HARMLESS = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields of OpenAI's that change no answer here."""

OPENAI_UNSUPPORTED: Unsupported = {
    "best_of": (1, "use n, and choose yourself"),
    "min_tokens": (0, "use logit_bias against the stop token"),
    "prompt_logprobs": (None, "only generated tokens have log-probabilities"),
    "allowed_token_ids": (None, "use structured_outputs"),
    "bad_words": (None, "use logit_bias"),
    "priority": (0, "requests are served in their order"),
    "use_beam_search": (False, "use n"),
    "truncate_prompt_tokens": (None, "shorten the prompt"),
    "echo": (False, "the prompt is yours already"),
    "suffix": ("", "write the model's own markers into the prompt"),
}


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Taken, and without effect: there is nobody to hide lengths from."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """`structured_outputs`, as vLLM has it."""

    json: object = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class OpenAIBody:
    """What both of OpenAI's routes take, and vLLM beside it."""

    model: str = ""
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    response_format: Mapping[str, object] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    # vLLM's
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    structured_outputs: StructuredOutputs = StructuredOutputs()

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return as_list(self.stop)

    @property
    def cut(self) -> tuple[str, ...]:
        """Those that are cut off the text."""
        return () if self.include_stop_str_in_output else self.stops


def openai_sampling(
    body: OpenAIBody,
    *,
    max_new_tokens: int,
    end_ids: tuple[int, ...],
    top_logprobs: int,
    vocabulary: int,
) -> SamplingParams:
    """How a request of OpenAI's is sampled.

    Args:
        body: The request.
        max_new_tokens: Of it, or the route's default.
        end_ids: The model's own stop tokens.
        top_logprobs: As asked for.
        vocabulary: Number of ids.

    Raises:
        RefusedError, ConfigError: A value that can't be used.
    """
    check_count(body.n)
    if body.stream_options.include_usage and not body.stream:
        raise RefusedError(400, "stream_options needs stream to be true.", param="stream_options")
    grammar = _grammar(body)
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=body.temperature,
        top_k=0 if body.top_k == -1 else body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=biases(body.logit_bias, vocabulary),
        stop_token_ids=stop_ids(body.stop_token_ids, end_ids, ignore_eos=body.ignore_eos),
        stop=body.stops,
        top_logprobs=top_logprobs,
        seed=seed_or_any(body.seed),
        regex=grammar.regex,
        json_schema=grammar.json_schema,
        choices=grammar.choices,
    )


def check_count(n: int) -> None:
    """Refuses an `n` that can't be."""
    if not 1 <= n <= MOST_SEQUENCES:
        raise RefusedError(400, f"n must be from 1 to {MOST_SEQUENCES}, got {n}.", param="n")


def seed_or_any(seed: int | None) -> int:
    """The seed, or one that nobody had."""
    return secrets.randbits(31) if seed is None else seed


def stop_ids(
    asked: tuple[int, ...], end_ids: tuple[int, ...], *, ignore_eos: bool
) -> tuple[int, ...]:
    """What ends a sequence: what was asked for, and the model's own unless that is ignored."""
    return tuple(dict.fromkeys(asked if ignore_eos else (*asked, *end_ids)))


def biases(given: Mapping[str, float], vocabulary: int) -> dict[int, float]:
    """Biases by id; JSON's keys are texts.

    Raises:
        RefusedError: A key is no id of the model.
    """
    read: dict[int, float] = {}
    for key, bias in given.items():
        # Python reads no number of thousands of digits.
        if not (key.isascii() and key.isdigit() and len(key) < 20 and int(key) < vocabulary):
            raise RefusedError(
                400,
                f"a key of logit_bias must be a token id below {vocabulary}, got {key[:40]!r}.",
                param="logit_bias",
            )
        read[int(key)] = bias
    return read


@dataclass(frozen=True, kw_only=True)
class _Grammar:
    """What the text must be."""

    regex: str | None = None
    json_schema: str | None = None
    choices: tuple[str, ...] = ()


def _grammar(body: OpenAIBody) -> _Grammar:
    wanted = body.structured_outputs
    schema = _response_schema(body.response_format)
    if wanted == StructuredOutputs():
        return _Grammar(json_schema=schema)
    if schema is not None:
        raise RefusedError(400, "only one of response_format and structured_outputs may be given.")
    if wanted.json is not None:
        schema = schema_text(wanted.json, "structured_outputs.json")
    return _Grammar(regex=wanted.regex, json_schema=schema, choices=wanted.choice or ())


def schema_text(schema: object, name: str) -> str:
    """A JSON schema as text, given as an object or as text already."""
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, dict | bool):
        raise RefusedError(
            400, f"{name} must be a JSON schema, got {json.dumps(schema)[:80]}.", param=name
        )
    return json.dumps(schema)


def _response_schema(form: Mapping[str, object] | None) -> str | None:
    kind = "text" if form is None else form.get("type")
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return '{"type": "object"}'
    if kind == "json_schema":
        held = form.get("json_schema")
        schema = (
            cast("Mapping[str, object]", held).get("schema") if isinstance(held, dict) else None
        )
        if schema is None:
            raise RefusedError(
                400,
                'response_format of type json_schema must hold {"json_schema": {"name": ..., "schema": '
                "{...}}}.",
                param="response_format",
            )
        return schema_text(schema, "response_format.json_schema.schema")
    raise RefusedError(
        400,
        f"response_format.type must be text, json_object or json_schema, got {kind!r}.",
        param="response_format",
    )
