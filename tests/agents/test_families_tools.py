"""A `ToolAgent` on each family: calls as its own template shows them, results in its own role."""

from __future__ import annotations

import anyio
import pytest
from families import FAMILIES, load_family

from gymllm.message import Message, ToolCall
from gymllm.tool_calls import write_calls
from gymllm_agents import EnvToolAgent, EnvToolConfig, ToolAgent, ToolConfig, calculator
from gymllm_agents.parsers import make_parser

LISTING = [
    name
    for name in FAMILIES
    if name.startswith(("qwen", "llama", "mistral", "gpt-oss", "glm", "kimi"))
]
OTHERS = {
    "deepseek-v3": "deepseek",
    "deepseek-v3.1": "deepseek",
    "gemma3": "gemma",
    "smollm2": "hermes",
}


def generated(name: str, answer: Message, next_token: str) -> list[int]:
    """The ids of an answer to a first question, as the family's template shows it, its end included."""
    tokenizer = load_family(name)
    question = [Message(role="user", content="question")]
    tools = [calculator().schema]
    prompt, shown = (
        tokenizer.template.render(messages, tools=tools, add_generation_prompt=wanted)
        for messages, wanted in ((question, True), ([*question, answer], False))
    )
    assert shown.startswith(prompt)
    ids = tokenizer.encode(shown[len(prompt) :], allow_special=True)
    stops = tokenizer.stop_token_ids
    end = next((k for k, i in enumerate(ids) if i in stops), None)
    if end is None:
        return [*ids, tokenizer.token_to_id(next_token)]
    return ids[: end + 1]


def call(name: str, expression: str) -> Message:
    call_id = "functions.calculator:0" if name.startswith("kimi") else "abcdef123"
    arguments = {"expression": expression}
    called = ToolCall(name="calculator", arguments=arguments, id=call_id)
    return Message(role="assistant", tool_calls=(called,))


@pytest.mark.parametrize("name", LISTING)
def test_a_call_is_run_and_its_result_told(name, recording, start) -> None:
    tokenizer = load_family(name)
    answer = Message(role="assistant", content="It is 42.")
    engine = recording(
        answers=[
            generated(name, call(name, "6*7"), "<|observation|>"),
            generated(name, call(name, "1/0"), "<|observation|>"),
            generated(name, answer, "<|user|>"),
            generated(name, answer, "<|user|>"),
        ],
        context_length=100_000,
    )
    config = ToolConfig(max_new_tokens=10_000, system_prompt="Calculate.")
    agent = start(ToolAgent.factory(tokenizer, config, tools=[calculator()]), engine)

    async def main() -> None:
        action = await agent.act("6 * 7? <|im_end|></s>")
        assert (action.text, action.tool_calls, action.tool_errors) == ("It is 42.", 2, 1)
        assert (await agent.act("next")).text == "It is 42."

    anyio.run(main)
    told = [(m.role, m.content) for m in agent.messages() if m.role == "tool"]
    assert told == [("tool", "42"), ("tool", "Error: division by zero.")]
    prompt = tokenizer.decode(engine.asked[0].prompt_ids.tolist(), skip_special=False)
    assert "calculator" in prompt
    assert "Calculate." in prompt
    segments = agent.segments()
    assert sum(int(s.mask.sum()) for s in segments) == sum(map(len, engine.said))


@pytest.mark.parametrize("name", ["qwen3", "llama3.1", "mistral-small-3.2", "gpt-oss", "glm-4.6"])
def test_a_call_is_an_action_of_an_environment_that_offers_tools(name, recording, start) -> None:
    tokenizer = load_family(name)
    answer = Message(role="assistant", content="It is 42.")
    engine = recording(
        answers=[
            generated(name, call(name, "6*7"), "<|observation|>"),
            generated(name, call(name, "1+1"), "<|observation|>"),
            generated(name, answer, "<|user|>"),
        ],
        context_length=100_000,
    )
    config = EnvToolConfig(max_new_tokens=10_000)
    agent = start(EnvToolAgent.factory(tokenizer, config, tools=[calculator().schema]), engine)

    async def main() -> None:
        for observation, expression in (("6 * 7?", "6*7"), ("42 <|im_end|></s>", "1+1")):
            action = await agent.act(observation)
            assert action.text == write_calls(
                [ToolCall(name="calculator", arguments={"expression": expression})]
            )
        assert (await agent.act("2")).text == "It is 42."

    anyio.run(main)
    told = [(m.role, m.content) for m in agent.messages() if m.role in ("user", "tool")]
    assert told == [("user", "6 * 7?"), ("tool", "42 <|im_end|></s>"), ("tool", "2")]
    segments = agent.segments()
    assert sum(int(s.mask.sum()) for s in segments) == sum(map(len, engine.said))


@pytest.mark.parametrize("name", OTHERS)
def test_families_without_a_list_of_tools_are_told_in_the_prompt(name, recording, start) -> None:
    tokenizer = load_family(name)
    texts = {
        "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n"
        '```json\n{"expression": "6*7"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>calculator<｜tool▁sep｜>"
        '{"expression": "6*7"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "gemma3": '```tool_code\ncalculator(expression="6*7")\n```',
        "smollm2": '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>',
    }
    stop = tokenizer.stop_token_ids[-1]
    said = [texts[name], "It is 42."]
    engine = recording(
        answers=[[*tokenizer.encode(text, allow_special=True), stop] for text in said],
        context_length=100_000,
    )
    parser = OTHERS[name] if name == "gemma3" else None
    config = ToolConfig(max_new_tokens=10_000)
    factory = ToolAgent.factory(tokenizer, config, tools=[calculator()], parser=parser)
    agent = start(factory, engine)

    async def main() -> None:
        action = await agent.act("6 * 7?")
        assert (action.text, action.tool_calls, action.tool_errors) == ("It is 42.", 1, 0)

    anyio.run(main)
    prompt = tokenizer.decode(engine.asked[0].prompt_ids.tolist(), skip_special=False)
    form = make_parser(OTHERS[name], [calculator().schema]).instructions([calculator().schema])
    assert form.strip() in prompt
    assert agent.messages()[-2] == Message(role="user", content="42")


TWO_IN_LLAMA = (
    '{"name": "calculator", "parameters": {"expression": "6*7"}}; '
    '{"name": "calculator", "parameters": {"expression": "2*3"}}<|eot_id|>'
)
HARMONY_CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.calculator <|constrain|>json"
    '<|message|>{"expression": "6*7"}'
)
TEKKEN_CALL = '[TOOL_CALLS]calculator[CALL_ID]abcdef123[ARGS]{"expression": "6*7"}</s>'


@pytest.mark.parametrize("compaction", ["none", "drop", "summarise"])
@pytest.mark.parametrize("on_rewrite", ["segment", "keep"])
@pytest.mark.parametrize(
    ("name", "calling", "results"),
    [
        ("llama3.1", TWO_IN_LLAMA, "42\n6"),  # its template refuses a second call
        ("gpt-oss", HARMONY_CALL + "<|end|>" + HARMONY_CALL + "<|call|>", "42\n42"),  # hides it
        (  # refuses text beside a thought and a call
            "gpt-oss",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
            f"<|message|>Let me see.<|end|>{HARMONY_CALL}<|call|>",
            "42",
        ),
        # Two assistant turns in a row, once the call is text, because of a thought that is not shown.
        ("mistral-small-3.2", f"<think>Hm.</think>{TEKKEN_CALL}", "42"),
        ("mistral-small-3.2", TEKKEN_CALL, "42"),  # refuses calls that nobody answers
    ],
)
@pytest.mark.asyncio
async def test_calls_that_the_template_refuses_are_text(
    name, calling, results, on_rewrite, compaction, recording, start
) -> None:
    tokenizer = load_family(name)
    config = ToolConfig(
        max_new_tokens=100, max_tool_calls=2, on_rewrite=on_rewrite, compaction=compaction
    )
    ids = tokenizer.encode(calling, allow_special=True)
    ids = ids[: next(k for k, i in enumerate(ids) if i in tokenizer.stop_token_ids) + 1]
    engine = recording(
        answers=[ids] * 40, context_length=1_000_000 if compaction == "none" else 1100
    )
    agent = start(ToolAgent.factory(tokenizer, config, tools=[calculator()]), engine)
    for turn in range(3):
        action = await agent.act(f"observation {turn}")
        assert not action.limit
        assert action.tool_calls == 2
    assert results in tokenizer.decode(engine.asked[1].prompt_ids.tolist(), skip_special=False)
    generated = [i for said in engine.said for i in said]
    assert [i for s in agent.segments() for i in s.ids[s.mask == 1].tolist()] == generated
    if on_rewrite == "keep" and compaction == "none":
        assert len(agent.segments()) == 1


@pytest.mark.asyncio
async def test_what_the_policy_wrote_is_shown_again_where_text_may_hold_control_tokens(
    recording, start
) -> None:
    """gpt-oss' template refuses a content that holds channels, as a call that can't be read does."""
    tokenizer = load_family("gpt-oss")
    unreadable = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.calculator <|constrain|>json<|message|>{<|call|>"
    )
    said = [unreadable, "<|channel|>final<|message|>42<|return|>"]
    engine = recording(answers=[tokenizer.encode(text, allow_special=True) for text in said * 2])
    config = ToolConfig(max_new_tokens=100, control_tokens_in_text=True)
    agent = start(ToolAgent.factory(tokenizer, config, tools=[calculator()]), engine)
    for _ in range(2):
        action = await agent.act("6 * 7?<|end|>")
        assert (action.text, action.tool_errors) == ("42", 1)
