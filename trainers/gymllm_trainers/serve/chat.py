"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import anyio.to_thread
from starlette.responses import JSONResponse, Response

from gymllm_agents import ParsedReply
from gymllm_trainers.engine import Delta
from gymllm_trainers.serve.answer import Answer
from gymllm_trainers.serve.chat_form import ChatForm, ChatForms, MarkedText
from gymllm_trainers.serve.chat_messages import read_messages, read_tools, written_calls
from gymllm_trainers.serve.connection import Body, Emit, EventStream
from gymllm_trainers.serve.fields import Unsupported, read_fields
from gymllm_trainers.serve.openai_shapes import chat_logprobs, stop_reason, usage_of
from gymllm_trainers.serve.problems import RefusedError
from gymllm_trainers.serve.requests import (
    HARMLESS,
    OPENAI_UNSUPPORTED,
    OpenAIBody,
    openai_sampling,
)
from gymllm_trainers.serve.service import Service, sequences
from gymllm_trainers.serve.visible_text import overlap

_UNSUPPORTED: Unsupported = {
    **OPENAI_UNSUPPORTED,
    "audio": (None, "this server's models write text"),
    "modalities": (["text"], "this server's models write text"),
    "prediction": (None, ""),
    "verbosity": (None, "say it in the prompt"),
    "web_search_options": (None, "give a tool"),
    "functions": (None, "use tools"),
    "function_call": (None, "use tools and tool_choice"),
    "skip_special_tokens": (True, "return_token_ids gives every token"),
    "parallel_tool_calls": (True, "a reply may hold several calls; take the first"),
    "add_generation_prompt": (True, "the assistant answers"),
    "continue_final_message": (False, "render the prompt yourself and use /v1/completions"),
    "chat_template": (None, "the model's own is used"),
}
_LONGEST_MARK = 24
"""Characters of markup, at most."""
_OPENED = ("<think>", "[THINK]", "◁think▷")
_STEPS = 1024
"""A reply that is streamed is read anew once it has grown by this part of its length, so that long ones
take time that is nearly linear."""


@dataclass(frozen=True, kw_only=True)
class ChatBody(OpenAIBody):
    """What the route takes beside `OpenAIBody`."""

    messages: object = None
    tools: object = None
    tool_choice: object = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    chat_template_kwargs: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """What the chat template reads besides the conversation."""


@final
class Chat:
    """Answers conversations."""

    def __init__(self, service: Service) -> None:
        """Takes the model."""
        self._service = service
        self._forms = ChatForms(service.tokenizer)

    async def __call__(self, given: Body) -> Response:
        """The answer to one request."""
        service = self._service
        body = read_fields(ChatBody, given, harmless=HARMLESS, unsupported=_UNSUPPORTED)
        service.check_model(body.model)
        messages, tools = read_messages(body.messages), read_tools(body.tools)
        if not _offers_tools(body.tool_choice, bool(tools)):
            tools = []
        top = body.top_logprobs
        if top and not body.logprobs:
            raise RefusedError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
        variables = body.chat_template_kwargs

        def render() -> tuple[ChatForm, list[int]]:
            form = self._forms.get(tools, variables)
            return form, form.prompt_ids(messages)

        form, ids = await anyio.to_thread.run_sync(render)
        prompt = service.check_prompt(ids, "messages")
        asked = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
        if body.max_completion_tokens not in (None, asked):
            raise RefusedError(
                400, "max_tokens and max_completion_tokens differ; give one of them."
            )
        sampling = openai_sampling(
            body,
            max_new_tokens=service.room(prompt) if asked is None else asked,
            end_ids=form.stop_token_ids,
            top_logprobs=top,
            vocabulary=service.vocabulary,
        )
        name = f"chatcmpl-{uuid.uuid4().hex}"
        held = sampling.regex or sampling.json_schema or sampling.choices
        choices = [
            _Choice(
                service,
                form,
                body,
                Answer(request=request, prompt_ids=prompt, index=index),
                # What a grammar made is the answer, markup in it or not.
                parses=not held,
                streams_text=not tools,
            )
            for index, request in enumerate(sequences([prompt], sampling, body.n, name))
        ]
        if body.stream:
            return EventStream(lambda emit: self._stream(body, name, choices, emit))

        async def take(sequence: int, delta: Delta | None) -> None:
            choices[sequence].take(delta)

        await service.running.run([choice.answer.request for choice in choices], take)
        return JSONResponse(
            {
                **self._head(name, "chat.completion"),
                "choices": [choice.whole() for choice in choices],
                "usage": usage_of([choice.answer for choice in choices]),
                **({"prompt_token_ids": prompt} if body.return_token_ids else {}),
            }
        )

    async def _stream(self, body: ChatBody, name: str, choices: list[_Choice], emit: Emit) -> None:
        head = self._head(name, "chat.completion.chunk")
        usage = {"usage": None} if body.stream_options.include_usage else {}
        answers = [choice.answer for choice in choices]
        prompt: dict[str, object] = {}
        if body.return_token_ids:
            prompt["prompt_token_ids"] = answers[0].prompt_ids

        async def give(sequence: int, delta: Delta | None) -> None:
            for chunk in choices[sequence].chunks(delta):
                event = {**head, "choices": [chunk], **usage, **prompt}
                prompt.clear()  # once is enough
                await emit(event)

        await self._service.running.run([answer.request for answer in answers], give)
        if usage:
            await emit({**head, "choices": [], "usage": usage_of(answers)})
        await emit("[DONE]")

    def _head(self, name: str, kind: str) -> dict[str, object]:
        return {
            "id": name,
            "object": kind,
            "created": int(time.time()),
            "model": self._service.name,
            "system_fingerprint": f"weights-{self._service.version_name(self._service.engine.version)}",
        }


class _Choice:
    """One answer on its way to the client."""

    def __init__(
        self,
        service: Service,
        form: ChatForm,
        body: ChatBody,
        answer: Answer,
        *,
        parses: bool,
        streams_text: bool,
    ) -> None:
        self.answer = answer
        self._service, self._form, self._body = service, form, body
        self._parses, self._streams_text = parses, streams_text
        self._text = MarkedText(service.tokenizer)
        self._shown = {"reasoning_content": "", "content": ""}
        self._read = 0
        """Characters that were there when the reply was last read."""
        self._told = 0
        """Tokens whose ids and log-probabilities have been sent."""
        self._opened = False

    def take(self, delta: Delta | None) -> None:
        answer, before = self.answer, len(self.answer.token_ids)
        answer.take(delta)
        if self._body.stream:
            self._text.push(answer.shown_ids[before:])
            if answer.finish:
                self._text.end()
        elif answer.finish:
            self._text.set(answer.shown_ids)

    def whole(self) -> dict[str, object]:
        """The choice of an answer that isn't streamed."""
        parsed = self._parsed()
        calls = written_calls(parsed)
        message: dict[str, object] = {
            "role": "assistant",
            "content": (parsed.text or None) if calls else parsed.text,
            "refusal": None,
        }
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if calls:
            message["tool_calls"] = calls
        return {
            "index": self.answer.index,
            "message": message,
            "logprobs": self._logprobs(),
            **self._ending(bool(calls)),
            **({"token_ids": self.answer.token_ids} if self._body.return_token_ids else {}),
        }

    def chunks(self, delta: Delta | None) -> list[dict[str, object]]:
        """What is to be sent after some more tokens."""
        self.take(delta)
        done = self.answer.finish is not None
        deltas: list[dict[str, object]] = []
        if not self._opened:
            self._opened = True
            deltas.append({"role": "assistant", "content": ""})
        calls: list[dict[str, object]] = []
        grown = len(self._text.text) - self._read
        if done or (self._streams_text and grown > self._read // _STEPS):
            self._read += grown
            parsed = self._parsed()
            deltas += self._unseen("reasoning_content", parsed.reasoning, done or bool(parsed.text))
            deltas += self._unseen("content", parsed.text, done)
            if done:
                calls = written_calls(parsed)
        if calls:
            deltas.append(
                {"tool_calls": [{"index": place, **call} for place, call in enumerate(calls)]}
            )
        tells = self._body.logprobs or self._body.return_token_ids
        if not deltas and tells:
            deltas.append({})
        chunks: list[dict[str, object]] = [
            {"index": self.answer.index, "delta": delta, "logprobs": None, "finish_reason": None}
            for delta in deltas
        ]
        if chunks and tells:
            chunks[-1]["logprobs"] = self._logprobs()
            if self._body.return_token_ids:
                chunks[-1]["token_ids"] = self.answer.token_ids[self._told :]
            self._told = len(self.answer.token_ids)
        if done:
            last = {"index": self.answer.index, "delta": {}, "logprobs": None}
            chunks.append({**last, **self._ending(bool(calls))})
        return chunks

    def _unseen(self, name: str, text: str, complete: bool) -> list[dict[str, object]]:
        """A delta with what a text has more than what was sent of it, if it has.

        Args:
            name: Of the field.
            text: All of it so far.
            complete: Whether nothing will be added, so that its end can't come to mean something else.
        """
        sent = self._shown[name]
        text = text if complete else self._certain(text)
        if self.answer.finish is None:
            if text.lstrip().startswith(_OPENED):
                return []  # an empty thought is text, but this one will hardly stay empty
            if not text.startswith(sent):
                return []  # markup where nobody thought of it; the rest is sent at the end
        if len(text) <= len(sent):
            return []
        self._shown[name] = text
        return [{name: text[len(sent) :]}]

    def _certain(self, text: str) -> str:
        """A growing text without what may be the beginning of markup or of a stop string."""
        marks = [text.find(mark, max(len(text) - _LONGEST_MARK, 0)) for mark in "<[◁"]
        ends = [place for place in marks if place >= 0]
        ends += [len(text) - overlap(text, stop) for stop in self._body.stops]
        return text[: min(ends, default=len(text))].rstrip()

    def _parsed(self) -> ParsedReply:
        """What is in the reply so far."""
        text, matched = self._text.text, self.answer.matched
        cut = 0
        if isinstance(matched, str) and matched in self._body.cut and matched in text:
            cut = len(text) - text.index(matched)
        if not self._parses:
            return ParsedReply(text=self._form.tokenizer.without_special(text[: len(text) - cut]))
        stopped_by = ""
        if isinstance(matched, int):
            stopped_by = self._form.tokenizer.decode([matched], skip_special=False)
        return self._form.parse(self._text, cut=cut, stopped_by=stopped_by)

    def _logprobs(self) -> dict[str, object] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(self._service, self.answer, self._told, self._body.top_logprobs)

    def _ending(self, calls: bool) -> dict[str, object]:
        finish = self.answer.finish
        return {
            "finish_reason": "tool_calls" if calls and finish == "stop" else finish,
            "stop_reason": stop_reason(self.answer, self._form.stop_token_ids),
        }


def _offers_tools(choice: object, given: bool) -> bool:
    """Whether the model is told of the tools.

    Raises:
        RefusedError: A call is demanded, or tools are chosen among that are not given.
    """
    if choice in (None, "auto"):
        return given
    if choice == "none":
        return False
    raise RefusedError(
        400,
        f"tool_choice must be auto or none here, got {str(choice)[:100]!r}: no call can be forced. Ask "
        "for it in the prompt, or use response_format with the schema of the arguments.",
        param="tool_choice",
    )
