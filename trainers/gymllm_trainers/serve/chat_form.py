"""How the served model talks: messages to ids, replies to what is in them, by its chat template."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

from gymllm.message import Message
from gymllm.tool_calls import ToolSchema, write_calls
from gymllm_agents import (
    ChatFormat,
    HermesParser,
    ParsedReply,
    Said,
    Tokenizer,
    ToolCallParser,
    UnreadableCall,
)
from gymllm_agents.parser_choice import choose_parser
from gymllm_agents.template_trials import Variable
from gymllm_trainers.engine.stops import TextStream

_MOST_FORMS = 32


@final
class ChatForm:
    """For one list of tools. Thread-safe.

    Where the template has no place for tools, they and the form of a call are told in the system prompt,
    and results come as user messages.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[ToolSchema],
        variables: Mapping[str, Variable],
    ) -> None:
        """Tries the template out, some milliseconds long.

        Raises:
            ModelError: The model has no chat template, or one that can't be used.
        """
        self.tokenizer = tokenizer
        lists = bool(tools) and tokenizer.template.supports_tools()
        listed = tools if lists else ()
        self._format = ChatFormat(tokenizer, tools=listed, variables=variables, report=False)
        self._parser: ToolCallParser
        self._told = ""
        if tools and not lists:
            self._parser = HermesParser()
            self._told = self._parser.instructions(tools)
        else:
            self._parser = choose_parser(self._format, tools)
        self.stop_token_ids = self._format.stop_token_ids
        """What ends a reply."""

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation, up to where the assistant's next turn starts.

        Control tokens in the messages are spelt out, so that nobody's text ends a turn.

        Raises:
            ModelError: The template refuses the conversation.
        """
        if self._told:
            messages = _told_in_text(messages, self._told)
        return self._format.whole_ids(messages)

    def parse(self, said: MarkedText, *, cut: int = 0, stopped_by: str = "") -> ParsedReply:
        """What is in a reply, its last `cut` characters left out.

        Of a call that can't be read, all is text.
        """
        text = said.text[: len(said.text) - cut]
        parsed = self._parser.parse(
            Said(
                text=text,
                controls=tuple(place for place in said.controls if place < len(text)),
                vocabulary=self.tokenizer.control_tokens,
                in_thought=self._format.opens_thought,
                stopped_by=stopped_by,
            )
        )
        plain = self.tokenizer.without_special
        if any(isinstance(call, UnreadableCall) for call in parsed.calls):
            return ParsedReply(text=plain(text).strip())
        return replace(
            parsed, text=plain(parsed.text).strip(), reasoning=plain(parsed.reasoning).strip()
        )


@final
class ChatForms:
    """The forms in use lately."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Makes each when it is first asked for."""
        self._tokenizer = tokenizer
        self._forms: OrderedDict[str, ChatForm] = OrderedDict()

    def get(self, tools: Sequence[ToolSchema], variables: Mapping[str, Variable]) -> ChatForm:
        """The form for these tools and variables of the template; as `ChatForm` raises."""
        key = json.dumps([list(tools), dict(variables)])
        form = self._forms.pop(key, None) or ChatForm(self._tokenizer, tools, variables)
        self._forms[key] = form
        while len(self._forms) > _MOST_FORMS:
            self._forms.popitem(last=False)
        return form


@final
class MarkedText:
    """As `Tokenizer.decode_marked`, of ids that come bit by bit."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.text = ""
        """With every control token."""
        self.controls: list[int] = []
        """Where in it each of those starts."""
        self._tokenizer = tokenizer
        self._characters = TextStream(tokenizer)

    def set(self, ids: Sequence[int]) -> None:
        """Takes all ids at once."""
        self.text, controls = self._tokenizer.decode_marked(ids)
        self.controls = list(controls)

    def push(self, ids: Sequence[int]) -> None:
        """Adds ids."""
        for token in ids:
            if not self._tokenizer.is_control(token):
                self.text += self._characters.push(token)
                continue
            self.end()
            self.controls.append(len(self.text))
            self.text += self._tokenizer.decode([token], skip_special=False)

    def end(self) -> None:
        """Adds what was held back as part of a character."""
        self.text += self._characters.finish()
        self._characters = TextStream(self._tokenizer)


def _told_in_text(messages: Sequence[Message], told: str) -> list[Message]:
    """The conversation for a template that knows nothing of tools."""
    shown: list[Message] = []
    after_result = False
    for message in messages:
        if message.role == "tool":
            if after_result:
                shown[-1] = replace(shown[-1], content=f"{shown[-1].content}\n{message.content}")
            else:
                shown.append(Message(role="user", content=message.content))
        elif message.tool_calls:
            text = "\n".join(filter(None, (message.content, write_calls(message.tool_calls))))
            shown.append(Message(role="assistant", content=text, raw=text))
        else:
            shown.append(message)
        after_result = message.role == "tool"
    if shown and shown[0].role == "system":
        return [replace(shown[0], content=f"{shown[0].content}\n\n{told}"), *shown[1:]]
    return [Message(role="system", content=told), *shown]
