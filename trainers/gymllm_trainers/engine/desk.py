"""From what a caller asks to what the engine works on: checked, with its grammar and stop strings ready."""

from __future__ import annotations

import asyncio
import time
from operator import index

from gymllm.engine import GenerateRequest, SamplingParams
from gymllm.errors import ConfigError, ContextLengthError, EngineError
from gymllm_agents.tokenizer import Tokenizer
from gymllm_trainers.engine.constraints import Grammars
from gymllm_trainers.engine.programs import MAX_BIASES
from gymllm_trainers.engine.requests import Request
from gymllm_trainers.engine.sampling import SeenTokens
from gymllm_trainers.engine.stops import StopStrings
from gymllm_trainers.engine.tickets import Ticket


class Desk:
    """Takes requests in; safe to use from several threads."""

    def __init__(
        self, *, vocabulary: int, context_length: int, tokenizer: Tokenizer | None
    ) -> None:
        """Opens.

        Args:
            vocabulary: Ids that the model has embeddings for.
            context_length: Tokens of prompt and generation together.
            tokenizer: The model's; without it, stop strings and grammars are refused.
        """
        self._vocabulary, self._context_length = vocabulary, context_length
        self._tokenizer = tokenizer
        self._grammars = Grammars(tokenizer, vocabulary) if tokenizer else None

    def ticket(self, request: GenerateRequest, *, streaming: bool) -> Ticket:
        """Checks a request of the running event loop.

        Raises:
            ContextLengthError: The prompt fills the context.
            ConfigError: Something in `request.sampling` can't be honoured.
            EngineError: The prompt is empty or has ids outside the vocabulary.
        """
        where = f" (request {request.request_id})" if request.request_id else ""
        try:
            prompt = [index(i) for i in request.prompt_ids]
        except TypeError as error:
            raise EngineError(
                f"prompt_ids must be integers, one after another, got "
                f"{repr(request.prompt_ids)[:200]}{where}."
            ) from error
        self._check(prompt, where)
        sampling = request.sampling
        self._check_sampling(sampling, where)
        matcher = self._grammars.matcher(sampling) if self._grammars else None
        stops = (
            StopStrings(self._tokenizer, sampling.stop)
            if sampling.stop and self._tokenizer
            else None
        )
        penalties = (
            sampling.repetition_penalty != 1
            or sampling.presence_penalty != 0
            or sampling.frequency_penalty != 0
        )
        most = min(sampling.max_new_tokens, self._context_length - len(prompt))
        filters = sampling.top_k or sampling.top_p < 1 or sampling.min_p or sampling.logit_bias
        full = bool(penalties or filters or matcher or sampling.top_logprobs)
        return Ticket(
            Request(
                ids=prompt,
                prompt_length=len(prompt),
                max_new_tokens=sampling.max_new_tokens,
                # What may come next depends on the last token, which the host must know first.
                lockstep=penalties or matcher is not None,
                bursts=not full,
            ),
            sampling,
            where,
            asyncio.get_running_loop(),
            asyncio.Event(),
            time.perf_counter_ns(),
            stops=stops,
            matcher=matcher,
            streaming=streaming,
            full=full,
            seen=SeenTokens(prompt, most) if penalties else None,
        )

    def _check(self, prompt: list[int], where: str) -> None:
        if len(prompt) >= self._context_length:
            raise ContextLengthError(
                f"a prompt of {len(prompt)} tokens leaves no room in engine.context_length = "
                f"{self._context_length}{where}: shorten it or raise the limit."
            )
        if not prompt:
            raise EngineError(f"the prompt is empty{where}; it needs at least one token.")
        if min(prompt) < 0 or max(prompt) >= self._vocabulary:
            bad = next(i for i in prompt if not 0 <= i < self._vocabulary)
            raise EngineError(
                f"token id {bad} is outside the model's vocabulary of {self._vocabulary}{where}: is "
                f"this the model's own tokenizer?"
            )

    def _check_sampling(self, sampling: SamplingParams, where: str) -> None:
        texts = {
            "stop": sampling.stop,
            "regex": sampling.regex,
            "json_schema": sampling.json_schema,
            "choices": sampling.choices,
        }
        for name, value in texts.items():
            if value and self._tokenizer is None:
                raise ConfigError(
                    f"{name} = {value!r} needs a tokenizer{where}: make the engine with tokenizer=..."
                )
        if len(sampling.logit_bias) > MAX_BIASES:
            raise ConfigError(
                f"logit_bias names {len(sampling.logit_bias)} ids{where}; at most {MAX_BIASES} fit."
            )
        for token in (*sampling.logit_bias, *sampling.stop_token_ids):
            if not 0 <= token < self._vocabulary:
                raise ConfigError(
                    f"token id {token} in logit_bias or stop_token_ids is outside the model's "
                    f"vocabulary of {self._vocabulary}{where}."
                )
