"""What a chat template does to earlier turns, found out by rendering small conversations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, final

from gymllm.errors import ModelError
from gymllm.message import Message, ToolCall
from gymllm_agents.chat_template import ChatTemplate, ToolSchema

Variable = str | int | float | bool
"""What a template may be given besides the conversation."""

_THOUGHT = "a thought"
_INLINE = f"<think>\n{_THOUGHT}\n</think>\n\n"
_TOOL, _CALL_ID = "gymllm_probe", "call00000"  # nine letters and digits, which Mistral's insist on
_OPENED = ("<think>", "[THINK]", "◁think▷")


class ThinkingSample(NamedTuple):
    """A reply as the template shows it behind its prompt, and what is in it."""

    prompt: str
    shown: str
    thought: str
    answer: str


class CallingSample(NamedTuple):
    """A reply as the template shows it behind its prompt, and the call in it."""

    prompt: str
    shown: str
    call: ToolCall


@final
class Trials:
    """The answers of one template, for one opening and tool list. Immutable."""

    def __init__(
        self,
        template: ChatTemplate,
        *,
        opening: Sequence[Message],
        tools: Sequence[ToolSchema],
        variables: Mapping[str, Variable],
    ) -> None:
        """Renders them all.

        Raises:
            ModelError: The template refuses the opening.
        """
        self._template, self._opening = template, list(opening)
        self._tools, self._variables = tools, variables
        self._name = _tool_name(tools)
        self._sentinel = sentinel = mark_absent_from("reply", ())

        question = Message(role="user", content="question")
        prompt = self._render([question])
        self.opens_thought = prompt.rstrip().endswith(_OPENED)
        """Whether a prompt ends with the opening of a thought."""

        thinking = Message(role="assistant", content=sentinel, reasoning=_THOUGHT)
        shown = self._render([question, thinking], prompt=False)
        self.shows_reasoning = _THOUGHT in shown
        """Whether `Message.reasoning` is rendered; else a thought is part of the content."""
        calling = self._calling("", sentinel)
        self.shows_calls = bool(tools) and sentinel in self._try([question, calling], prompt=False)
        """Whether `Message.tool_calls` are rendered; else calls are part of the content."""
        self.within_turn = (
            shown.partition(_THOUGHT)[2].partition(sentinel)[0] if self.shows_reasoning else ""
        )
        """What is between a thought and its answer."""
        answers = [Message(role="assistant", content=sentinel)]
        answers += [self._calling("", sentinel)] if self.shows_calls else []
        self.ends_of_turns = tuple(
            self._try([question, answer], prompt=False).rpartition(sentinel)[2]
            for answer in answers
        )
        """What follows in the newest turn: after an answer, and after the last argument of a call."""
        self.closes_last_turn = bool(self.ends_of_turns[0].strip())
        """Whether an assistant turn has an end of its own; else the next one's start ends it."""
        roles = ("user", "tool") if tools else ("user",)
        self._kept = {
            (role, thoughts): self._keeps(role, thoughts)
            for role in roles
            for thoughts in (False, True)
        }

    @property
    def thinking_sample(self) -> ThinkingSample | None:
        """A reply with a thought; None for a template that shows none."""
        if not self.shows_reasoning:
            return None
        reply = Message(role="assistant", content="answer", reasoning=_THOUGHT)
        prompt, shown = self._shown(reply)
        return ThinkingSample(prompt, shown, thought=_THOUGHT, answer="answer")

    @property
    def calling_sample(self) -> CallingSample | None:
        """A reply that calls; None for a template that shows none."""
        if not self.shows_calls:
            return None
        reply = self._calling("", "a value")
        prompt, shown = self._shown(reply)
        return CallingSample(prompt, shown, call=reply.tool_calls[0])

    @property
    def what_is_rewritten(self) -> str:
        """In words; empty for a template that extends its own prefix."""
        kept = self._kept
        if not all(kept[key] for key in kept if not key[1]):
            return "always"
        return "" if all(kept.values()) else "it drops earlier thoughts"

    def rewrites(self, role: str, *, thoughts: bool) -> bool:
        """Whether a message of `role` makes the template change what came before it."""
        return not self._kept.get((role, thoughts), True)

    def histories(self, *, thoughts: bool = False) -> list[list[Message]]:
        """Conversations up to an assistant turn, none, one and two turns old, and in a loop of calls."""
        question = Message(role="user", content="question")
        turn = [question, self._answer("answer", thoughts=thoughts)]
        histories = [[question], [*turn, question], [*turn, *turn, question]]
        if self.shows_calls:
            calling = self._calling(_THOUGHT if thoughts else "", "value")
            histories.append([question, calling, self._result()])
        return histories

    def replies(self) -> list[Message]:
        """Assistant turns of every kind that can be told apart."""
        plain = Message(role="assistant", content="answer")
        return [plain, self._calling("", "value")] if self.shows_calls else [plain]

    def followers(self, reply: Message) -> list[Message]:
        """What can come after an assistant turn."""
        if reply.tool_calls:
            return [self._result()]
        following = [Message(role="user", content="next")]
        if self._tools and not self.shows_calls and self._try_result():
            following.append(self._result())
        return following

    def marked(self, reply: Message, sentinel: str) -> Message:
        """An assistant turn as `reply`, with the sentinel at the end of what was generated.

        That is its content, or the last argument of its last call.
        """
        if not (reply.tool_calls and self.shows_calls):
            return Message(role="assistant", content=sentinel)
        *earlier, last = reply.tool_calls
        return Message(
            role="assistant",
            tool_calls=(
                *(ToolCall(name=call.name, arguments={}, id=call.id) for call in earlier),
                ToolCall(name=last.name, arguments={"value": sentinel}, id=last.id),
            ),
        )

    def end_of_call(self, reply: Message, suffix: str) -> str:
        """The part of `suffix`, which follows the sentinel in a call, that is still the call's markup."""
        question = Message(role="user", content="question")
        marked = self.marked(reply, self._sentinel)
        alone = self._render([question, marked], prompt=False).rpartition(self._sentinel)[2]
        return suffix[: common_length(alone, suffix)]

    def _answer(self, text: str, *, thoughts: bool) -> Message:
        if thoughts and not self.shows_reasoning:
            return Message(role="assistant", content=_INLINE + text)
        return Message(role="assistant", content=text, reasoning=_THOUGHT if thoughts else "")

    def _calling(self, reasoning: str, value: str) -> Message:
        call = ToolCall(name=self._name, arguments={"value": value}, id=_CALL_ID)
        return Message(role="assistant", reasoning=reasoning, tool_calls=(call,))

    def _result(self) -> Message:
        return Message(role="tool", content="result", tool_call_id=_CALL_ID, name=self._name)

    def _try_result(self) -> bool:
        question = Message(role="user", content="question")
        answer = Message(role="assistant", content="answer")
        return bool(self._try([question, answer, self._result()]))

    def _keeps(self, role: str, thoughts: bool) -> bool:
        """Whether a conversation, rendered with one more turn, starts with all that it was before."""
        sentinel = self._sentinel
        # A thought that has no field of its own is part of the content, and so is a call beside it.
        inline = thoughts and not self.shows_reasoning
        calls = role == "tool" and self.shows_calls and not inline
        new = self._result() if role == "tool" else Message(role="user", content="next")
        for history in self.histories(thoughts=thoughts):
            if calls:
                answer = self._calling(_THOUGHT if thoughts else "", sentinel)
            else:
                answer = self._answer(sentinel, thoughts=thoughts)
            prompt = self._render(history)
            longer = self._upto(self._try([*history, answer, new]))
            if role == "tool" and not longer:
                continue  # such a message is never sent
            if not longer.startswith(prompt):
                return False
            if longer.count(_THOUGHT) != prompt.count(_THOUGHT) + thoughts:
                return False
            # What a policy writes before and around its answer is known by how the template shows a
            # fresh one; an empty thought there may be missing later, for it may not have been written.
            fresh = self._upto(self._try([*history, answer], prompt=False))
            generated = longer[len(prompt) :]
            if fresh and not fresh[len(prompt) :].endswith(generated):
                return False
            if not fresh and not calls and generated != answer.content:
                return False
        return True

    def _shown(self, reply: Message) -> tuple[str, str]:
        """What follows the question in a prompt, and once it is answered."""
        question = Message(role="user", content="question")
        # Some templates move the system prompt to the newest question, so what is before it differs.
        prompt, shown = self._render([question]), self._render([question, reply], prompt=False)
        return prompt.rpartition(question.content)[2], shown.rpartition(question.content)[2]

    def _upto(self, text: str) -> str:
        """The text up to the end of the sentinel."""
        before, found, _ = text.rpartition(self._sentinel)
        return before + found

    def _try(self, messages: Sequence[Message], *, prompt: bool = True) -> str:
        try:
            return self._render(messages, prompt=prompt)
        except ModelError:
            return ""

    def _render(self, messages: Sequence[Message], *, prompt: bool = True) -> str:
        return self._template.render(
            [*self._opening, *messages],
            tools=self._tools,
            add_generation_prompt=prompt,
            **self._variables,
        )


def mark_absent_from(stem: str, messages: Iterable[Message]) -> str:
    """A mark that is in none of the messages. U+FDD0 and U+FDD1 are never characters of a text."""
    held = list(messages)
    n = 0
    while any(_holds(message, f"\ufdd0{stem}{n}\ufdd1") for message in held):
        n += 1
    return f"\ufdd0{stem}{n}\ufdd1"


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """How many items two sequences have in common at their start."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((k for k, (a, b) in pairs if a != b), min(len(first), len(second)))


def _holds(message: Message, mark: str) -> bool:
    if mark in message.content or mark in message.reasoning:
        return True
    others = (message.tool_call_id, message.name, message.raw, *message.parts)
    return any(isinstance(part, str) and mark in part for part in others) or (
        bool(message.tool_calls) and mark in repr(message.tool_calls)
    )


def _tool_name(tools: Sequence[ToolSchema]) -> str:
    """The name of a tool that the template lists, as some look a called one up."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):  # pyright: ignore[reportUnknownMemberType]
            return str(function["name"])  # pyright: ignore[reportUnknownArgumentType]
    return _TOOL
