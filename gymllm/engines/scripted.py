"""An engine whose model is a Python function: for tests, baselines and warm-start play."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, final

import anyio.lowlevel
import numpy as np

from gymllm.engine import FinishReason, GenerateRequest, Generation
from gymllm.errors import ContextLengthError, EngineError

Reply = Callable[[str, np.random.Generator], str]
"""A scripted model: the prompt's text (control tokens included) and a generator seeded from
the request; returns the answer without the stop token."""


# A function leaves no choice, so what only shapes chances is honoured as it is.
_HONOURED = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop_token_ids", "seed")


class TextCodec(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a turn; the first is used where a request names none."""
        ...

    def encode(self, text: str, *, allow_special: bool) -> list[int]:
        """Ids of a text; control tokens in it become ids if `allow_special`."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Text of ids; special tokens left out if `skip_special`."""
        ...


@final
class ScriptedEngine:
    """Answers with what a function says.

    Every token has log-probability 0, as the function leaves no choice; the temperature is
    therefore without effect by definition. Randomness comes from the generator the function is
    given, so the same seed and prompt give the same tokens.
    """

    def __init__(
        self, reply: Reply, codec: TextCodec, *, context_length: int = 4096, version: int = 0
    ) -> None:
        """Builds the engine.

        Args:
            reply: The model. Control tokens in what it returns are control tokens; generation ends
                after the first that is a stop token, and one is added if there is none.
            codec: Its tokenizer.
            context_length: Most tokens of prompt and generation together.
            version: Policy version of its tokens; may be set at any time.
        """
        self._reply, self._codec = reply, codec
        self._context_length = context_length
        self._version = version
        self._closed = False

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and generation together."""
        return self._context_length

    @property
    def version(self) -> int:
        """Policy version that the next token is made with."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = version

    async def generate(self, request: GenerateRequest) -> Generation:
        """Asks the function.

        Raises:
            ConfigError: The request asks for something that a function can't honour, such as a grammar.
            ContextLengthError: The prompt fills the context.
            EngineError: The function raised, or the engine was closed.
        """
        await anyio.lowlevel.checkpoint()
        if self._closed:
            raise EngineError("The scripted engine was closed; make a new one.")
        room = self._context_length - len(request.prompt_ids)
        if room < 1:
            raise ContextLengthError(
                f"The prompt has {len(request.prompt_ids)} tokens, which fills the engine's context "
                f"of {self._context_length}. Shorten the prompt or raise context_length."
            )
        sampling = request.sampling
        sampling.require_only("the scripted engine", _HONOURED)
        ids = [int(i) for i in request.prompt_ids]
        prompt = self._codec.decode(ids, skip_special=False)
        try:
            text = self._reply(prompt, np.random.default_rng(sampling.seed))
        except Exception as error:
            raise EngineError(
                f"The scripted model raised {type(error).__name__}: {error}"
            ) from error
        stops = sampling.stop_token_ids or self._codec.stop_token_ids[:1]
        ids = self._codec.encode(text, allow_special=True)
        end = next((k for k, i in enumerate(ids) if i in stops), None)
        ids = [*ids, stops[0]] if end is None else ids[: end + 1]
        limit = min(sampling.max_new_tokens, room)
        reason = FinishReason.STOP if len(ids) <= limit else FinishReason.LENGTH
        ids = ids[:limit]
        return Generation(
            token_ids=np.array(ids, np.int32),
            logprobs=np.zeros(len(ids), np.float32),
            versions=np.full(len(ids), self._version, np.int32),
            finish_reason=reason,
        )

    async def aclose(self) -> None:
        """Refuses requests from now on. Idempotent."""
        self._closed = True
        await anyio.lowlevel.checkpoint()
