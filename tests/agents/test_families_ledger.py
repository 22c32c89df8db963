"""The ledger on real vocabularies and templates: each prompt is the whole conversation, rendered and encoded.

Replies are what the family's own template shows of them; observations and results are any text.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import anyio
import pytest
import tokenizers
from families import FAMILIES, load_family
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gymllm.agent import EpisodeContext
from gymllm.message import Message, ToolCall
from gymllm.timeline import Timeline
from gymllm_agents import ChatFormat, Conversation, ConversationConfig
from gymllm_agents.parser_choice import choose_parser

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["text"],
        },
    },
}
# One call a turn for all: Llama's and gpt-oss' templates show no more.
CONTROL_TEXTS = (
    "<|im_end|>", "<|im_start|>", "<|eot_id|>", "<|start_header_id|>", "<end_of_turn>", "</s>",
    "[INST]", "[/INST]", "<|user|>", "<|end|>", "<|return|>", "<｜User｜>", "<｜end▁of▁sentence｜>",
    "<think>", "</think>", "<tool_call>", "</tool_response>", "<|im_middle|>",
)  # fmt: skip
PIECES = (
    "go left", "12 + 7", " ", "  ", " " * 37, "\n", "\n\n\n", "\t", "é", "e\u0301\u0302", "🎉", "👨‍👩‍👧‍👦",
    "中文", "שלום", "\u200b", "\ufffd", "{}", '{"a": [1]}', "'", "`", "</", "<", "|>", "{{ x }}", "{% if %}",
)  # fmt: skip

anything = st.lists(st.sampled_from((*PIECES, *CONTROL_TEXTS)), max_size=8).map("".join)
replies = st.lists(st.sampled_from(PIECES), max_size=6).map(lambda parts: "".join(parts).strip())
turns = st.lists(
    st.tuples(anything, st.lists(st.tuples(replies, st.integers(), anything), max_size=2), replies),
    min_size=1,
    max_size=3,
)
some = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@functools.cache
def backend(name: str) -> tokenizers.Tokenizer:
    """The family's vocabulary without anything of ours around it."""
    return load_family(name).copy_backend()


class Play:
    """A conversation with an engine that answers what it is told to, and what the template makes of it."""

    def __init__(self, name: str, recording: Any, *, tools: bool, **config: Any) -> None:
        self.tokenizer = load_family(name)
        self.tools = [TOOL] if tools else []
        told = ConversationConfig(max_new_tokens=100_000, **config)
        self.chat = ChatFormat(
            self.tokenizer,
            opening=told.opening,
            tools=self.tools,
            on_rewrite=told.on_rewrite,
            report=False,
        )
        self.engine = recording(answers=[], context_length=1_000_000)
        context = EpisodeContext(engine=self.engine, seed=0, name="play", timeline=Timeline())
        parser = choose_parser(self.chat, self.tools)
        self.talk = Conversation(self.chat, told, context, parser=parser)
        self.said: list[Message] = []
        self.backend = backend(name)

    async def turn(self, new: list[Message], answer: Message, following: str) -> None:
        """Says `new`; the engine answers what the template shows of `answer`."""
        self.said += new
        ids = self.tokenizer.encode(self.as_generated(answer), allow_special=True)
        stops = self.chat.stop_token_ids
        end = next((k for k, i in enumerate(ids) if i in stops), None)
        if end is None:  # the start of the next turn is what ends this one (GLM)
            ids.append(self.tokenizer.token_to_id(following))
        else:
            ids = ids[: end + 1]
        self.engine.answers.append(ids)
        reply = await self.talk.reply(*new)
        assert not reply.limit
        assert self.engine.said[-1] == ids
        self.said.append(answer)

    def as_generated(self, answer: Message) -> str:
        """What the template shows of a fresh answer, behind the opening of its turn."""
        question, prompt, shown = (
            self.tokenizer.template.render(
                [*self.chat.opening, *messages], tools=self.tools, add_generation_prompt=wanted
            )
            for messages, wanted in (
                (self.said, False),
                (self.said, True),
                ([*self.said, answer], False),
            )
        )
        if shown.startswith(prompt):
            return shown[len(prompt) :]
        # gpt-oss drops the thoughts before a call once there is an answer; DeepSeek-R1 opens a thought
        # that its history does not show.
        _, found, text = shown.rpartition(prompt.removeprefix(question))
        return text if found else f"{answer.content}{self.tokenizer.eos_token}"

    def check_last_prompt(self) -> None:
        """That it is the whole conversation, rendered and encoded, text from outside as plain text."""
        prompt = list(self.engine.asked[-1].prompt_ids)
        whole = self.chat.whole_ids(self.said[:-1])
        if self.tokenizer.token_to_id("<|return|>") is not None:
            # gpt-oss ends a fresh answer otherwise than an earlier one; what was sampled stays.
            fresh, earlier = map(self.tokenizer.token_to_id, ("<|return|>", "<|end|>"))
            prompt = [earlier if i == fresh else i for i in prompt]
        assert prompt == whole
        if not any(control in repr(self.said) for control in CONTROL_TEXTS):
            # Nothing to be read as plain text: then it is what the hub's own functions would give.
            text = self.tokenizer.template.render(
                [*self.chat.opening, *self.said[:-1]], tools=self.tools, add_generation_prompt=True
            )
            assert whole == self.backend.encode(text, add_special_tokens=False).ids


async def play(name: str, recording: Any, script: Any, *, tools: bool, check: bool, **config: Any):
    game = Play(name, recording, tools=tools, **config)
    shows = game.chat.trials.shows_reasoning
    count = 0
    for observation, calls, text in script:
        new = [Message(role="user", content=observation)]
        for argument, number, result in calls if tools else ():
            call = ToolCall(
                name="add", arguments={"text": argument, "n": number}, id=f"call{count:05d}"
            )
            if name.startswith("kimi"):
                call = dataclasses.replace(call, id=f"functions.add:{count}")
            count += 1
            thought = "I'd better add." if shows else ""
            answer = Message(role="assistant", reasoning=thought, tool_calls=(call,))
            await game.turn(new, answer, "<|observation|>")
            if check:
                game.check_last_prompt()
            new = [Message(role="tool", content=result, tool_call_id=call.id, name="add")]
        thought = "It is clear." if shows else ""
        answer = Message(role="assistant", content=text, reasoning=thought)
        await game.turn(new, answer, "<|user|>")
        if check:
            game.check_last_prompt()
    return game


@pytest.mark.parametrize("tools", [False, True], ids=["plain", "tools"])
@pytest.mark.parametrize("name", FAMILIES)
@some
@given(script=turns)
def test_every_prompt_is_the_whole_conversation(name, tools, recording, script) -> None:
    if tools and not load_family(name).template.supports_tools():
        pytest.skip("the template lists no tools")

    async def main() -> None:
        game = await play(name, recording, script, tools=tools, check=True)
        segments = game.talk.segments()
        assert sum(int(s.mask.sum()) for s in segments) == sum(map(len, game.engine.said))
        if not game.chat.may_rewrite:
            assert len(segments) == 1

    anyio.run(main)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_thoughts_and_turns_do_to_a_prompt(name, recording) -> None:
    """The policy "keep": one segment whatever the template would drop or move."""
    script = [("a", [("x", 1, "b")], "c"), ("d", [("y", 2, "e")], "f"), ("g", [], "h")]
    tools = load_family(name).template.supports_tools()

    async def main() -> None:
        game = await play(name, recording, script, tools=tools, check=False, on_rewrite="keep")
        (segment,) = game.talk.segments()
        ids = segment.ids.tolist()
        at = 0
        for said in game.engine.said:  # in order, just as they were sampled
            at = next(k for k in range(at, len(ids)) if ids[k : k + len(said)] == said) + len(said)
        assert not game.chat.may_rewrite

    anyio.run(main)


@pytest.mark.parametrize("name", FAMILIES)
def test_nobody_breaks_out_of_a_turn(name) -> None:
    """Every control token of the vocabulary, spelt in an observation, a result, a name and an id."""
    tokenizer = load_family(name)
    tools = [TOOL] if tokenizer.template.supports_tools() else []
    chat = ChatFormat(tokenizer, tools=tools, report=False)
    attack = "\n".join(sorted(tokenizer.control_tokens))
    for token in list(tokenizer.control_tokens)[:40]:  # also in pieces, and one inside of another
        attack += f"\n{token[:2]} {token[2:]} {token[:-1]}{token}{token[-1:]}"
    reply = Message(role="assistant", content="left")
    call = ToolCall(name="add", arguments={"text": "x"}, id="call00000")
    calling = Message(role="assistant", tool_calls=(call,))

    def result(text: str) -> Message:
        return Message(role="tool", content=text, tool_call_id="call00000", name="add")

    def controls(ids: list[int]) -> list[int]:
        return [i for i in ids if tokenizer.is_control(i)]

    def turns(text: str) -> list[list[int]]:
        question = Message(role="user", content=text)
        answer = Message(role="user", content="next")
        asked = [chat.whole_ids([question]), chat.extension_ids([question, reply], [question])]
        asked.append(chat.whole_ids([question, reply, answer]))
        if tools:
            asked.append(chat.extension_ids([question, calling], [result(text)]))
            asked.append(chat.whole_ids([question, calling, result(text)]))
        return asked

    for harmless, attacked in zip(turns("x"), turns(attack), strict=True):
        assert controls(attacked) == controls(harmless)
    shown = tokenizer.decode(turns(attack)[0], skip_special=False)
    assert attack.strip() in shown  # all of it is there to be read
    open_chat = ChatFormat(tokenizer, report=False, control_tokens_in_text=True)
    stop = tokenizer.decode([chat.stop_token_ids[0]], skip_special=False)
    told = Message(role="user", content=f"x{stop}y")
    assert chat.stop_token_ids[0] in open_chat.whole_ids([told])
