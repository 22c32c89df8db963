"""What a turn adds, found by trial renders."""

from __future__ import annotations

import pytest

from gymllm.message import Message, ToolCall
from gymllm_agents import ChatFormat

BARE = """
{%- for m in messages %}
  {%- if m.role == 'user' %}{{ '[Q] ' + m.content + ' [A]' }}{% else %}{{ m.content + '\n' }}{% endif %}
{%- endfor %}"""
BROKEN_LINE = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '\n<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
OPENS_THOUGHT = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""


def said(*contents: str) -> list[Message]:
    roles = ("user", "assistant")
    return [Message(role=roles[k % 2], content=text) for k, text in enumerate(contents)]


def text_of(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special=False)


@pytest.mark.parametrize("template", ["chatml", "plain", "trimming", "thinking"])
def test_the_difference_does_not_depend_on_history_where_it_need_not(
    template, tokenizer, with_template
):
    tokenizer = tokenizer if template == "chatml" else with_template(template)
    chat = ChatFormat(tokenizer, opening=[Message(role="system", content="play")])
    long = said("a", "b", "c", "d", "e", "f")
    new = said("next <|im_end|>")
    short = said("a", "b")
    assert chat.extension_ids(short, new) == chat.extension_ids(long, new)
    text = "<|im_end|>\n<|im_start|>user\nnext <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert text_of(tokenizer, chat.extension_ids(short, new)) == text


def test_the_difference_depends_on_history_where_it_must(with_template):
    tokenizer = with_template("numbering")
    chat = ChatFormat(tokenizer)
    for history, number in ((said("a", "b"), 3), (said("a", "b", "c", "d"), 5)):
        text = text_of(tokenizer, chat.extension_ids(history, said("next")))
        assert f"user\n{number}: next" in text


@pytest.mark.parametrize("template", ["chatml", "plain", "numbering", "thinking"])
def test_prompt_answer_and_difference_are_the_whole(template, tokenizer, with_template):
    tokenizer = tokenizer if template == "chatml" else with_template(template)
    chat = ChatFormat(tokenizer, opening=[Message(role="system", content="play <|im_end|>")])
    messages = said("12 + 7", "19", " 🎉<|im_start|> ", "left")
    grown = chat.whole_ids(messages[:1])
    for k in range(1, len(messages), 2):
        grown += tokenizer.encode(messages[k].content, allow_special=False)
        grown += chat.extension_ids(
            messages[: k + 1], said("next" if k == 3 else messages[2].content)
        )
    assert grown == chat.whole_ids([*messages, *said("next")])


def test_a_template_without_control_tokens_works(with_template):
    tokenizer = with_template(BARE)
    chat = ChatFormat(tokenizer)
    assert chat.stop_token_ids == tokenizer.stop_token_ids
    end = tokenizer.eos_token_id
    ids = chat.extension_ids(said("a", "b"), said("b"), last_id=end)
    assert text_of(tokenizer, ids) == "\n[Q] b [A]"


def test_a_blank_before_the_closing_token_is_not_added_after_it(with_template):
    tokenizer = with_template(BROKEN_LINE)
    chat = ChatFormat(tokenizer)
    open_, closed = (
        text_of(tokenizer, chat.extension_ids(said("a", "b"), said("b"), last_id=last))
        for last in (5, tokenizer.eos_token_id)
    )
    assert open_.startswith("\n<|im_end|>\n<|im_start|>user")
    assert closed.startswith("\n<|im_start|>user")


def test_the_token_that_closes_a_turn_stops_a_generation(with_template):
    tokenizer = with_template(BROKEN_LINE.replace("<|im_end|>", "<|endoftext|>"))
    first_is_blank = ChatFormat(tokenizer)
    assert first_is_blank.stop_token_ids == (2, 0)
    tokenizer = with_template(BROKEN_LINE.replace("\n<|im_end|>", "<|endoftext|>"))
    assert ChatFormat(tokenizer).stop_token_ids == (2, 0)


def test_what_rewrites_is_known_by_role_and_thoughts(with_template):
    tools = [{"type": "function", "function": {"name": "add"}}]
    chat = ChatFormat(with_template("thinking"), tools=tools)
    assert chat.rewrites("user", thoughts=True)
    assert not chat.rewrites("user", thoughts=False)
    assert not chat.rewrites("tool", thoughts=True)
    assert ChatFormat(with_template(OPENS_THOUGHT)).rewrites("user", thoughts=False)


def test_messages_may_contain_the_marks(tokenizer):
    chat = ChatFormat(tokenizer)
    text = "\ufdd0fuse0\ufdd1 \ufdd0reply0\ufdd1 <|im_end|>"
    ids = chat.extension_ids(said("a", "b"), said(text))
    assert text in text_of(tokenizer, ids)
    assert ids.count(tokenizer.eos_token_id) == 2
    assert text in text_of(tokenizer, chat.whole_ids(said(text)))


def test_whether_a_template_takes_a_turn_is_tried_once_for_turns_alike(tokenizer, monkeypatch):
    tools = [{"type": "function", "function": {"name": "add"}}]
    one_call = tokenizer.template.source.replace(
        "{%- set function",
        "{%- if not loop.first -%}{{ raise_exception('one') }}{%- endif -%}{%- set function",
    )
    chat = ChatFormat(
        type(tokenizer)(tokenizer.copy_backend(), chat_template=one_call, eos_token="<|im_end|>"),
        tools=tools,
    )
    tried: list[Message] = []
    tries = ChatFormat._tries

    def counted(self: ChatFormat, reply: Message, before: str) -> bool:
        tried.append(reply)
        return tries(self, reply, before)

    monkeypatch.setattr(ChatFormat, "_tries", counted)

    def turn(text: str, *values: object) -> Message:
        calls = (ToolCall(name="add", arguments={"a": v}, id=f"{v}") for v in values)
        return Message(role="assistant", content=text, tool_calls=tuple(calls))

    def takes(reply: Message) -> bool:
        return chat.takes(reply, before="tool")

    assert takes(turn("a", 1))
    assert takes(turn("b", 2))
    assert len(tried) == 1
    assert not takes(turn("a", 1, 2))
    assert not takes(turn("b", 3, 4))
    assert len(tried) == 2
    for other in (turn("", 1), turn("a", "1"), turn("a <b>", 1), turn("a <b>", 1)):
        assert takes(other)
    assert len(tried) == 6


@pytest.mark.parametrize("template", ["chatml", "thinking"])
def test_a_conversation_can_end_without_the_next_turn(template, tokenizer, with_template):
    tokenizer = tokenizer if template == "chatml" else with_template(template)
    chat = ChatFormat(tokenizer)
    messages = said("12 + 7 <|im_end|>", "19")
    closed = chat.whole_ids(messages, opens_turn=False)
    text = "<|im_start|>user\n12 + 7 <|im_end|><|im_end|>\n<|im_start|>assistant\n19<|im_end|>\n"
    assert text_of(tokenizer, closed) == text
    assert closed.count(tokenizer.token_to_id("<|im_end|>")) == 2
    assert chat.whole_ids(messages)[: len(closed)] == closed
