"""The forms of tool calls: what each reads, what it tells, and that nothing breaks it."""

from __future__ import annotations

import numpy as np
import pytest

from gymllm import ToolCall
from gymllm.errors import ConfigError
from gymllm_agents import (
    HermesParser,
    ParsedReply,
    PlainParser,
    Said,
    Tool,
    UnreadableCall,
    calculator,
)

PARSER = HermesParser()
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_a_reply_without_calls_is_text():
    reply = PARSER.parse(Said(text=" 42 "))
    assert (reply.text, reply.calls) == ("42", ())


def test_calls_and_text_around_them():
    reply = PARSER.parse(Said(text=f"Let me see. {CALL}\n{CALL.replace('add', 'sub')} Done."))
    assert reply.text == "Let me see. \n Done."
    assert reply.calls == (
        ToolCall(name="add", arguments={"a": 1}),
        ToolCall(name="sub", arguments={"a": 1}),
    )


def test_a_call_that_lacks_only_its_end_is_read():
    assert (
        PARSER.parse(Said(text=CALL.removesuffix("</tool_call>"))).calls
        == PARSER.parse(Said(text=CALL)).calls
    )


def test_arguments_may_be_left_out():
    assert PARSER.parse(Said(text='<tool_call>{"name": "now"}</tool_call>')).calls == (
        ToolCall(name="now", arguments={}),
    )


@pytest.mark.parametrize(
    ("inside", "problem"),
    [
        ("nonsense", "not JSON"),
        ("", "not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"arguments": {}}', 'no "name"'),
        ('{"name": 3}', 'no "name"'),
        ('{"name": "add", "arguments": [1]}', '"arguments" of a tool call must be'),
        ("[" * 100_000, "nested too deep"),
        ('{"a":' * 100_000, "nested too deep"),
        ("9" * 10_000, "not JSON"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is no JSON value"),
        ('{"name": "add", "arguments": {"a": -Infinity}}', "-Infinity is no JSON value"),
        ('{"name": "add", "arguments": {"a": 1e999}}', "1e999 is too large"),
        ('{"name": "add", "arguments": {"a": "\\ud83d"}}', "half of a surrogate pair"),
        ('{"name": "add", "arguments": {"\\ud83d": 1}}', "half of a surrogate pair"),
        ('{"name": "add", "arguments": ' + '{"a":' * 200 + "1" + "}" * 201, "nested too deep"),
        ('{"name": "add"}}', "more follows its end"),
    ],
)
def test_an_unreadable_call_says_why(inside, problem):
    (call,) = PARSER.parse(Said(text=f"<tool_call>{inside}</tool_call>")).calls
    assert isinstance(call, UnreadableCall)
    assert problem in call.problem
    assert len(call.problem) < 300


def test_a_cut_call_says_that_its_end_is_missing():
    (call,) = PARSER.parse(Said(text='<tool_call>{"name": "ad')).calls
    assert isinstance(call, UnreadableCall)
    assert "</tool_call> is missing" in call.problem


def test_calls_keep_the_order_they_were_written_in():
    kinds = [
        type(c) for c in PARSER.parse(Said(text=f"{CALL}<tool_call>?</tool_call>{CALL}")).calls
    ]
    assert kinds == [ToolCall, UnreadableCall, ToolCall]


def test_no_text_breaks_the_parser():
    rng = np.random.default_rng(0)
    pieces = [
        PARSER.OPEN,
        PARSER.CLOSE,
        "{",
        "}",
        '"name"',
        ":",
        '"a"',
        ",",
        '"arguments"',
        "x",
        "é\n",
    ]
    for _ in range(3000):
        text = "".join(rng.choice(pieces, size=rng.integers(0, 15)))
        for call in PARSER.parse(Said(text=text)).calls:
            assert isinstance(call, ToolCall | UnreadableCall)


def test_instructions_name_tools_and_form():
    schema = {"type": "function", "function": {"name": "add"}}
    text = PARSER.instructions([schema])
    assert '{"name": "add"}' in text
    assert PARSER.OPEN in text


PLAIN = PlainParser([calculator().schema])


@pytest.mark.parametrize(
    ("text", "kept", "arguments"),
    [
        ("calculator(12 * 7)", "", ["12 * 7"]),
        (" calculator((3 + 4) * 2) \n", "", ["(3 + 4) * 2"]),
        ("Let me see.\ncalculator(1)\ncalculator(2)\nDone.", "Let me see.\nDone.", ["1", "2"]),
        ("calculator()", "", [""]),
        ("The calculator(1) says 1.", "The calculator(1) says 1.", []),
        ("Calculator(1)\nabs(2)", "Calculator(1)\nabs(2)", []),
        ("calculator", "calculator", []),
        ("", "", []),
    ],
)
def test_plain_calls_are_lines_that_begin_with_a_tools_name(text, kept, arguments):
    calls = tuple(ToolCall(name="calculator", arguments={"expression": a}) for a in arguments)
    assert PLAIN.parse(Said(text=text)) == ParsedReply(text=kept, calls=calls)


def test_a_plain_call_that_is_not_closed_says_so():
    (call,) = PLAIN.parse(Said(text="calculator(12 * 7 = 84")).calls
    assert isinstance(call, UnreadableCall)
    assert "must end with a closing parenthesis" in call.problem


def test_plain_instructions_show_each_call():
    assert PLAIN.instructions([calculator().schema]).endswith(
        "\ncalculator(expression): Works out an arithmetic expression."
    )


@pytest.mark.parametrize("properties", [{}, {"a": {"type": "string"}, "b": {}}, {"a": {}}])
def test_the_plain_form_refuses_tools_with_other_arguments(properties):
    parameters = {"type": "object", "properties": properties}
    tool = Tool(name="look", description="Looks.", parameters=parameters, function=str)
    with pytest.raises(ConfigError, match="one argument, of type string; 'look' has: "):
        PlainParser([tool.schema])
