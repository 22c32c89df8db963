"""Parsers are made by their names, and tell their form to a model that does not know it."""

from __future__ import annotations

import pytest

from gymllm import ToolCall
from gymllm.errors import ConfigError, UnknownNameError
from gymllm_agents import PARSERS, Said, Tool, calculator, make_parser

SCHEMA = calculator().schema


@pytest.mark.parametrize("name", PARSERS)
def test_every_form_tells_of_the_tools(name):
    told = make_parser(name, [SCHEMA]).instructions([SCHEMA])
    assert "calculator" in told
    assert "Works out an arithmetic expression." in told


@pytest.mark.parametrize("name", PARSERS)
def test_a_reply_without_markup_is_text(name):
    reply = make_parser(name, [SCHEMA]).parse(Said(text=" It is 42.\n\nSo.\n"))
    assert (reply.text, reply.reasoning, reply.calls) == ("It is 42.\n\nSo.", "", ())


@pytest.mark.parametrize("name", PARSERS)
def test_an_empty_reply_is_nothing(name):
    for in_thought in (False, True):
        reply = make_parser(name, [SCHEMA]).parse(Said(text="", in_thought=in_thought))
        assert (reply.text, reply.reasoning, reply.calls) == ("", "", ())


def test_plain_calls_follow_a_thought():
    said = Said(text="calculator(1)?\n</think>\ncalculator(2)", in_thought=True)
    reply = make_parser("plain", [SCHEMA]).parse(said)
    assert reply.reasoning == "calculator(1)?"
    assert reply.calls == (ToolCall(name="calculator", arguments={"expression": "2"}),)


def test_an_unknown_form_says_what_is_close():
    with pytest.raises(UnknownNameError, match="Did you mean llama"):
        make_parser("lama")


def test_a_form_may_refuse_tools():
    tool = Tool(name="look", description="Looks.", parameters={"type": "object"}, function=str)
    with pytest.raises(ConfigError, match="plain form"):
        make_parser("plain", [tool.schema])
