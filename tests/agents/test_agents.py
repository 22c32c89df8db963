"""Agents to subclass, and those that take an action out of an answer."""

from __future__ import annotations

import pytest

from gymllm.errors import ConfigError, GymLLMError
from gymllm.message import Message
from gymllm_agents import (
    ConversationAgent,
    FormatAgent,
    FormatConfig,
    ModelAgent,
    ReActAgent,
    ReActParser,
    Said,
    ToolConfig,
    calculator,
    tool,
)


class Planner(ConversationAgent):
    async def answer(self, observation):
        plan = await self.say(observation, "Plan.")
        return f"{plan.text}, {(await self.say('Act.')).text}"


@pytest.mark.asyncio
async def test_an_agent_says_what_it_wants_and_all_of_it_is_counted(tokenizer, scripted, start):
    agent = start(Planner.factory(tokenizer), scripted("think", "left"))
    action = await agent.act("A door.")
    assert action.text == "think, left"
    (segment,) = agent.segments()
    assert action.generated_tokens == int(segment.mask.sum())
    assert [m.content for m in agent.messages()] == ["A door.\nPlan.", "think", "Act.", "left"]


@pytest.mark.asyncio
async def test_a_limit_inside_an_agent_ends_its_turn(tokenizer, scripted, start):
    agent = start(Planner.factory(tokenizer), scripted("think", "left", context_length=45))
    action = await agent.act("go left and right, up and down, what is the answer?")
    assert (action.text, action.limit) == ("", "context_length")


@pytest.mark.asyncio
async def test_a_thought_is_no_part_of_the_action(tokenizer, scripted, start):
    agent = start(
        ModelAgent.factory(tokenizer),
        scripted("<think>go left?</think>\n\ngo right", "<think>go left", "no thought "),
    )
    texts = [(await agent.act("a")).text for _ in range(3)]
    assert texts == ["go right", "", "no thought "]
    assert agent.messages()[1].reasoning == "go left?"
    assert agent.messages()[1].raw.startswith("<think>")


@pytest.mark.parametrize(
    ("settings", "answers", "action"),
    [
        ({}, ["so <action>left</action> or <action> up </action>?"], "up"),
        ({}, ["hm", "<action>up</action>"], "up"),
        ({}, ["hm", "<action>up"], "<action>up"),
        ({"asks": 0}, ["hm"], "hm"),
        ({"tag": "move"}, ["<move>a</move><action>b</action>"], "a"),
        ({"pattern": r"move (\w+)"}, ["move up, then move down"], "down"),
        ({"pattern": r"(?P<x>\w+) to (?P<action>\w+)"}, ["go to left"], "left"),
        ({"pattern": r"\d+"}, ["1 or 2"], "2"),
        ({"pattern": r"(a)|b"}, ["b"], ""),
    ],
)
@pytest.mark.asyncio
async def test_the_action_is_taken_out_of_the_answer(
    settings, answers, action, tokenizer, scripted, start
):
    config = FormatConfig(max_new_tokens=200, **settings)
    agent = start(FormatAgent.factory(tokenizer, config), scripted(*answers))
    assert (await agent.act("a")).text == action
    assert len(agent.messages()) == 2 * len(answers)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pattern": "("}, r"agent\.pattern is no regular expression"),
        ({"tag": "<x>"}, r"agent\.tag must be a name"),
        ({"asks": -1}, r"agent\.asks must be >= 0"),
    ],
)
def test_forms_that_are_none_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        FormatConfig(**settings)


def test_a_format_agent_needs_its_config(tokenizer):
    with pytest.raises(ConfigError, match="needs a FormatConfig, got a ToolConfig"):
        FormatAgent.factory(tokenizer, ToolConfig())


@pytest.mark.asyncio
async def test_react_thinks_acts_and_observes(tokenizer, scripted, start):
    engine = scripted(
        'Thought: work it out\nAction: calculator\nAction Input: {"expression": "6*7"}\n'
        "Observation: 13\nFinal Answer: 13",
        "Thought: that is it\nFinal Answer: 42",
        "just this",
    )
    config = ToolConfig(max_new_tokens=400)
    agent = start(ReActAgent.factory(tokenizer, config, tools=[calculator()]), engine)
    action = await agent.act("6 * 7?")
    assert (action.text, action.tool_calls, action.tool_errors) == ("42", 1, 0)
    messages = agent.messages()
    assert messages[0].role == "system"
    assert "Action Input: its arguments" in messages[0].content
    assert messages[3].content == "Observation: 42"
    assert (await agent.act("next")).text == "just this"
    with pytest.raises(ConfigError, match="leave the parser out"):
        ReActAgent.factory(tokenizer, tools=[calculator()], parser="qwen")


@tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("Action: calculator\nAction Input: 6*7", "calculator", {"expression": "6*7"}),
        ('Action: calculator\nAction Input: "6*7"', "calculator", {"expression": "6*7"}),
        ("Action: calculator[6*7]", "calculator", {"expression": "6*7"}),
        ('action : `add`\naction input: {"a": 1,\n "b": 2}', "add", {"a": 1, "b": 2}),
        ("Action: nothing", "nothing", None),
        ("Action: add\nAction Input: 1, 2", "add", None),
    ],
)
def test_react_reads_calls(text, name, arguments):
    parser = ReActParser([calculator().schema, add.schema])
    (call,) = parser.parse(Said(text=f"Thought: x\n{text}")).calls
    assert call.name == name
    assert getattr(call, "arguments", {}) == (arguments or {})


@pytest.mark.parametrize("text", ["", "Observation: x\nAction: add", "Final Answer:", "Thought: y"])
def test_react_answers_that_call_nothing(text):
    assert ReActParser([add.schema]).parse(Said(text=text)).calls == ()


class Forgetful(ConversationAgent):
    async def answer(self, observation):
        await self.say(observation)


class Silent(ConversationAgent):
    async def answer(self, observation):
        return (await self.say()).text


class Mixing(ConversationAgent):
    async def answer(self, observation):
        return (await self.say(Message(role="system", content="Play."), observation)).text


class Wrong(ConversationAgent):
    async def answer(self, observation):
        return (await self.say(None)).text


@pytest.mark.parametrize(
    ("agent", "problem"),
    [
        (Forgetful, "Forgetful.answer must return the action, a str, got None"),
        (Silent, "got nothing"),
        (Mixing, "a 'system' message beside others"),
        (Wrong, "got None"),
    ],
)
@pytest.mark.asyncio
async def test_mistakes_of_a_subclass_are_explained(tokenizer, scripted, start, agent, problem):
    with pytest.raises(GymLLMError, match=problem):
        await start(agent.factory(tokenizer), scripted("left")).act("A door.")
