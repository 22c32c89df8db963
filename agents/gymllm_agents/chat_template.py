"""A model's chat template: messages in, the text the model was trained on out.

Templates come with models from the hub, so they are other people's programs: they run in jinja2's
immutable sandbox, which keeps them away from attributes, files and the interpreter. The
environment and the messages are what the hub's templates are written for: blocks trimmed, `break`
and `continue`, `{% generation %}`, `raise_exception`, `strftime_now`, a `tojson` that does not
escape HTML; messages as dictionaries that lack what a message has not.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import NoReturn, cast, final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gymllm.errors import ModelError
from gymllm.message import Message, ToolCall
from gymllm.tool_calls import ToolSchema as ToolSchema

_PROBE = "gymllm_probe"
_NO_PARAMETERS: Mapping[str, object] = {"type": "object", "properties": {}, "required": []}
_PROBE_ID = "probe0000"  # nine letters and digits: Mistral's templates refuse any other


@final
class ChatTemplate:
    """Renders conversations. Immutable and thread-safe."""

    def __init__(self, source: str, *, variables: Mapping[str, object] | None = None) -> None:
        """Compiles the template and tries out how it takes tool calls and images.

        Args:
            source: Jinja.
            variables: What the template may read besides the conversation, such as "bos_token".

        Raises:
            ModelError: The source is not valid Jinja.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlocks]
        )
        # jinja2 leaves the values' types open.
        filters = cast(dict[str, object], environment.filters)  # pyright: ignore[reportUnknownMemberType]
        functions = cast(dict[str, object], environment.globals)  # pyright: ignore[reportUnknownMemberType]
        filters["tojson"] = _tojson
        functions.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.source = source
        self._variables: dict[str, object] = {"documents": None, **(variables or {})}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(
                f"The chat template is not valid Jinja ({error}). Fix chat_template in the model's "
                "folder."
            ) from error
        self.supports_images = self._takes_images()
        """Whether it puts something of its own where a message has an image."""
        self._arguments_as_text, self._no_content = self._call_form()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] = (),
        add_generation_prompt: bool,
        **variables: object,
    ) -> str:
        """The conversation as text.

        Args:
            messages: Oldest first.
            tools: What the model may call; templates without tool support ignore it
                (`supports_tools` says so).
            add_generation_prompt: Whether the text ends with the opening of the assistant's turn.
            variables: What this template reads besides: `enable_thinking`, `reasoning_effort`,
                `documents`, `date_string`; a function `strftime_now` replaces the clock.

        Raises:
            ModelError: The template refuses the conversation, or shows no images and is given one.
        """
        if not self.supports_images and any(_has_image(message) for message in messages):
            raise ModelError(
                "This model's chat template has no place for images. Use a model that sees, or "
                "observe text."
            )
        return self._render(
            [self._as_hub(message) for message in messages],
            {
                "tools": [dict(tool) for tool in tools] or None,
                "add_generation_prompt": add_generation_prompt,
                **variables,
            },
        )

    def supports_tools(self) -> bool:
        """Whether the template lists tools for the model and shows their results (trial renders)."""
        question = Message(role="user", content="?")
        function: dict[str, object] = {
            "name": _PROBE,
            "description": "",
            "parameters": _NO_PARAMETERS,
        }
        schema: ToolSchema = {"type": "function", "function": function}
        result = Message(role="tool", content="gymllm_result", tool_call_id=_PROBE_ID, name=_PROBE)
        call = ToolCall(name=_PROBE, arguments={}, id=_PROBE_ID)
        # Some show a result only after a call; some have no calls, which are then part of the text.
        callers = [
            Message(role="assistant", tool_calls=(call,)),
            Message(role="assistant", content="!"),
        ]
        return _PROBE in self._try([question], tools=[schema]) and any(
            "gymllm_result" in self._try([question, caller, result]) for caller in callers
        )

    def _try(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> str:
        """A render; empty if the template refuses."""
        try:
            return self.render(messages, tools=tools, add_generation_prompt=True)
        except ModelError:
            return ""

    def _render(
        self, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object]
    ) -> str:
        try:
            return self._template.render({"messages": messages, **self._variables, **variables})
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:
            roles = ", ".join(str(message["role"]) for message in messages[:8])
            raise ModelError(
                f"The chat template refuses messages of the roles [{roles}]: {error}. Some "
                "templates take no system message, or want user and assistant to alternate: change "
                "the prompt."
            ) from error

    def _as_hub(self, message: Message) -> dict[str, object]:
        """A message as templates read it; what it has not is left out, as many test `is defined`."""
        shown: dict[str, object] = {"role": message.role, "content": message.content}
        if _has_image(message):
            shown["content"] = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
                for part in message.parts
            ]
        if message.reasoning:
            # Its name is the former nearly everywhere, and the latter for gpt-oss.
            shown |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
        if message.tool_calls:
            shown["content"] = shown["content"] or self._no_content
            shown["tool_calls"] = [self._call_as_hub(call) for call in message.tool_calls]
        if message.tool_call_id:
            shown["tool_call_id"] = message.tool_call_id
        if message.name:
            shown["name"] = message.name
        return shown

    def _call_as_hub(self, call: ToolCall) -> dict[str, object]:
        arguments = dict(call.arguments)
        function: dict[str, object] = {
            "name": call.name,
            "arguments": _tojson(arguments) if self._arguments_as_text else arguments,
        }
        identity = {"id": call.id} if call.id else {}
        return {**identity, "type": "function", "function": function}

    def _call_form(self) -> tuple[bool, str | None]:
        """Whether the template wants a call's arguments as JSON text, and what as missing content.

        Nearly all take an object, and write it with `tojson`. Some put strings together
        (DeepSeek-V3): an object makes them fail, or print a Python dictionary. Some show calls only
        where the content is none, as OpenAI's server sends it, and others fail on that. The first
        form in which a call comes out is the template's.
        """
        call = ToolCall(name=_PROBE, arguments={"probe": "value"}, id=_PROBE_ID)
        calling = Message(role="assistant", tool_calls=(call,))
        for arguments_as_text in (False, True):
            for no_content in ("", None):
                self._arguments_as_text, self._no_content = arguments_as_text, no_content
                text = self._try([Message(role="user", content="?"), calling])
                # Not as a dictionary's repr, nor as a JSON string that holds JSON.
                garbled = "'probe'" in text or '\\"probe' in text
                if _PROBE in text and "value" in text and not garbled:
                    return arguments_as_text, no_content
        return False, ""

    def _takes_images(self) -> bool:
        """Whether an image changes the text, other than by a dictionary's repr in it."""
        texts = list[str]()
        for parts in ([], [{"type": "image"}]):
            content = [*parts, {"type": "text", "text": _PROBE}]
            try:
                text = self._render([{"role": "user", "content": content}], _PROMPT)
            except ModelError:
                return False
            texts.append(text)
        without, with_image = texts
        return _PROBE in with_image and without != with_image and "'type'" not in with_image


_PROMPT: Mapping[str, object] = {"tools": None, "add_generation_prompt": True}


@final
class _GenerationBlocks(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the model generates; it changes no text."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's content, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _has_image(message: Message) -> bool:
    return any(not isinstance(part, str) for part in message.parts)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as the hub's templates expect it: letters as they are, no HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
