"""What a sequence has come to so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gymllm.engine import FinishReason, GenerateRequest
from gymllm_trainers.engine import Delta

Finish = Literal["stop", "length", "abort"]


@dataclass(kw_only=True)
class Answer:
    """The tokens of one sequence, with what the engine says of each."""

    request: GenerateRequest
    prompt_ids: Sequence[int]
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of what was sampled from."""
    base_logprobs: list[float] = field(default_factory=list)
    """Of the model at temperature 1."""
    top_logprobs: list[Mapping[int, float]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Finish | None = None
    matched: int | str | None = None
    """The stop token or string that ended it."""
    reused_tokens: int = 0

    def take(self, delta: Delta | None) -> None:
        """Adds what came; None: it was aborted."""
        if delta is None:
            self.finish = "abort"
            return
        base = delta.logprobs if delta.base_logprobs is None else delta.base_logprobs
        self.token_ids += [int(i) for i in delta.token_ids]
        self.logprobs += [float(p) for p in delta.logprobs]
        self.base_logprobs += [float(p) for p in base]
        self.versions += [int(v) for v in delta.versions]
        self.top_logprobs += delta.top_logprobs
        self.reused_tokens = max(self.reused_tokens, delta.reused_tokens)
        if delta.finish_reason is not None:
            self.finish = "length" if delta.finish_reason is FinishReason.LENGTH else "stop"
            self.matched = delta.matched

    @property
    def shown_ids(self) -> Sequence[int]:
        """Its ids without the stop token that ended it, which no text shows."""
        stopped = self.finish == "stop" and isinstance(self.matched, int)
        return self.token_ids[:-1] if stopped else self.token_ids

    def spans(self) -> list[tuple[int, int, int]]:
        """Policy versions: (version, first token, token after the last)."""
        spans: list[tuple[int, int, int]] = []
        for place, version in enumerate(self.versions):
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1], place + 1)
            else:
                spans.append((version, place, place + 1))
        return spans
