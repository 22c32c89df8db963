"""Whole conversations render as transformers renders them, with every family's template.

The same conversation is given as `Message`s to `ChatTemplate` and as the hub's dictionaries to
transformers' `apply_chat_template`. Where a template refuses one, both refuse it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
import tokenizers
from families import FAMILIES, family_folder, hub_templates

from gymllm.errors import ModelError
from gymllm.message import Message, ToolCall
from gymllm_agents import ChatTemplate
from gymllm_agents.chat_template import ToolSchema

pytest.importorskip("transformers", reason="pip install transformers, to compare with it")

WEATHER: ToolSchema = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a place, <b>today</b>: 20 °C & more.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": 'A city\'s name, such as "Łódź".'},
                "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["place"],
        },
    },
}
ADD: ToolSchema = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}
TOOLS = [WEATHER, ADD]
LODZ = {"place": "Łódź <center>", "days": [1, 2], "unit": "C"}
NESTED = {"a": 1.5, "b": {"deep": [None, True, '"quoted"\n']}}

Pair = tuple[Message, dict[str, object]]
"""The same message as ours and as the hub's."""


def said(role: str, content: str, reasoning: str = "") -> Pair:
    hub: dict[str, object] = {"role": role, "content": content}
    if reasoning:
        hub["reasoning_content"] = reasoning
    return Message(role=role, content=content, reasoning=reasoning), hub


def called(
    *calls: tuple[str, str, Mapping[str, object]], content: str = "", reasoning: str = ""
) -> Pair:
    ours, hub = said("assistant", content, reasoning)
    listed = [
        {"id": index, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
        for index, name, arguments in calls
    ]
    message = Message(
        role="assistant",
        content=content,
        reasoning=ours.reasoning,
        tool_calls=tuple(ToolCall(id=i, name=n, arguments=a) for i, n, a in calls),
    )
    return message, {**hub, "tool_calls": listed}


def answered(index: str, name: str, content: str) -> Pair:
    message = Message(role="tool", content=content, tool_call_id=index, name=name)
    return message, {"role": "tool", "content": content, "tool_call_id": index, "name": name}


def with_image() -> Pair:
    picture = np.zeros((2, 2, 3), np.uint8)
    message = Message(role="user", content="look:\nwhat?", parts=("look:", picture, "what?"))
    parts = [
        {"type": "text", "text": "look:"},
        {"type": "image"},
        {"type": "text", "text": "what?"},
    ]
    return message, {"role": "user", "content": parts}


CONVERSATIONS: dict[str, list[Pair]] = {
    "a question": [said("user", "Hello!")],
    "a system prompt": [said("system", " Be brief. \n"), said("user", "  Hi\n\n")],
    "turns": [
        said("system", "Be brief."),
        said("user", "1+1?"),
        said("assistant", "2"),
        said("user", "und größer, 漢字 😀 <b>&amp;'\""),
        said("assistant", "  spaced \n"),
        said("user", "and?"),
    ],
    "nothing said": [said("user", ""), said("assistant", ""), said("user", "")],
    "ends with an answer": [said("user", "1+1?"), said("assistant", "2")],
    "thoughts": [
        said("user", "1+1?"),
        said("assistant", "2", reasoning="One and one.\nTwo."),
        said("user", "2+2?"),
        said("assistant", "4", reasoning="Two and two.\n"),
    ],
    "thoughts in the text": [
        said("user", "1+1?"),
        said("assistant", "<think>\nOne and one.\n</think>\n\n2"),
        said("user", "2+2?"),
        said("assistant", "<think>\nTwo and two.\n</think>\n\n4"),
    ],
    "a call": [
        said("user", "Weather?"),
        called(("call00001", "get_weather", LODZ)),
        answered("call00001", "get_weather", '{"sky": "blue", "°C": 20}'),
    ],
    "a call with words": [
        said("system", "Use the tools."),
        said("user", "Weather?"),
        called(("call00001", "get_weather", LODZ), content="Let me look."),
        answered("call00001", "get_weather", "blue\n<tool_call>"),
        said("assistant", "It is blue."),
        said("user", "Thanks."),
    ],
    "a call after a thought": [
        said("user", "Weather?"),
        called(("call00001", "get_weather", LODZ), reasoning="I need the weather."),
        answered("call00001", "get_weather", "blue"),
        said("assistant", "Blue.", reasoning="Blue it is."),
        said("user", "1.5 + b?"),
        called(("call00002", "add", NESTED), reasoning="Sum."),
        answered("call00002", "add", ""),
    ],
    "two calls": [
        said("user", "Weather, and a sum?"),
        called(("call00001", "get_weather", LODZ), ("call00002", "add", NESTED)),
        answered("call00001", "get_weather", "blue"),
        answered("call00002", "add", "3"),
        said("assistant", "Blue, and 3."),
    ],
    "no arguments": [
        said("user", "Time?"),
        called(("call00001", "now", {})),
        answered("call00001", "now", "12:00"),
    ],
    "an image": [with_image(), said("assistant", "A dot."), said("user", "Sure?")],
}
CALLS = [name for name, pairs in CONVERSATIONS.items() if any(m.tool_calls for m, _ in pairs)]

TEXT_ARGUMENTS = frozenset({"deepseek-v3"})
"""Families whose template joins a call's arguments to strings, and wants no content beside them."""
SHOW_CALLS = frozenset(FAMILIES) - {"gemma3", "smollm2"}
SHOW_IMAGES = frozenset({"gemma3", "qwen3.5", "mistral-small-3.2", "kimi-k2"})
VARIABLES: list[dict[str, object]] = [
    {},
    {"enable_thinking": False},
    {"enable_thinking": True, "date_string": "1 May 2025"},
    {"thinking": True, "reasoning_effort": "low", "tools_in_user_message": False},
]


class Reference:
    """transformers, with a family's template and special tokens."""

    def __init__(self, family: str) -> None:
        from transformers import PreTrainedTokenizerFast

        folder = family_folder(family)
        self.source = (folder / "chat_template.jinja").read_text("utf-8")
        config = _json(folder / "tokenizer_config.json")
        names = ("bos_token", "eos_token", "pad_token")
        self.special = {name: config[name] for name in names if config[name]}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        self._tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, **self.special)
        self._text_arguments = family in TEXT_ARGUMENTS

    def __call__(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[ToolSchema],
        **options: object,
    ) -> str:
        chat = [dict(message) for message in messages]
        listed = list(tools) or None
        if not (self._text_arguments and any("tool_calls" in message for message in chat)):
            return self._tokenizer.apply_chat_template(
                chat, chat_template=self.source, tools=listed, tokenize=False, **options
            )
        # apply_chat_template leaves out what is none, and this template asks whether content is.
        from transformers.utils.chat_template_utils import render_jinja_template

        chat = [_with_text_arguments(message) for message in chat]
        render: Any = render_jinja_template
        texts, _ = render(
            [chat], tools=listed, chat_template=self.source, **self.special, **options
        )
        return texts[0]


def _with_text_arguments(message: Mapping[str, Any]) -> dict[str, object]:
    if "tool_calls" not in message:
        return dict(message)
    calls = [
        {
            **c,
            "function": {
                **c["function"],
                "arguments": json.dumps(c["function"]["arguments"], ensure_ascii=False),
            },
        }
        for c in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls, "content": message["content"] or None}


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text("utf-8"))


@cache
def both(family: str) -> tuple[ChatTemplate, Reference]:
    reference = Reference(family)
    variables = {"bos_token": "", "eos_token": "", "pad_token": "", **reference.special}
    return ChatTemplate(reference.source, variables=variables), reference


def rendered(
    family: str,
    pairs: Sequence[Pair],
    tools: Sequence[ToolSchema] = (),
    *,
    prompt: bool = True,
    **variables: object,
) -> tuple[str | None, str | None]:
    """Our text and transformers'; None where it refuses."""
    ours, reference = both(family)
    try:
        text = ours.render(
            [message for message, _ in pairs],
            tools=tools,
            add_generation_prompt=prompt,
            **variables,
        )
    except ModelError:
        text = None
    try:
        expected = reference(
            [hub for _, hub in pairs], tools, add_generation_prompt=prompt, **variables
        )
    except (jinja2.TemplateError, TypeError, ValueError):
        expected = None
    return text, expected


CASES = [
    (family, name)
    for family in FAMILIES
    for name in CONVERSATIONS
    # Otherwise we refuse what the template would drop, or print as Python.
    if name != "an image" or family in SHOW_IMAGES
]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_conversation_renders_as_in_transformers(family: str, name: str):
    for tools in ([], TOOLS):
        for prompt in (False, True):
            for variables in VARIABLES:
                text, expected = rendered(
                    family, CONVERSATIONS[name], tools, prompt=prompt, **variables
                )
                assert text == expected


def refuses(family: str, name: str) -> bool:
    """Which families have no form for a conversation."""
    one_call_a_turn = family in {"llama3.1", "llama3.2"} and name == "two calls"
    alternating = family == "gemma3" and name in CALLS
    return one_call_a_turn or alternating


@pytest.mark.parametrize("family", FAMILIES)
def test_families_refuse_only_what_they_have_no_form_for(family: str):
    for name, pairs in CONVERSATIONS.items():
        if name != "an image":
            text, _ = rendered(family, pairs, TOOLS)
            assert (text is None) == refuses(family, name), name


@pytest.mark.parametrize("family", sorted(SHOW_CALLS))
def test_a_calls_name_arguments_and_result_are_shown(family: str):
    text, _ = rendered(family, CONVERSATIONS["a call"], TOOLS)
    assert text is not None
    for part in ("get_weather", "Łódź <center>", "blue"):
        assert part in text
    assert "'place'" not in text
    assert '\\"place' not in text


@pytest.mark.parametrize("family", FAMILIES)
def test_images_have_a_place_or_are_refused(family: str):
    template, _ = both(family)
    assert template.supports_images == (family in SHOW_IMAGES)
    ours = [message for message, _ in CONVERSATIONS["an image"]]
    if family not in SHOW_IMAGES:
        with pytest.raises(ModelError, match="no place for images"):
            template.render(ours, add_generation_prompt=True)


# --- The templates of many more models ---


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


@cache
def many_templates() -> dict[str, ChatTemplate]:
    sources = hub_templates()
    return {model: ChatTemplate(source, variables=SPECIAL) for model, source in sources.items()}


@pytest.mark.parametrize("name", [name for name in CONVERSATIONS if name != "an image"])
def test_every_template_renders_as_in_transformers(name: str):
    from transformers.utils.chat_template_utils import render_jinja_template

    pairs = CONVERSATIONS[name]
    shown = 0
    for model, template in many_templates().items():
        for tools in ([], TOOLS):
            try:
                text = template.render(
                    [message for message, _ in pairs], tools=tools, add_generation_prompt=True
                )
            except ModelError:
                text = None
            render: Any = render_jinja_template
            expected = None
            # Where it takes a call only in its other form, that is the one to compare with.
            for form in (lambda hub: hub, _with_text_arguments):
                try:
                    texts, _ = render(
                        [[form(hub) for _, hub in pairs]],
                        tools=tools or None,
                        chat_template=template.source,
                        add_generation_prompt=True,
                        **SPECIAL,
                    )
                except (jinja2.TemplateError, TypeError, ValueError, AttributeError):
                    continue
                expected = texts[0]
                if text == expected:
                    break
            assert text == expected, model
            shown += text is not None
    assert shown > 80


# --- transformers' environment, where the families' templates don't reach ---

HELLO = [said("user", "hello é <b>")]


@pytest.mark.parametrize(
    "source",
    [
        "{% generation %}{{ messages[0].content }}{% endgeneration %}!",
        "{%- generation -%}  {{ messages[0].content }}  {%- endgeneration %}\n x",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "{% for m in messages %}{% generation %}{{ loop.index }}\n{% endgeneration %}\n{% endfor %}",
        "{{ messages | tojson }}{{ messages | tojson(ensure_ascii=True) }}",
        "{{ {'b': [1, {}], 'a': 'é'} | tojson(indent=2, sort_keys=True) }}",
        "{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':')) }}{{ {'a': 1} | tojson(False, 4) }}",
        "{{ strftime_now('%Y-%m-%d') }}",
        "{{ documents is none }}{{ tools is none }}{{ tools is defined }}{{ other is defined }}",
        "{{ dict(a=1) }}{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}",
        "  {% if true %}\n  a\n  {% endif %}\n\n",
        "{% for i in [1, 2, 3, 4] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
        "{% for i in [1, 2, 3, 4] %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].missing.more }}",
        "{{ messages[0]['content'][99] }}|{{ messages[0].missing }}",
    ],
)
def test_the_environment_is_transformers(source: str):
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, _ = render_jinja_template([[dict(hub) for _, hub in HELLO]], chat_template=source)
        expected = texts[0]
    except jinja2.TemplateError:
        expected = None
    try:
        text = ChatTemplate(source).render([m for m, _ in HELLO], add_generation_prompt=False)
    except ModelError:
        text = None
    assert text == expected


def test_variables_are_passed_and_win():
    template = ChatTemplate("{{ bos_token }}{{ documents[0].title }}{{ x }}", variables={"x": 1})
    text = template.render([], add_generation_prompt=False, documents=[{"title": "T"}], x=2)
    assert text == "T2"


def test_the_clock_can_be_replaced():
    template = ChatTemplate("{{ strftime_now('%Y') }}")
    text = template.render([], add_generation_prompt=False, strftime_now=lambda form: f"<{form}>")
    assert text == "<%Y>"
