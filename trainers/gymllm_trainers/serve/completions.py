"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import cast, final

from starlette.responses import JSONResponse, Response

from gymllm_trainers.engine import Delta
from gymllm_trainers.serve.answer import Answer
from gymllm_trainers.serve.connection import Body, Emit, EventStream
from gymllm_trainers.serve.fields import read_fields
from gymllm_trainers.serve.openai_shapes import completion_logprobs, stop_reason, usage_of
from gymllm_trainers.serve.problems import RefusedError
from gymllm_trainers.serve.requests import (
    HARMLESS,
    OPENAI_UNSUPPORTED,
    OpenAIBody,
    openai_sampling,
)
from gymllm_trainers.serve.service import Service, sequences
from gymllm_trainers.serve.visible_text import VisibleText, whole_text

_DEFAULT_TOKENS = 16
"""`max_tokens`, as OpenAI has it."""


@dataclass(frozen=True, kw_only=True)
class CompletionBody(OpenAIBody):
    """What the route takes beside `OpenAIBody`."""

    prompt: object = None
    logprobs: int | None = None
    add_special_tokens: bool = True
    """Whether the tokenizer's own marks go before a prompt that is text."""


@final
class Completions:
    """Goes on with prompts."""

    def __init__(self, service: Service) -> None:
        """Takes the model."""
        self._service = service

    async def __call__(self, given: Body) -> Response:
        """The answer to one request."""
        service = self._service
        body = read_fields(CompletionBody, given, harmless=HARMLESS, unsupported=OPENAI_UNSUPPORTED)
        service.check_model(body.model)
        prompts = await self._prompts(body)
        sampling = openai_sampling(
            body,
            max_new_tokens=_DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens,
            end_ids=service.tokenizer.stop_token_ids,
            top_logprobs=body.logprobs or 0,
            vocabulary=service.vocabulary,
        )
        name = f"cmpl-{uuid.uuid4().hex}"
        choices = [
            _Choice(service, body, Answer(request=request, prompt_ids=prompt, index=index))
            for index, (request, prompt) in enumerate(
                zip(
                    sequences(prompts, sampling, body.n, name),
                    [prompt for prompt in prompts for _ in range(body.n)],
                    strict=True,
                )
            )
        ]
        if body.stream:
            return EventStream(lambda emit: self._stream(body, name, choices, emit))

        async def take(sequence: int, delta: Delta | None) -> None:
            choices[sequence].take(delta)

        await service.running.run([choice.answer.request for choice in choices], take)
        return JSONResponse(
            {
                **self._head(name),
                "choices": [choice.told() for choice in choices],
                "usage": usage_of([choice.answer for choice in choices]),
            }
        )

    async def _stream(
        self, body: CompletionBody, name: str, choices: list[_Choice], emit: Emit
    ) -> None:
        head = self._head(name)
        usage = {"usage": None} if body.stream_options.include_usage else {}
        answers = [choice.answer for choice in choices]

        async def give(sequence: int, delta: Delta | None) -> None:
            choice = choices[sequence]
            choice.take(delta)
            if choice.has_news:
                await emit({**head, "choices": [choice.told()], **usage})

        await self._service.running.run([answer.request for answer in answers], give)
        if usage:
            await emit({**head, "choices": [], "usage": usage_of(answers)})
        await emit("[DONE]")

    async def _prompts(self, body: CompletionBody) -> list[list[int]]:
        """The prompts: one text, several, one list of ids, several."""
        given = body.prompt
        if isinstance(given, str):
            given = [given]
        if not isinstance(given, list) or not given:
            raise RefusedError(
                400,
                "prompt must be a text, a list of texts, a list of token ids, or a list of those.",
                param="prompt",
            )
        held = cast("list[object]", given)
        if type(held[0]) is int:
            return [self._service.check_prompt(held, "prompt")]
        most = self._service.running.most
        if len(held) * body.n > most:
            raise RefusedError(400, f"at most {most} sequences may be asked for at once.")
        prompts: list[list[int]] = []
        for place, prompt in enumerate(held):
            ids: object = prompt
            if isinstance(prompt, str):
                ids = await self._service.encode(prompt, add_special=body.add_special_tokens)
            where = f"prompt[{place}]" if len(held) > 1 else "prompt"
            prompts.append(self._service.check_prompt(ids, where))
        return prompts

    def _head(self, name: str) -> dict[str, object]:
        service = self._service
        return {
            "id": name,
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.name,
            "system_fingerprint": f"weights-{service.version_name(service.engine.version)}",
        }


class _Choice:
    """One completion on its way to the client."""

    def __init__(self, service: Service, body: CompletionBody, answer: Answer) -> None:
        self.answer = answer
        self._service, self._body = service, body
        self._text = VisibleText(
            service.tokenizer, stops=body.cut, skip_special=body.skip_special_tokens
        )
        self._new = ""
        """Text that has not been sent."""
        self._offset = 0
        """Characters of tokens that have been told."""
        self._told = 0
        """Tokens that have been."""
        self._first = True

    def take(self, delta: Delta | None) -> None:
        answer, before = self.answer, len(self.answer.token_ids)
        answer.take(delta)
        if self._body.stream:
            self._new += self._text.push(answer.shown_ids[before:])
            if answer.finish:
                self._new += self._text.end(answer.matched)
        elif answer.finish:
            self._new = whole_text(
                self._service.tokenizer,
                answer.shown_ids,
                matched=answer.matched,
                stops=self._body.cut,
                skip_special=self._body.skip_special_tokens,
            )

    @property
    def has_news(self) -> bool:
        """Whether there is anything to send."""
        tells = self._body.return_token_ids or self._body.logprobs is not None
        new_tokens = len(self.answer.token_ids) > self._told
        return bool(self._new or self.answer.finish or (tells and new_tokens))

    def told(self) -> dict[str, object]:
        """What is new, as a choice; all of it where nothing was told before."""
        answer, body = self.answer, self._body
        logprobs = None
        if body.logprobs is not None:
            logprobs = completion_logprobs(
                self._service, answer, self._told, body.logprobs, self._offset
            )
            self._offset += sum(map(len, cast("list[str]", logprobs["tokens"])))
        ids: dict[str, object] = {}
        if body.return_token_ids:
            ids["token_ids"] = answer.token_ids[self._told :]
            if self._first:
                ids["prompt_token_ids"] = answer.prompt_ids
        choice = {
            "index": answer.index,
            "text": self._new,
            "logprobs": logprobs,
            "finish_reason": answer.finish,
            "stop_reason": stop_reason(answer, self._service.tokenizer.stop_token_ids),
            **ids,
        }
        self._first, self._new, self._told = False, "", len(answer.token_ids)
        return choice
