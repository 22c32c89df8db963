"""What happens when a conversation nears the engine's context."""

from __future__ import annotations

import itertools
import random

import pytest

from gymllm.errors import ConfigError
from gymllm.message import Message, ToolCall
from gymllm.tool_calls import read_calls
from gymllm_agents import (
    ConversationConfig,
    EnvToolAgent,
    EnvToolConfig,
    ModelAgent,
    ToolAgent,
    ToolConfig,
    calculator,
)
from gymllm_agents.conversation import SUMMARY_REQUEST, _without_old_turns

OBSERVATION = "What is 12 + 7? The answer is 19. go left, go right"


def shown(tokenizer, segment) -> str:
    return tokenizer.decode(segment.ids.tolist(), skip_special=False)


def invariants_hold(agent, engine) -> None:
    """Each request was a prefix of a segment, and what was said follows it with mask 1."""
    segments = agent.segments()
    for request, said in zip(engine.asked, engine.said, strict=True):
        whole = [*map(int, request.prompt_ids), *said]
        assert any(
            s.ids[: len(whole)].tolist() == whole
            and s.mask[len(request.prompt_ids) : len(whole)].all()
            for s in segments
        )
    assert sum(int(s.mask.sum()) for s in segments) == sum(map(len, engine.said))
    assert all(len(s) <= engine.context_length for s in segments)


def answers(tokenizer, count: int) -> list[list[int]]:
    return [
        [*tokenizer.encode(f"answer {k}", allow_special=False), tokenizer.eos_token_id]
        for k in range(count)
    ]


@pytest.mark.asyncio
async def test_without_it_a_full_context_is_a_limit(tokenizer, recording, start) -> None:
    engine = recording(answers=answers(tokenizer, 9), context_length=260)
    agent = start(ModelAgent.factory(tokenizer), engine)
    limits = [(await agent.act(OBSERVATION)).limit for _ in range(3)]
    while not limits[-1]:
        limits.append((await agent.act(OBSERVATION)).limit)
    assert limits[-1] == "context_length"
    assert len(agent.segments()) == 1


@pytest.mark.asyncio
async def test_old_turns_are_dropped_and_the_first_one_stays(tokenizer, recording, start) -> None:
    engine = recording(answers=answers(tokenizer, 20), context_length=500)
    config = ConversationConfig(
        system_prompt="play", max_new_tokens=20, compaction="drop", keep_turns=1
    )
    agent = start(ModelAgent.factory(tokenizer, config), engine)
    for turn in range(20):
        action = await agent.act(f"{turn}: {OBSERVATION}")
        assert (action.text, action.limit) == (f"answer {turn}", "")
    invariants_hold(agent, engine)
    last = shown(tokenizer, agent.segments()[-1])
    assert len(agent.segments()) > 2
    assert "system\nplay" in last
    assert "user\n0: What" in last
    assert "earlier messages were left out here]\n" in last
    assert "user\n10: What" not in last
    # For reading, nothing is left out.
    assert [m.content for m in agent.messages() if m.role == "assistant"] == [
        f"answer {k}" for k in range(20)
    ]
    assert not any("left out" in m.content for m in agent.messages())


@pytest.mark.asyncio
async def test_the_policy_sums_up(tokenizer, recording, start) -> None:
    engine = recording(answers=answers(tokenizer, 40), context_length=700)
    config = ConversationConfig(max_new_tokens=20, compaction="summarise", summary_tokens=30)
    agent = start(ModelAgent.factory(tokenizer, config), engine)
    texts = [(await agent.act(f"{turn}: {OBSERVATION}")).text for turn in range(30)]
    invariants_hold(agent, engine)
    segments = agent.segments()
    assert len(segments) > 1
    first, second = (shown(tokenizer, s) for s in segments[:2])
    assert (
        first.count(SUMMARY_REQUEST) == 1
    )  # and the summary is the end of the segment, trained on
    assert segments[0].mask[-1] == 1
    assert second.startswith("<|im_start|>user\n0: What is")
    summary = first.rpartition("assistant\n")[2].removesuffix("<|im_end|>")
    assert f"A summary of what came before:\n\n{summary}\n\n" in second
    assert summary not in texts  # it was no action
    spent = [a for a in (m.content for m in agent.messages()) if a == SUMMARY_REQUEST]
    assert len(spent) == len(segments) - 1


@pytest.mark.asyncio
async def test_a_loop_of_calls_is_compacted_too(tokenizer, scripted, start) -> None:
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
    engine = scripted(*([call, "42", "so far 42"] * 20), context_length=900)
    config = ToolConfig(max_new_tokens=150, compaction="summarise", summary_tokens=40)
    agent = start(ToolAgent.factory(tokenizer, config, tools=[calculator()]), engine)
    for _ in range(4):
        assert not (await agent.act(OBSERVATION)).limit
    assert len(agent.segments()) > 1


@pytest.mark.asyncio
@pytest.mark.parametrize("keep_turns", [1, 3])
async def test_a_loop_of_calls_that_no_user_interrupts_drops_old_results(
    tokenizer, recording, start, keep_turns
) -> None:
    said = '<tool_call>{{"name": "calculator", "arguments": {{"expression": "{}"}}}}</tool_call>'
    calls = [
        [*tokenizer.encode(said.format(k), allow_special=True), tokenizer.eos_token_id]
        for k in range(100, 130)
    ]
    engine = recording(answers=calls, context_length=2000)
    config = EnvToolConfig(max_new_tokens=100, compaction="drop", keep_turns=keep_turns)
    schema = calculator().schema
    agent = start(EnvToolAgent.factory(tokenizer, config, tools=[schema]), engine)
    for turn in range(30):
        action = await agent.act(f"result {turn}." if turn else "Begin.")
        assert (read_calls(action.text).errors, action.limit, action.tool_calls) == ((), "", 1)
    invariants_hold(agent, engine)
    assert len(agent.segments()) > 2
    last = shown(tokenizer, agent.segments()[-1])
    assert "user\nBegin." in last
    assert "result 1.\n[" in last
    assert "earlier messages were left out here]" in last
    assert "result 12." not in last
    assert "result 28." in last
    assert [m.content for m in agent.messages() if m.role == "tool"] == [
        f"result {turn}." for turn in range(1, 30)
    ]


@pytest.mark.parametrize("keep_turns", [1, 2, 5])
def test_users_and_answers_alternate_whatever_is_dropped(keep_turns) -> None:
    rng = random.Random(keep_turns)
    call = ToolCall(name="f", arguments={})
    for _ in range(500):
        messages: list[Message] = []
        for _ in range(rng.randrange(1, 6)):
            messages.append(Message(role="user", content="u"))
            for _ in range(rng.choice([0, 0, 1, 9])):
                messages.append(Message(role="assistant", tool_calls=(call,)))
                messages += [Message(role="tool", content="t")] * rng.randrange(1, 3)
            messages.append(Message(role="assistant", content="a"))
        left = _without_old_turns(messages, keep_turns)
        if left is None:
            continue
        assert len(left) < len(messages)
        assert left[-1] == messages[-1]
        assert sum("left out here]" in m.content for m in left if m.role != "assistant") == 1
        said = [m.role for m in left if m.role == "user" or (m.role != "tool" and not m.tool_calls)]
        assert said == ["user", "assistant"] * (len(said) // 2)
        for before, after in itertools.pairwise(left):
            assert after.role != "tool" or before.role == "tool" or before.tool_calls
            assert not before.tool_calls or after.role == "tool"


@pytest.mark.asyncio
async def test_what_can_not_be_shortened_is_a_limit(tokenizer, recording, start) -> None:
    engine = recording(answers=answers(tokenizer, 9), context_length=150)
    config = ConversationConfig(max_new_tokens=20, compaction="drop", compact_at=0.5)
    agent = start(ModelAgent.factory(tokenizer, config), engine)
    limits = [(await agent.act(OBSERVATION)).limit]
    while not limits[-1]:
        limits.append((await agent.act(OBSERVATION)).limit)
    assert limits[-1] == "context_length"
    assert len(agent.segments()) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compaction": "droop"}, r"Unknown agent\.compaction 'droop'\. Did you mean drop"),
        ({"compact_at": 0}, r"agent\.compact_at must be > 0 and <= 1, got 0"),
        ({"keep_turns": 0}, r"agent\.keep_turns must be >= 1, got 0"),
        ({"summary_tokens": 0}, r"agent\.summary_tokens must be >= 1"),
    ],
)
def test_bad_settings_are_refused(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        ConversationConfig(**settings)
