"""The calculator, and what a tool's function can do wrong."""

from __future__ import annotations

import contextlib
import threading

import anyio
import numpy as np
import pytest

from gymllm.errors import ConfigError
from gymllm_agents import Tool, ToolError, calculator
from gymllm_agents.tools import calculate

SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["text"],
}


def tool(function, **settings) -> Tool:
    return Tool(name="echo", description="", parameters=SCHEMA, function=function, **settings)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("47 * 86", "4042"),
        ("-(2 + 3) * 4", "-20"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("7 // 2 + 7 % 4", "6"),
        ("2 ** 10", "1024"),
        ("2 ^ 3", "8"),
        ("3 × 4", "12"),
        ("1.5 + 1.5", "3"),
        ("2 ** -1", "0.5"),
        ("2 ** 500", str(2**500)),
        ("0.1 + 0.2", "0.30000000000000004"),
        (" +5\n", "5"),
    ],
)
def test_arithmetic(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("2 ** 1000 * 2 ** 1000", "too large"),
        ("1e308 * 10", "too large"),
        ("1e999", "too large"),
        ("10.0 ** 400", "too large"),
        ("0 ** -1", "division by zero"),
        ("9" * 201, "longer than 200"),
        ("9" * 199, "too large"),
        ("", "not an arithmetic expression"),
        ("1 +", "not an arithmetic expression"),
        ("a + 1", "not an arithmetic expression"),
        ("__import__('os')", "not an arithmetic expression"),
        ("(1).real", "not an arithmetic expression"),
        ("[1][0]", "not an arithmetic expression"),
        ("True + 1", "not an arithmetic expression"),
        ("1 if 1 else 2", "not an arithmetic expression"),
        ("'a' * 9", "not an arithmetic expression"),
        ("1 << 9", "not an arithmetic expression"),
        ("(-8) ** 0.5", "not an arithmetic expression"),
        ("1\x00", "not an arithmetic expression"),
        ("(" * 150, "not an arithmetic expression"),
    ],
)
def test_what_is_not_arithmetic_is_refused(expression, message):
    with pytest.raises(ToolError, match=message):
        calculate(expression)


def test_the_calculator_answers_or_refuses_anything():
    rng = np.random.default_rng(0)
    letters = list("0123456789+-*/%().^ ex_[]'")
    for _ in range(2000):
        text = "".join(rng.choice(letters, size=rng.integers(1, 12)))
        with contextlib.suppress(ToolError):
            assert calculate(text)


@pytest.mark.asyncio
async def test_the_calculator_tool_answers_in_text():
    run = calculator()
    assert (await run({"expression": "47*86"})).text == "4042"
    failed = await run({"expression": "1/0"})
    assert (failed.text, failed.failed) == ("Error: division by zero.", True)
    assert run.schema == {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Works out an arithmetic expression.",
            "parameters": run.parameters,
        },
    }


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs the argument 'text'"),
        ({"text": "a", "txt": 1}, "no argument 'txt'; it takes: text, count"),
        ({"text": 1}, "'text' of echo must be of type string"),
        ({"text": "a", "count": "1"}, "must be of type integer"),
        ({"text": "a", "count": True}, "must be of type integer"),
    ],
)
async def test_wrong_arguments_are_told(arguments, message):
    result = await tool(lambda arguments: "ran")(arguments)
    assert result.failed
    assert message in result.text


@pytest.mark.asyncio
async def test_sync_and_async_functions_run():
    def sync(arguments):
        return f"{arguments['text']} off the loop: {threading.current_thread() is not main}"

    async def waits(arguments):
        await anyio.lowlevel.checkpoint()
        return arguments["text"]

    class Callable:
        async def __call__(self, arguments):
            await anyio.lowlevel.checkpoint()
            return "object"

    main = threading.current_thread()
    assert (await tool(sync)({"text": "a"})).text == "a off the loop: True"
    assert (await tool(sync, timeout_s=None)({"text": "a"})).text == "a off the loop: False"
    assert (await tool(waits)({"text": "b"})).text == "b"
    assert (await tool(Callable())({"text": "b"})).text == "object"


@pytest.mark.asyncio
async def test_a_tool_that_hangs_is_answered_in_time():
    async def hangs(arguments):
        await anyio.sleep_forever()

    release = threading.Event()
    for function in (hangs, lambda arguments: str(release.wait(5))):
        result = await tool(function, timeout_s=0.01)({"text": ""})
        assert result.failed
        assert result.text == "Error: echo took longer than 0.01 s."
    release.set()


@pytest.mark.asyncio
async def test_what_a_tool_raises_is_told():
    def breaks(arguments):
        raise KeyError("lost")

    def late(arguments):
        raise TimeoutError("its own")

    assert (await tool(breaks)({"text": ""})).text == "Error: KeyError: 'lost'"
    assert (await tool(late, timeout_s=None)({"text": ""})).text == "Error: TimeoutError: its own"


@pytest.mark.asyncio
async def test_a_long_result_is_cut_and_marked():
    result = await tool(lambda arguments: "x" * 50, max_result_chars=10)({"text": ""})
    assert result.text == "x" * 7 + "\n[... 40 characters left out ...]\n" + "x" * 3


def test_bad_settings_are_refused():
    async def waits(arguments):
        await anyio.lowlevel.checkpoint()
        return ""

    with pytest.raises(ConfigError, match="timeout_s of tool 'echo' must be > 0"):
        tool(len, timeout_s=0)
    with pytest.raises(ConfigError, match="async, so it needs a timeout_s"):
        tool(waits, timeout_s=None)
    with pytest.raises(ConfigError, match="max_result_chars"):
        tool(len, max_result_chars=0)
