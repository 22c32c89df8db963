"""No text breaks a parser, and none takes it more than linear time."""

from __future__ import annotations

import json
import re
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gymllm import ToolCall
from gymllm_agents import (
    PARSERS,
    ParsedReply,
    Said,
    ToolCallParser,
    UnreadableCall,
    calculator,
    make_parser,
)

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
        '<｜DSML｜invoke name="',
        '<｜DSML｜parameter name="',
        "</｜DSML｜parameter>",
        "</｜DSML｜invoke>",
        "<｜DSML｜function_calls>",
        "｜DSML｜",
        'calculator">',
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
ARGUMENTS = '{"expression": "1"}'
CALLS: dict[str, tuple[str, ...]] = {
    "deepseek": (
        f"<｜tool▁call▁begin｜>calculator<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>",
        '<｜DSML｜invoke name="calculator"><｜DSML｜parameter name="expression" string="false">1'
        "</｜DSML｜parameter></｜DSML｜invoke>",
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>",
    ),
    "gemma": (
        "```tool_code\ncalculator(expression='1')\n```",
        f"```json\n{JSON}\n```",
        "<start_function_call>call:calculator{expression:<escape>1<escape>}<end_function_call>",
        '<|tool_call>call:calculator{expression:<|"|>1<|"|>}<tool_call|>',
    ),
    "glm": (
        "<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    ),
    "gpt-oss": (
        f"<|channel|>commentary to=functions.calculator json<|message|>{ARGUMENTS}<|call|>",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>1",
    ),
    "hermes": (f"<tool_call>\n{JSON}\n</tool_call>",),
    "json": (JSON, f"```json\n[{JSON}]\n```"),
    "kimi": (
        f"<|tool_call_begin|>functions.calculator:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>",
    ),
    "llama": (
        JSON,
        f"<|python_tag|>{JSON}",
        f"<function=calculator>{ARGUMENTS}</function>",
        "<|python_tag|>calculator.call(expression='1')",
    ),
    "mistral": (
        f"[TOOL_CALLS][{JSON}]",
        f"[TOOL_CALLS]calculator[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}",
    ),
    "plain": ("\ncalculator(1)\n",),
    "qwen": (
        f"<tool_call>\n{JSON}\n</tool_call>",
        "<tool_call><function=calculator><parameter=expression>1</parameter></function></tool_call>",
    ),
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
    """Calls, whole and cut, markup, pieces of JSON and any letters; some of the markup is tokens."""
    markup = (*MARKUP[name], *THINK)
    small = st.one_of(st.sampled_from(markup), st.sampled_from(PIECES), st.text(max_size=4))
    pieces = draw(st.lists(small, max_size=12))
    for _ in range(draw(st.integers(0, 3))):
        whole = draw(st.sampled_from(CALLS[name]))
        if draw(st.booleans()):  # something else in it, or instead of some of it
            start, end = sorted(draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
            whole = whole[:start] + draw(small) + whole[draw(st.sampled_from([start, end])) :]
        pieces.insert(draw(st.integers(0, len(pieces))), whole)
    text = "".join(pieces)
    vocabulary = draw(st.sampled_from([frozenset[str](), frozenset(markup)]))
    spelt = draw(st.sampled_from([0, 0, 1, 2]))  # of five marks, so many are no tokens
    found = [mark.start() for mark in re.finditer("|".join(map(re.escape, markup)), text)]
    controls = tuple(start for index, start in enumerate(found) if index * 2 % 5 >= spelt)
    return Said(
        text=text,
        controls=controls if vocabulary else (),
        vocabulary=vocabulary,
        in_thought=draw(st.sampled_from([False, False, True])),
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
        max_examples=100,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
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
def test_twice_the_text_takes_twice_the_steps(name):
    parser = make_parser(name, [SCHEMA])
    for first in ("", MARKUP[name][0]):
        for unit in repeated(name):
            times = 1_000 // len(unit)
            once = steps(parser, Said(text=first + unit * times))
            twice = steps(parser, Said(text=first + unit * times * 2))
            assert twice < 2.5 * once + 500, (first, unit)


@pytest.mark.parametrize("name", PARSERS)
def test_no_call_is_looked_for_in_all_of_the_rest(name):
    """Steps do not tell how far each goes: these texts, of calls cut short, would then take minutes."""
    parser = make_parser(name, [SCHEMA])
    for whole in CALLS[name]:
        unit = whole[: whole.index("1")]
        times = 1_000_000 // len(unit)
        parsed = parser.parse(Said(text=unit * times))
        assert len(parsed.calls) <= times + 1


def steps(parser: ToolCallParser, said: Said) -> int:
    """How many lines of Python a parser runs."""
    count = 0

    def trace(*event: object):  # returns itself, which annotations can't say
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        parser.parse(said)
    finally:
        sys.settrace(before)
    return count
