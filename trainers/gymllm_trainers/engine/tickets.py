"""A request on its way through the engine: what it asked for, who waits for it, what has been generated."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from gymllm.engine import FinishReason, Generation, SamplingParams
from gymllm.errors import EngineError, GymLLMError
from gymllm_trainers.engine.constraints import Matcher
from gymllm_trainers.engine.requests import Request
from gymllm_trainers.engine.sampling import FullInputs, SeenTokens
from gymllm_trainers.engine.stops import StopStrings

_MOST_TOP_K = 2**31 - 1
_MOST_NUMBER = 1e30  # float32 holds more, but not a logit times that


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What a stream brings: the tokens since the last one. Arrays are those of `Generation`, [n], n >= 1."""

    token_ids: list[int]
    logprobs: list[float]
    base_logprobs: list[float]
    versions: list[int]
    top_logprobs: list[Mapping[int, float]]
    finish_reason: FinishReason | None
    """Set in the last one."""
    matched: int | str | None = None
    """The stop token or string that ended it."""
    reused_tokens: int = 0
    """Tokens of the prompt that were found computed."""
    queued_s: float = 0.0
    """Seconds the request waited before its first step."""


@dataclass(eq=False)
class Ticket:
    """A request, who waits for it, and what has been generated."""

    request: Request
    sampling: SamplingParams
    name: str
    loop: asyncio.AbstractEventLoop
    wake: asyncio.Event
    queued_ns: int
    stops: StopStrings | None
    matcher: Matcher | None
    streaming: bool
    full: bool
    """Needs the full sampler."""
    seen: SeenTokens | None = None
    """For penalties."""
    started_ns: int = 0
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    base_logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    top_logprobs: list[Mapping[int, float]] = field(default_factory=list[Mapping[int, float]])
    finish: FinishReason | None = None
    matched: int | str | None = None
    error: str = ""
    cancelled: bool = False
    news: tuple[int, FinishReason | None] = (0, None)
    """What a stream may tell: how many tokens, and whether the last of them ended it. Set as one, because
    the stream's thread is not the engine's."""
    told: int = 0
    """Tokens that a stream has brought."""

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to come."""
        return self.finish is not None or bool(self.error)

    @property
    def queued_s(self) -> float:
        """Seconds that it waited before its first step."""
        return (self.started_ns - self.queued_ns) / 1e9

    def take(self, token: int, *, context_length: int) -> None:
        """Takes a token, and looks whether it is the last one."""
        sampling = self.sampling
        self.tokens.append(token)
        if self.seen is not None:
            self.seen.add(token)
        stop = self.stops.push(token) if self.stops else None
        finished = False
        if self.matcher is not None:
            try:
                self.matcher.accept(token)
                finished = self.matcher.is_finished
            except GymLLMError as error:
                self.error = f"{error}{self.name}"
        if token in sampling.stop_token_ids:
            self.finish, self.matched = FinishReason.STOP, token
        elif stop is not None:
            self.finish, self.matched = FinishReason.STOP, stop
        elif finished:
            self.finish = FinishReason.STOP
        elif (
            len(self.tokens) >= sampling.max_new_tokens
            or self.request.prompt_length + len(self.tokens) >= context_length
        ):
            self.finish = FinishReason.LENGTH
        self.news = len(self.tokens), self.finish


def fill_inputs(inputs: FullInputs, index: int, ticket: Ticket) -> None:
    """Writes what one request asks of the full sampler."""
    sampling = ticket.sampling
    inputs.plain[index] = False
    inputs.top_k[index] = min(sampling.top_k, _MOST_TOP_K)
    inputs.top_p[index] = sampling.top_p
    inputs.min_p[index] = sampling.min_p
    inputs.repetition_penalty[index] = _in_range(sampling.repetition_penalty)
    inputs.presence_penalty[index] = sampling.presence_penalty
    inputs.frequency_penalty[index] = sampling.frequency_penalty
    if ticket.seen is not None:
        ticket.seen.fill(np.asarray(inputs.seen_ids)[index], np.asarray(inputs.seen_count)[index])
    if sampling.logit_bias:
        count = len(sampling.logit_bias)
        inputs.bias_ids[index, :count] = list(sampling.logit_bias)
        biases = [_in_range(bias) for bias in sampling.logit_bias.values()]
        inputs.bias[index, :count] = biases
    if ticket.matcher is not None:
        ticket.matcher.mask(np.asarray(inputs.allowed)[index])


def _in_range(value: float) -> float:
    """The same where float32 holds it and what it is multiplied by; -inf stays."""
    if value > 0:
        return min(max(value, 1 / _MOST_NUMBER), _MOST_NUMBER)
    return value if value == -math.inf else max(value, -_MOST_NUMBER)


def likeliest(
    top: tuple[np.ndarray, np.ndarray] | None, index: int, count: int
) -> Mapping[int, float]:
    if top is None or not count:
        return {}
    pairs = zip(top[0][index, :count].tolist(), top[1][index, :count].tolist(), strict=True)
    return {token: logprob for token, logprob in pairs if token >= 0}


def no_numbers(ticket: Ticket) -> str:
    return (
        f"no token could be drawn{ticket.name}: the model's logits are NaN or infinite there, or "
        "logit_bias and the grammar together allow no token."
    )


def generation_of(ticket: Ticket) -> Generation:
    if ticket.error:
        raise EngineError(ticket.error)
    assert ticket.finish is not None, "an engine answers only finished requests"
    return Generation(
        token_ids=np.array(ticket.tokens, np.int32),
        logprobs=np.array(ticket.logprobs, np.float32),
        versions=np.array(ticket.versions, np.int32),
        finish_reason=ticket.finish,
        base_logprobs=np.array(ticket.base_logprobs, np.float32),
        top_logprobs=tuple(ticket.top_logprobs) if ticket.sampling.top_logprobs else (),
        matched=ticket.matched,
        reused_tokens=ticket.request.reused,
        queued_s=ticket.queued_s,
    )


def delta_of(ticket: Ticket, have: int, finish: FinishReason | None) -> Delta:
    new = slice(ticket.told, have)
    ticket.told = have
    return Delta(
        token_ids=ticket.tokens[new],
        logprobs=ticket.logprobs[new],
        base_logprobs=ticket.base_logprobs[new],
        versions=ticket.versions[new],
        top_logprobs=ticket.top_logprobs[new],
        finish_reason=finish,
        matched=ticket.matched if finish else None,
        reused_tokens=ticket.request.reused,
        queued_s=ticket.queued_s,
    )


def tell(tickets: list[Ticket]) -> None:
    """Wakes whoever waits for these, with one call an event loop."""
    loops: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
    for ticket in tickets:
        loops.setdefault(ticket.loop, []).append(ticket.wake)
    for loop, events in loops.items():
        try:
            loop.call_soon_threadsafe(_set, events)
        except RuntimeError:
            # The loop is closed: nobody waits any more.
            continue


def _set(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
