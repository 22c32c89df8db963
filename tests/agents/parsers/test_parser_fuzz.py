"""No text breaks a parser, and none takes it more than linear time."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gymllm import ToolCall
from gymllm_agents import PARSERS, ParsedReply, Said, UnreadableCall, calculator, make_parser

SCHEMA = calculator().schema
JSON = '{"name": "calculator", "arguments": {"expression": "1"}}'
THINK = ("<think>", "</think>")
FENCES = ("```json\n", "```tool_call\n", "```tool_code\n", "```")
TAGS = ("<tool_call>", "</tool_call>")
QWEN = ("<function=", "calculator>", "<parameter=expression>\n", "\n</parameter>\n", "</function>")
MARKUP: dict[str, tuple[str, ...]] = {
    "deepseek": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "function",
        *FENCES,
    ),
    "gemma": (
        *FENCES,
        "<start_function_call>",
        "<end_function_call>",
        "<escape>",
        "<|tool_call>",
        "<tool_call|>",
        '<|"|>',
        "<|channel>",
        "<channel|>",
        "call:calculator{",
        "calculator(",
        "expression=",
        "print(",
        "'''",
        '"""',
        "'",
        "#",
        ")",
        "\\x4",
    ),
    "glm": (*TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "expression"),
    "gpt-oss": (
        "<|start|>assistant",
        "<|channel|>analysis",
        "<|channel|>commentary",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
        " to=functions.calculator ",
        " to=",
    ),
    "hermes": TAGS,
    "json": FENCES,
    "kimi": (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
        "functions.calculator:0",
        "◁think▷",
        "◁/think▷",
    ),
    "llama": ("<|python_tag|>", "<function=", "calculator>", "</function>", ".call(", ";"),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]", "calculator"),
    "plain": ("calculator(", ")", "\n"),
    "qwen": (*TAGS, *QWEN),
}
PIECES = (
    *(JSON, "{", "}", "[", "]", '"', '"name"', ":", ",", "\\", "\\ud83d", '"arguments"', "null"),
    *(" ", "\n", "é", "１", "-", "0", "1e999", "NaN", "9" * 5000, "[" * 2000, '{"a":' * 2000),
    *(" " * 3, "\x00", "\ud83d", "\u2028", "true", "calculator"),
)


def test_every_form_is_here():
    assert set(MARKUP) == set(PARSERS)


@st.composite
def replies(draw: st.DrawFn, name: str) -> Said:
    """Markup whole and cut, pieces of JSON and any letters; some of the markup generated as tokens."""
    markup = (*MARKUP[name], *THINK)
    piece = st.one_of(
        st.sampled_from(markup),
        st.sampled_from(markup),
        st.sampled_from(PIECES),
        st.text(max_size=4),
    )
    pieces = draw(st.lists(piece, max_size=24))
    vocabulary = draw(st.sampled_from([frozenset[str](), frozenset(markup)]))
    controls, length = list[int](), 0
    for each in pieces:
        if each in vocabulary and draw(st.booleans()):
            controls.append(length)
        length += len(each)
    return Said(
        text="".join(pieces),
        controls=tuple(controls),
        vocabulary=vocabulary,
        in_thought=draw(st.booleans()),
    )


def check(reply: ParsedReply) -> None:
    assert isinstance(reply.text, str)
    assert isinstance(reply.reasoning, str)
    assert (reply.text, reply.reasoning) == (reply.text.strip(), reply.reasoning.strip())
    for call in reply.calls:
        if isinstance(call, ToolCall):
            assert call.name
            assert all(isinstance(name, str) for name in call.arguments)
            json.dumps(dict(call.arguments), ensure_ascii=False, allow_nan=False).encode()
        else:
            assert isinstance(call, UnreadableCall)
            assert 0 < len(call.problem) < 500


@pytest.mark.parametrize("name", PARSERS)
def test_no_reply_breaks_a_parser(name):
    parser = make_parser(name, [SCHEMA])

    @settings(
        max_examples=250,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(said=replies(name))
    def run(said: Said) -> None:
        check(parser.parse(said))

    run()


@pytest.mark.parametrize("name", PARSERS)
def test_no_part_of_a_reply_breaks_a_parser(name):
    """Each reply that a length limit may cut short."""
    parser = make_parser(name, [SCHEMA])
    text = "".join([*MARKUP[name], *THINK, JSON, *reversed(MARKUP[name]), JSON, *MARKUP[name]])
    for end in range(len(text)):
        check(parser.parse(Said(text=text[:end])))


def repeated(name: str) -> list[str]:
    """Units which, repeated, would take a parser that starts over at each of them quadratic time."""
    markup = [*MARKUP[name], *THINK]
    units = [*markup, *(f"{mark}{rest}" for mark in markup for rest in ('{"a":"', "[", "x=", "\n"))]
    units += [f"{opened}{JSON}" for opened in markup]
    return [
        *units,
        JSON,
        '{"',
        '"',
        "[",
        "{",
        "\\",
        " ",
        "\n",
        "`",
        "<",
        "a(",
        "a=",
        "9",
        f"{JSON};",
    ]


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("opened", [False, True])
def test_long_replies_take_linear_time(name, opened):
    """300 kB of each unit take some seconds in all; were it quadratic, hours."""
    parser = make_parser(name, [SCHEMA])
    first = MARKUP[name][0] if opened else ""
    for unit in repeated(name):
        check(parser.parse(Said(text=first + unit * (30_000 // len(unit)))))
