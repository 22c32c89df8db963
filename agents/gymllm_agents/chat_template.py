"""A model's chat template: messages in, the text the model was trained on out.

Templates come with models from the hub, so they are other people's programs: they run in jinja2's
immutable sandbox, which keeps them away from attributes, files and the interpreter. The
environment is the one the hub's templates are written for (blocks trimmed, `break` and
`continue`, `raise_exception`, `strftime_now`, and a `tojson` that does not escape HTML).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import NoReturn, cast, final

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gymllm.errors import ModelError
from gymllm.message import Message

ToolSchema = Mapping[str, object]
"""A tool as templates list it: "type" is "function"; "function" has name, description, parameters."""


@final
class ChatTemplate:
    """Renders conversations. Immutable and thread-safe."""

    def __init__(self, source: str, *, variables: Mapping[str, str] | None = None) -> None:
        """Compiles the template.

        Args:
            source: Jinja.
            variables: What the template may read besides the conversation, such as "bos_token".

        Raises:
            ModelError: The source is not valid Jinja.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        # jinja2 leaves the values' types open.
        filters = cast(dict[str, object], environment.filters)  # pyright: ignore[reportUnknownMemberType]
        functions = cast(dict[str, object], environment.globals)  # pyright: ignore[reportUnknownMemberType]
        filters["tojson"] = _tojson
        functions.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.source = source
        self._variables = dict(variables or {})
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(
                f"The chat template is not valid Jinja ({error}). Fix chat_template in the model's "
                "folder."
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] = (),
        add_generation_prompt: bool,
    ) -> str:
        """The conversation as text.

        Args:
            messages: Oldest first.
            tools: What the model may call; templates without tool support ignore it
                (`supports_tools` says so).
            add_generation_prompt: Whether the text ends with the opening of the assistant's turn.

        Raises:
            ModelError: The template refuses the conversation.
        """
        try:
            return self._template.render(
                messages=[{"role": m.role, "content": m.content} for m in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            roles = ", ".join(message.role for message in messages[:8])
            raise ModelError(
                f"The chat template refuses messages of the roles [{roles}]: {error}. Some "
                "templates take no system message, or want user and assistant to alternate: change "
                "the prompt."
            ) from error

    def supports_tools(self) -> bool:
        """Whether the template lists tools for the model (a trial render)."""
        probe = "gymllm_probe"
        function: dict[str, object] = {"name": probe, "description": "", "parameters": {}}
        question = Message(role="user", content="?")
        try:
            text = self.render(
                [question],
                tools=[{"type": "function", "function": function}],
                add_generation_prompt=True,
            )
            tool_turn = self.render(
                [
                    question,
                    Message(role="assistant", content="!"),
                    Message(role="tool", content=probe),
                ],
                add_generation_prompt=True,
            )
        except ModelError:
            return False
        return probe in text and probe in tool_turn


def _tojson(value: object, indent: int | None = None) -> str:
    """JSON as the hub's templates expect it: letters as they are, no HTML escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
