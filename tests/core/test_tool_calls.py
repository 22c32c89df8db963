"""Calls as actions: written, read back, refused with a reason, checked by schema."""

from __future__ import annotations

import json
import random

import gymnasium
import pytest

import gymllm
from gymllm.errors import ClosedError
from gymllm.message import ToolCall
from gymllm.tool_calls import MOST_CALLS, check_call, read_calls, tools_problem, write_calls
from gymllm.wrappers import TimeLimit

LOOK = ToolCall(name="look", arguments={"at": "the door"})
SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "description": "Edits.",
            "parameters": {
                "type": "object",
                "properties": {
                    "command": {"type": "string", "enum": ["view", "create"]},
                    "path": {"type": "string"},
                    "view_range": {"type": "array", "items": {"type": "integer"}},
                    "depth": {"type": ["integer", "null"]},
                },
                "required": ["command", "path"],
            },
        },
    },
    {"type": "function", "function": {"name": "submit", "description": "Ends."}},
]


def test_what_is_written_is_read_back() -> None:
    inner = write_calls([LOOK])
    calls = (
        LOOK,
        ToolCall(name="none", arguments={}),
        ToolCall(
            name="edit", arguments={"text": f'a "b"\n\té {inner}\n</tool_call>```', "n": [1, None]}
        ),
    )
    read = read_calls(write_calls(calls))
    assert (read.calls, read.text, read.errors) == (calls, "", ())


def test_the_form_is_json_between_tags_on_lines_of_their_own() -> None:
    assert write_calls([LOOK]) == (
        '<tool_call>\n{"name": "look", "arguments": {"at": "the door"}}\n</tool_call>'
    )


JSON = '{"name": "look", "arguments": {"at": "the door"}}'


@pytest.mark.parametrize(
    ("text", "outside"),
    [
        (f"<tool_call>{JSON}</tool_call>", ""),
        (f"I look.\n<tool_call>{JSON}</tool_call>\nNow?", "I look.\nNow?"),
        (f"<tool_call>\n```json\n{JSON}\n```\n</tool_call>", ""),
        (f"First:\n```\n<tool_call>\n{JSON}\n</tool_call>\n```\nDone.", "First:\nDone."),
        (f"<tool_call>{JSON}", ""),
        (f"Look: <tool_call>\n{JSON}\n", "Look:"),
        (
            '<tool_call>{"name": " look", "parameters": {"at": "the door"}, "id": "1"}</tool_call>',
            "",
        ),
    ],
)
def test_one_call_is_read(text: str, outside: str) -> None:
    read = read_calls(text)
    assert (read.calls, read.text, read.errors) == ((LOOK,), outside, ())


def test_several_calls_in_one_fence_and_without_end_tags() -> None:
    text = f"```xml\n<tool_call>{JSON}</tool_call>\n<tool_call>{JSON}<tool_call>{JSON}\n```"
    assert read_calls(text) == gymllm.ToolCalls(calls=(LOOK, LOOK, LOOK))
    text = (
        f"```\n<tool_call>{JSON}</tool_call>\n<tool_call>{JSON}<tool_call>{JSON}</tool_call>\n```"
    )
    assert read_calls(text) == gymllm.ToolCalls(calls=(LOOK, LOOK, LOOK))


def test_line_breaks_in_strings_are_let_pass() -> None:
    (call,) = read_calls('<tool_call>{"name": "a", "arguments": {"b": "1\n2"}}</tool_call>').calls
    assert call.arguments == {"b": "1\n2"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>{'name': 'look'}</tool_call>", "Tool call 1 is not JSON"),
        ("<tool_call>{'name': 'look'}</tool_call>", "looks like Python: JSON has double quotes"),
        ('<tool_call>{"name": "a", "arguments": {"b": True}}</tool_call>', "looks like Python"),
        ('<tool_call>{"name": "a", "arguments": {"b": NaN}}</tool_call>', "NaN is no JSON value"),
        ('<tool_call>{"name": "a", "argum', "it has no </tool_call>: was it cut off?"),
        ("<tool_call>", "was it cut off?"),
        (f"<tool_call>{JSON} and so on</tool_call>", 'something else behind its JSON ("and so on'),
        ("<tool_call>[1]</tool_call>", "must be a JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'has no "name"'),
        ('<tool_call>{"name": "a", "arguments": [1]}</tool_call>', 'as its "arguments", not [1]'),
        ("<tool_call>" + '{"a":' * 200, "is n"),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "half of a surrogate pair"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, problem: str) -> None:
    read = read_calls(text)
    assert read.calls == ()
    (error,) = read.errors
    assert problem in error
    assert 'expected <tool_call>{"name": <tool>, "arguments": <object>}</tool_call>.' in error


def test_nothing_behind_an_unreadable_call_is_read() -> None:
    inner = write_calls([LOOK])
    read = read_calls(f"{inner}\n<tool_call>{{'name': '{inner} {inner}'}}</tool_call>")
    assert read.calls == (LOOK,)
    assert read.errors[0].startswith("Tool call 2 is not JSON")
    assert read.errors[1] == "What follows it was not read."


def test_calls_are_bounded() -> None:
    read = read_calls(write_calls([LOOK] * (MOST_CALLS + 1)))
    assert len(read.calls) == MOST_CALLS
    assert read.errors == (f"There are more than {MOST_CALLS} calls; the rest was not read.",)


def test_an_action_without_calls_is_text() -> None:
    assert read_calls(" hello </tool_call> ") == gymllm.ToolCalls(text="hello </tool_call>")
    assert read_calls("") == gymllm.ToolCalls()


def test_half_characters_are_refused_and_never_break_the_text() -> None:
    text = write_calls([ToolCall(name="a", arguments={"b": "\udc80"})])
    text.encode()
    assert "half of a surrogate pair" in read_calls(text).errors[0]


def test_no_text_breaks_the_reader() -> None:
    rng = random.Random(0)
    parts = [
        "<tool_call>",
        "</tool_call>",
        JSON,
        "```json\n",
        "\n```\n",
        "{",
        '"',
        "\\",
        "x",
        "\n",
        "'",
    ]
    for _ in range(3000):
        text = "".join(rng.choices(parts, k=rng.randrange(12)))
        read = read_calls(text)
        assert read_calls(write_calls(read.calls)).calls == read.calls
        assert all(error.endswith(".") for error in read.errors)


def test_reading_is_linear_in_the_text() -> None:
    for piece in ("<tool_call>", "```", " ", "<tool_call>" + JSON, "\n```json\n", "<tool_call>{"):
        read_calls(piece * (200_000 // len(piece)))


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("edit", {"command": "view", "path": "a"}, ""),
        ("edit", {"command": "view", "path": "a", "view_range": [1, -1], "depth": None}, ""),
        ("submit", {}, ""),
        ("edti", {}, "there is no tool 'edti'; there is: edit, submit. Did you mean 'edit'?"),
        ("edit", {"command": "view"}, "edit needs the argument 'path'."),
        (
            "edit",
            {"command": "view", "path": "a", "pth": 1},
            "edit has no argument 'pth'; it takes: command, path, view_range, depth. "
            "Did you mean 'path' or 'depth'?",
        ),
        (
            "edit",
            {"command": "look", "path": 3},
            'the argument \'command\' of edit must be one of "view", "create", got "look". '
            "the argument 'path' of edit must be of type string, got 3.",
        ),
        (
            "edit",
            {"command": "view", "path": "a", "view_range": [1, True]},
            "item 1 of the argument 'view_range' of edit must be of type integer, got true.",
        ),
        (
            "edit",
            {"command": "view", "path": "a", "depth": "2"},
            "the argument 'depth' of edit must be of type integer or null, got \"2\".",
        ),
        ("submit", {"now": 1}, "submit has no argument 'now'; it takes: none."),
    ],
)
def test_a_call_is_checked_by_its_schema(
    name: str, arguments: dict[str, object], problem: str
) -> None:
    assert check_call(SCHEMAS, ToolCall(name=name, arguments=arguments)) == problem


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ((), ""),
        (SCHEMAS, ""),
        ("bash", 'tools must be a sequence of schemas, got "bash".'),
        ([*SCHEMAS, SCHEMAS[0]], "must have names of their own, but two are 'edit'."),
        ([{"function": {"name": "a", "parameters": []}}], 'tools must be {"type": "function", '),
        (
            [{"function": {"name": "a", "strict": {1}}}],
            "must be what JSON has, but Object of type set",
        ),
        ([{"function": {"name": "a", "x": float("nan")}}], "must be what JSON has"),
    ],
)
def test_what_an_environment_offers_is_checked(tools: object, problem: str) -> None:
    found = tools_problem(tools)
    assert problem in found
    assert bool(problem) == bool(found)


def test_problems_are_short() -> None:
    call = ToolCall(name="submit", arguments={f"{i}" * 300: json.dumps(i) for i in range(100)})
    assert len(check_call(SCHEMAS, call)) < 2000
    assert "92 more problems." in check_call(SCHEMAS, call)
    assert len(check_call(SCHEMAS, ToolCall(name="x" * 10_000, arguments={}))) < 300


def test_environments_have_no_tools_unless_they_say_so() -> None:
    assert gymllm.make("gymllm/FrozenLake-v0").unwrapped.tools == ()


class Offering(gymllm.Env):
    """Answers calls of its one tool."""

    waits = False
    tools = SCHEMAS[:1]

    async def areset(self, *, seed=None, options=None):
        return "go", {}

    async def astep(self, action):
        read = read_calls(action)
        problems = [*read.errors, *filter(None, (check_call(self.tools, c) for c in read.calls))]
        return "\n".join(problems) or "done", 0.0, not problems, False, {}


@pytest.mark.asyncio
@pytest.mark.parametrize("worker", ["inline", "process"])
async def test_a_pool_says_what_tools_its_environments_offer(worker: str) -> None:
    def make_env() -> gymnasium.Env[str, str]:
        return TimeLimit(Offering(), max_turns=3)

    async with gymllm.EnvPool(make_env, 1, worker=worker) as pool:
        assert await pool.tools() == tuple(SCHEMAS[:1])
        async with pool.lease() as env:
            await env.reset(seed=0)
            assert (await env.step(write_calls([LOOK]))).observation == (
                "there is no tool 'look'; there is: edit."
            )
    with pytest.raises(ClosedError):
        await pool.tools()
    async with gymllm.EnvPool("gymllm/FrozenLake-v0", 1) as pool:
        assert await pool.tools() == ()
