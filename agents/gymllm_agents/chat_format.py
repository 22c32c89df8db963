"""How an agent's conversations become ids: whole ones, and what each new turn adds.

A turn's ids are the *difference* the chat template makes: the history is rendered with the new
messages, a sentinel standing for the text the policy generated, and what follows the sentinel is
encoded alone. Generated text is never rendered, so it is never encoded again (invariant 1).

Trial renders at start-up find out two things about a template. Does it extend its own prefix, or
rewrite earlier turns (Qwen3 drops earlier `<think>` text)? And does a turn's difference depend on
what came before? It rarely does; then a history of two messages serves, and a turn costs what is
new in it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import final

from gymllm.message import Message
from gymllm_agents.chat_template import ToolSchema
from gymllm_agents.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_QUESTION = Message(role="user", content="question")
_THOUGHT = "<think>\nthought\n</think>\n\n"


@final
class ChatFormat:
    """Messages to ids, for one tokenizer, opening and tool list. Immutable and thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        opening: Sequence[Message] = (),
        tools: Sequence[ToolSchema] = (),
    ) -> None:
        """Tries the template out.

        Args:
            tokenizer: Has a chat template.
            opening: System prompt and examples, before the first observation. They are yours, so
                control tokens in them are control tokens.
            tools: What the template lists for the model; empty for a template without tool support.

        Raises:
            ModelError: No template, or it refuses the opening.
        """
        self.tokenizer = tokenizer
        self.opening = tuple(opening)
        self._template = tokenizer.template
        self._tools = tuple(tools)
        self._roles = ("user", "tool") if tools else ("user",)
        self._extends = {role: self._extends_prefix(role, "") for role in self._roles}
        self._keeps_thoughts = {role: self._extends_prefix(role, _THOUGHT) for role in self._roles}
        self._local = all(
            self._suffix(history, [new], fuse="", local=True)
            == self._suffix(history, [new], fuse="", local=False)
            for new in (Message(role=role, content="next") for role in self._roles)
            for history in self._histories("")
        )
        # The token that closes an assistant turn ends a generation, whatever the files call eos.
        closing = list[int]()
        for role in self._roles:
            ids = self.extension_ids([_QUESTION], [Message(role=role, content="next")])
            first = self._first_control(ids)
            if first < len(ids) and self._is_blank(ids[:first]):
                closing.append(ids[first])
        self.stop_token_ids: tuple[int, ...] = tuple(
            dict.fromkeys([*tokenizer.stop_token_ids, *closing])
        )
        """Ids after which a turn ends."""
        if self.may_rewrite:
            _log.warning(
                "the chat template rewrites earlier turns (%s): an episode then starts a new "
                "segment from the re-rendered conversation, which costs prompt tokens",
                "always" if not all(self._extends.values()) else "it drops earlier <think> text",
            )

    @property
    def may_rewrite(self) -> bool:
        """Whether some turn can change tokens that came before it."""
        return not all((*self._extends.values(), *self._keeps_thoughts.values()))

    def rewrites(self, role: str, *, thoughts: bool) -> bool:
        """Whether a message of `role` makes the template change what came before it.

        Args:
            role: Of the new message.
            thoughts: Whether the policy generated `<think>` text in the current segment.
        """
        kept = self._keeps_thoughts if thoughts else self._extends
        return not kept.get(role, True)

    def whole_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids of opening and `messages`, up to where the assistant's next turn starts."""
        fuse = _absent("fuse", messages)
        shown = [*self.opening, *self._defused(messages, fuse)]
        text = self._template.render(shown, tools=self._tools, add_generation_prompt=True)
        return self.tokenizer.encode_rendered(text, fuse=fuse)

    def extension_ids(
        self, history: Sequence[Message], new: Sequence[Message], *, last_id: int | None = None
    ) -> list[int]:
        """Ids that `new` adds after an assistant turn, up to where the next one starts.

        Args:
            history: What came before that assistant turn, opening left out. Not looked at where the
                template's differences do not depend on it.
            new: Messages of the environment or of tools.
            last_id: Last id of the assistant turn. If it is the stop token that closes the turn,
                the template's own is left out; if not (a length limit), the turn gets closed.
        """
        fuse = _absent("fuse", new) if self._local else _absent("fuse", [*history, *new])
        suffix = self._suffix(history, new, fuse=fuse, local=self._local)
        ids = self.tokenizer.encode_rendered(suffix, fuse=fuse)
        if last_id is None or last_id not in self.stop_token_ids:
            return ids
        first = self._first_control(ids)
        # A line break that the template has before the closing token can't be put there any more.
        closed = ids[first : first + 1] == [last_id] and self._is_blank(ids[:first])
        return ids[first + 1 :] if closed else ids

    def _first_control(self, ids: Sequence[int]) -> int:
        """Place of the first control token; the length if there is none."""
        return next((k for k, i in enumerate(ids) if self.tokenizer.is_control(i)), len(ids))

    def _is_blank(self, ids: Sequence[int]) -> bool:
        return not self.tokenizer.decode(ids, skip_special=False).strip()

    def _suffix(
        self, history: Sequence[Message], new: Sequence[Message], *, fuse: str, local: bool
    ) -> str:
        """Text after the assistant turn that stands between `history` and `new`."""
        sentinel = _absent("reply", new if local else [*history, *new])
        before = [_QUESTION] if local else [*self.opening, *self._defused(history, fuse)]
        turns = [*before, Message(role="assistant", content=sentinel), *self._defused(new, fuse)]
        tools = () if local else self._tools
        text = self._template.render(turns, tools=tools, add_generation_prompt=True)
        return text.rpartition(sentinel)[2]

    def _defused(self, messages: Sequence[Message], fuse: str) -> list[Message]:
        if not fuse:
            return list(messages)
        return [
            Message(
                role=m.role,
                content=self.tokenizer.defuse(
                    m.content, fuse=fuse, keep_markup=m.role == "assistant"
                ),
            )
            for m in messages
        ]

    def _extends_prefix(self, role: str, thought: str) -> bool:
        """Whether a conversation, rendered with one more turn, starts with all it was before."""
        sentinel = _absent("reply", ())
        for history in self._histories(thought):
            prompt = self._template.render(
                [*self.opening, *history], tools=self._tools, add_generation_prompt=True
            )
            answer = Message(role="assistant", content=thought + sentinel)
            longer = self._template.render(
                [*self.opening, *history, answer, Message(role=role, content="next")],
                tools=self._tools,
                add_generation_prompt=True,
            )
            if not longer.startswith(prompt + thought + sentinel):
                return False
        return True

    def _histories(self, thought: str) -> list[list[Message]]:
        """Conversations to try the template with, none, one and two turns old."""
        turn = [_QUESTION, Message(role="assistant", content=thought + "answer")]
        histories = [[_QUESTION], [*turn, _QUESTION], [*turn, *turn, _QUESTION]]
        if "tool" in self._roles and not thought:
            histories.append([*turn, Message(role="tool", content="result")])
        return histories


def _absent(stem: str, messages: Iterable[Message]) -> str:
    """A mark that is in none of the messages. U+FDD0 and U+FDD1 are never characters of a text."""
    text = "\n".join(message.content for message in messages)
    n = 0
    while (mark := f"\ufdd0{stem}{n}\ufdd1") in text:
        n += 1
    return mark
