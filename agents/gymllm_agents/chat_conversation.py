"""A conversation with a server that takes messages and gives messages: no tokens, so nothing to train on."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import final

from gymllm.agent import EpisodeContext
from gymllm.chat_engine import ChatEngine, ChatReply, ChatRequest
from gymllm.engine import SamplingParams
from gymllm.errors import ContextLengthError, LedgerError
from gymllm.ledger import Segment
from gymllm.message import Message, ToolCall
from gymllm.task import derive_seed
from gymllm_agents.chat_template import ToolSchema
from gymllm_agents.conversation import CONTEXT_LENGTH, ConversationConfig, Reply
from gymllm_agents.parsers import Said, ThoughtParser, UnreadableCall


@final
class ChatConversation:
    """One conversation's messages. Single owner."""

    lists_tools = True

    def __init__(
        self,
        engine: ChatEngine,
        config: ConversationConfig,
        context: EpisodeContext,
        *,
        tools: Sequence[ToolSchema] = (),
    ) -> None:
        """Starts one.

        Args:
            engine: Answers.
            config: What it is told and how it is sampled; what is about templates and tokens is the
                server's business.
            context: The episode.
            tools: What the model can call.
        """
        self._engine, self._config, self._context, self._tools = engine, config, context, tools
        self._messages = list(config.opening)
        self._replies = self._calls = 0
        self._over = ""

    async def reply(self, *new: Message) -> Reply:
        """Says `new` and returns the model's answer.

        Raises:
            EngineError: The server broke.
            LedgerError: An earlier reply was not finished or met a limit.
        """
        if self._over:
            raise LedgerError(f"this conversation is over, as {self._over}; start a new one.")
        self._messages.extend(new)
        request = ChatRequest(
            messages=self._messages,
            sampling=SamplingParams(
                max_new_tokens=self._config.max_new_tokens,
                temperature=self._config.temperature,
                seed=derive_seed("turn", self._context.seed, self._replies),
            ),
            tools=self._tools,
            request_id=f"{self._context.name}/{self._replies}",
        )
        self._over = "its last request was not answered"
        started = time.perf_counter_ns()
        try:
            with self._context.timeline.span(self._context.name, "generate"):
                answer = await self._engine.chat(request)
        except ContextLengthError:
            self._over = "it reached the model's context length"
            return Reply(text="", limit=CONTEXT_LENGTH)
        self._over = ""
        self._replies += 1
        return self._read(answer, (time.perf_counter_ns() - started) / 1e9)

    def segments(self) -> tuple[Segment, ...]:
        """None: nobody knows the tokens."""
        return ()

    def messages(self) -> tuple[Message, ...]:
        """Everything said so far, opening included."""
        return tuple(self._messages)

    def _with_ids(self, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        """Calls with ids, as the protocol wants them, where a server gave none."""
        self._calls += len(calls)
        first = self._calls - len(calls)
        return tuple(
            call if call.id else replace(call, id=f"call{first + k:05d}")
            for k, call in enumerate(calls)
        )

    def _read(self, answer: ChatReply, engine_s: float) -> Reply:
        message = replace(answer.message, tool_calls=self._with_ids(answer.message.tool_calls))
        text, reasoning = message.content, message.reasoning
        if not reasoning:  # a server that does not split it off
            parsed = ThoughtParser().parse(Said(text=text))
            text, reasoning = parsed.text, parsed.reasoning
        unreadable = tuple(
            UnreadableCall(name=name, problem=f"The arguments of {name} are no JSON object.")
            for name, _ in answer.unreadable
        )
        raw, calls = message.content, message.tool_calls
        if unreadable:
            # Shown as text, for the protocol has no calls without readable arguments.
            made = [{"name": c.name, "arguments": dict(c.arguments)} for c in calls]
            made += [{"name": name, "arguments": given} for name, given in answer.unreadable]
            raw = "\n".join(filter(None, [raw, json.dumps(made, ensure_ascii=False)]))
            message = Message(role="assistant", content=raw, raw=raw)
        self._messages.append(message)
        return Reply(
            text=text,
            reasoning=reasoning,
            calls=(*calls, *unreadable),
            raw=raw,
            prompt_tokens=answer.prompt_tokens,
            generated_tokens=answer.generated_tokens,
            engine_s=engine_s,
        )
