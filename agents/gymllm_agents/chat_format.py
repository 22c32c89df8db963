"""How an agent's conversations become ids: whole ones, and what each new turn adds.

A turn's ids are the *difference* the chat template makes: the history is rendered with the new
messages, a sentinel standing for the text the policy generated, and what follows the sentinel is
encoded alone. Generated text is never rendered, so it is never encoded again (invariant 1).

Trial renders at start-up find out what a template does to what came before (`template_trials.py`).
Where a turn's difference does not depend on that, which is nearly always, a history of two messages
serves, and a turn costs what is new in it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, cast, final

from gymllm.errors import ModelError
from gymllm.message import Message, ToolCall
from gymllm_agents.chat_template import ToolSchema
from gymllm_agents.growing_text import GrowingText
from gymllm_agents.template_trials import Trials, Variable, mark_absent_from
from gymllm_agents.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

OnRewrite = Literal["segment", "keep", "error"]

_QUESTION = Message(role="user", content="question")
_MOST_SHAPES = 256
"""Shapes of turns of which it is kept whether the template takes them."""


@final
class ChatFormat:
    """Messages to ids, for one tokenizer, opening and tool list. Immutable and thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        opening: Sequence[Message] = (),
        tools: Sequence[ToolSchema] = (),
        variables: Mapping[str, Variable] | None = None,
        control_tokens_in_text: bool = False,
        on_rewrite: OnRewrite = "segment",
        report: bool = True,
    ) -> None:
        """Tries the template out.

        Args:
            tokenizer: Has a chat template.
            opening: System prompt and examples, before the first observation. They are yours, so
                control tokens in them are control tokens.
            tools: What the template lists for the model; empty for a template without tool support.
            variables: What the template may read besides the conversation ("enable_thinking").
            control_tokens_in_text: Whether `<|im_end|>` and the like in text from outside become the
                control tokens they spell. Then whoever writes an observation can end its turn.
            on_rewrite: What to do with a template that rewrites earlier turns: "segment" (a new training
                segment starts from the conversation as the template then shows it), "keep" (what was
                said stays as it was; the template is never asked for a whole conversation again) or
                "error".
            report: Whether it is logged that the template rewrites.

        Raises:
            ModelError: No template, it refuses the opening, or it rewrites earlier turns and
                `on_rewrite` is "error".
        """
        self.tokenizer = tokenizer
        self.opening = tuple(opening)
        self._template = tokenizer.template
        self._tools = tuple(tools)
        self._variables = dict(variables or {})
        self._defuses = not control_tokens_in_text
        self.trials = Trials(
            self._template, opening=self.opening, tools=self._tools, variables=self._variables
        )
        """What the template does to earlier turns."""
        self._taken: dict[str, bool] = {}
        self._keeps = on_rewrite == "keep"
        self._local = self._keeps or self._differences_are_local()
        closing = self._closing_ids()
        self._closers = self._fresh_closers() | closing if self.trials.closes_last_turn else closing
        """Ids that end an assistant turn: its last, or the first of the next where it has no end."""
        self.stop_token_ids: tuple[int, ...] = tuple(
            # A token that closes a thought too would end a reply before its answer.
            dict.fromkeys([*tokenizer.stop_token_ids, *(closing - self._ids_within_turn())])
        )
        """Ids after which a turn ends."""
        if report:
            self._report(on_rewrite)

    @property
    def may_rewrite(self) -> bool:
        """Whether some turn can change tokens that came before it, so that a new segment starts."""
        return bool(self.trials.what_is_rewritten) and not self._keeps

    @property
    def opens_thought(self) -> bool:
        """Whether a prompt ends with the opening of a thought, which the reply goes on with."""
        return self.trials.opens_thought

    def rewrites(self, role: str, *, thoughts: bool) -> bool:
        """Whether a message of `role` makes the template change what came before it.

        Args:
            role: Of the new message.
            thoughts: Whether the policy generated a thought in the current segment.
        """
        return not self._keeps and self.trials.rewrites(role, thoughts=thoughts)

    def whole_ids(
        self,
        messages: Sequence[Message],
        *,
        encoder: GrowingText | None = None,
        opens_turn: bool = True,
    ) -> list[int]:
        """Ids of opening and `messages`.

        Args:
            messages: Oldest first.
            encoder: One of the conversation's own saves encoding what it has encoded before.
            opens_turn: Whether they go on to where the assistant's next turn starts.
        """
        fuse = mark_absent_from("fuse", messages)
        try:
            text = self._whole(messages, fuse, opens_turn)
        except ModelError:  # some templates check the ids, which a model has made up
            text = self._whole(_with_own_ids(messages), fuse, opens_turn)
        return (encoder or self.tokenizer).encode_rendered(text, fuse=fuse)

    def extension_ids(
        self, history: Sequence[Message], new: Sequence[Message], *, last_id: int | None = None
    ) -> list[int]:
        """Ids that `new` adds after an assistant turn, up to where the next one starts.

        Args:
            history: What came before `new`, opening left out; it ends with the assistant turn. Only
                that is looked at, where the template's differences do not depend on the rest.
            new: Messages of the environment or of tools.
            last_id: Last id of the assistant turn. If it is a stop token, the turn is closed and the
                template's own closing is left out; if not (a length limit), the turn gets closed.
        """
        reply = history[-1]
        fuse = mark_absent_from("fuse", new if self._local else [*history, *new])
        try:
            suffix = self._suffix(history[:-1], reply, new, fuse=fuse, local=self._local)
        except ModelError:  # as for `whole_ids`
            renamed = _with_own_ids([*history, *new])
            place = len(history) - 1
            suffix = self._suffix(
                renamed[:place],
                renamed[place],
                renamed[place + 1 :],
                fuse=fuse,
                local=self._local,
            )
        ids = self.tokenizer.encode_rendered(suffix, fuse=fuse)
        if reply.tool_calls and self.trials.shows_calls:
            # The end of the call's own markup comes first, which the policy has generated.
            first = self._first(ids, self.stop_token_ids)
            if first == len(ids):  # a template that does not close such a turn
                markup = self.trials.end_of_call(reply, suffix)
                return self.tokenizer.encode_rendered(suffix[len(markup) :], fuse=fuse)
            ids = ids[first:]
        if last_id is None or last_id not in self.stop_token_ids:
            return ids
        first = next((k for k, i in enumerate(ids) if self.tokenizer.is_control(i)), len(ids))
        # A line break that the template has before the closing token can't be put there any more.
        closed = first < len(ids) and self._is_blank(ids[:first])
        # One end is enough, also where a fresh turn ends otherwise than an earlier one (gpt-oss). Any
        # other stop token ends no turn; the start of the next turn may be what has ended this one.
        ended = self.trials.closes_last_turn and last_id in self._closers
        if closed and (ids[first] == last_id or ended):
            return ids[first + 1 :]
        return ids

    def takes(self, reply: Message, *, before: str) -> bool:
        """Whether the template shows an assistant turn with all its calls before a message of some role.

        Some show one call a turn, some no text beside a thought and a call, some no call that nobody
        answers.

        Args:
            reply: The turn.
            before: The role of the message that follows: "tool", for the calls' results, or "user".
        """
        if not (reply.tool_calls and self.trials.shows_calls):
            return True
        shape = _shape(reply, before)
        taken = self._taken.get(shape) if shape else None
        if taken is None:
            taken = self._tries(reply, before)
            if shape and len(self._taken) < _MOST_SHAPES:
                self._taken[shape] = taken
        return taken

    def _tries(self, reply: Message, before: str) -> bool:
        following = [Message(role="user", content="next")]
        if before == "tool":
            following = [
                Message(role="tool", content="result", tool_call_id=call.id, name=call.name)
                for call in reply.tool_calls
            ]
        held = _with_own_ids([reply, *following])
        # With a thought that is not shown, the turn is text, and may be too many of these in a row.
        later = [Message(role="assistant", content="answer"), _QUESTION]
        fuse = mark_absent_from("fuse", held)
        try:
            self._suffix([], held[0], held[1:], fuse=fuse, local=True)
            shown = self._defused(map(self._as_rendered, held), fuse)
            self._render([_QUESTION, *shown, *later], tools=())
        except ModelError:
            return False
        return True

    def _report(self, on_rewrite: OnRewrite) -> None:
        what = self.trials.what_is_rewritten
        if not what:
            return
        if on_rewrite == "error":
            raise ModelError(
                f"The chat template rewrites earlier turns ({what}), and agent.on_rewrite is "
                '"error". Set it to "segment" or "keep", or use another template.'
            )
        _log.warning(
            "the chat template rewrites earlier turns (%s); agent.on_rewrite is %r: %s",
            what,
            on_rewrite,
            "they stay as they were said"
            if on_rewrite == "keep"
            else "a new segment then starts from the re-rendered conversation, which costs prompt tokens",
        )

    def _closing_ids(self) -> frozenset[int]:
        """The tokens that follow an assistant turn without calls."""
        found: set[int] = set()
        reply = Message(role="assistant", content="answer")
        for new in self.trials.followers(reply):
            suffix = self._suffix([_QUESTION], reply, [new], fuse="", local=self._local)
            ids = self.tokenizer.encode_rendered(suffix, fuse="")
            first = next((k for k, i in enumerate(ids) if self.tokenizer.is_control(i)), len(ids))
            if first < len(ids) and self._is_blank(ids[:first]):
                found.add(ids[first])
        return frozenset(found)

    def _fresh_closers(self) -> frozenset[int]:
        """The tokens that end the newest turn, which a template may end otherwise than earlier ones."""
        found: set[int] = set()
        for text in self.trials.ends_of_turns:
            ids = self.tokenizer.encode(text, allow_special=True)
            first = self._first(ids, self.tokenizer.stop_token_ids)
            found.update(ids[first : first + 1])
        return frozenset(found)

    def _ids_within_turn(self) -> frozenset[int]:
        """Ids between the start of a thought and the answer that follows it."""
        return frozenset(self.tokenizer.encode(self.trials.within_turn, allow_special=True))

    @staticmethod
    def _first(ids: Sequence[int], wanted: Sequence[int]) -> int:
        """Place of the first of some ids; the length if there is none."""
        return next((k for k, i in enumerate(ids) if i in wanted), len(ids))

    def _is_blank(self, ids: Sequence[int]) -> bool:
        return not self.tokenizer.decode(ids, skip_special=False).strip()

    def _suffix(
        self,
        history: Sequence[Message],
        reply: Message,
        new: Sequence[Message],
        *,
        fuse: str,
        local: bool,
    ) -> str:
        """Text after the assistant turn that stands between `history` and `new`."""
        sentinel = mark_absent_from("reply", new if local else [*history, *new])
        before = (
            [_QUESTION]
            if local
            else [*self.opening, *self._defused(map(self._as_rendered, history), fuse)]
        )
        marked = self.trials.marked(reply, sentinel)
        text = self._render(
            [*before, marked, *self._defused(new, fuse)], tools=() if local else self._tools
        )
        if sentinel not in text:
            raise ModelError(
                "The chat template does not show an assistant's turn before "
                f"{', '.join(message.role for message in new)} messages, so what follows it can't be "
                "told. Use another template (chat_template.jinja in the model's folder)."
            )
        return text.rpartition(sentinel)[2]

    def _whole(self, messages: Sequence[Message], fuse: str, opens_turn: bool) -> str:
        shown = self._defused(map(self._as_rendered, messages), fuse)
        return self._render([*self.opening, *shown], opens_turn=opens_turn)

    def _render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] | None = None,
        opens_turn: bool = True,
    ) -> str:
        return self._template.render(
            messages,
            tools=self._tools if tools is None else tools,
            add_generation_prompt=opens_turn,
            **self._variables,
        )

    def _as_rendered(self, message: Message) -> Message:
        """A message in the fields that the template shows."""
        hidden = (message.reasoning and not self.trials.shows_reasoning) or (
            message.tool_calls and not self.trials.shows_calls
        )
        if message.raw and hidden:
            return Message(role=message.role, content=message.raw, raw=message.raw)
        return message

    def _defused(self, messages: Iterable[Message], fuse: str) -> list[Message]:
        if not fuse:
            return list(messages)
        # What the policy wrote is never read anew, which some templates would refuse (gpt-oss).
        return [
            self._defused_message(message, fuse) if self._defuses or message.raw else message
            for message in messages
        ]

    def _defused_message(self, message: Message, fuse: str) -> Message:
        def plain(text: str) -> str:
            # What the model itself wrote as markup stays markup, where it is rendered as it was said.
            markup = bool(message.raw) and message.content == message.raw
            return self.tokenizer.defuse(text, fuse=fuse, keep_markup=markup)

        def plain_value(value: object) -> object:
            if isinstance(value, str):
                return plain(value)
            if isinstance(value, Mapping):
                held = cast("Mapping[str, object]", value)
                return {plain(k): plain_value(v) for k, v in held.items()}
            if isinstance(value, list):
                return [plain_value(v) for v in cast("list[object]", value)]
            return value

        return replace(
            message,
            content=plain(message.content),
            reasoning=plain(message.reasoning),
            parts=tuple(plain(p) if isinstance(p, str) else p for p in message.parts),
            tool_calls=tuple(
                ToolCall(
                    name=plain(call.name),
                    arguments={plain(k): plain_value(v) for k, v in call.arguments.items()},
                    id=plain(call.id),
                )
                for call in message.tool_calls
            ),
            tool_call_id=plain(message.tool_call_id),
            name=plain(message.name),
        )

    def _differences_are_local(self) -> bool:
        """Whether what follows an assistant turn is the same whatever came before it."""
        return all(
            self._suffix(history, reply, [new], fuse="", local=True)
            == self._suffix(history, reply, [new], fuse="", local=False)
            for reply in self.trials.replies()
            for new in self.trials.followers(reply)
            for history in self.trials.histories()
        )


def _shape(reply: Message, before: str) -> str:
    """What a template can look at in a turn of calls, its texts as such left out.

    Empty where a text may hold markup, which some templates look for.
    """
    if any(mark in text for text in (reply.content, reply.reasoning) for mark in "<["):
        return ""
    calls = [
        (call.name, [(name, type(value).__name__) for name, value in call.arguments.items()])
        for call in reply.tool_calls
    ]
    texts = [bool(text.strip()) for text in (reply.content, reply.reasoning, reply.raw)]
    return repr((before, texts, calls, len({call.id for call in reply.tool_calls})))


def _with_own_ids(messages: Sequence[Message]) -> list[Message]:
    """The conversation with ids of calls that every template takes."""
    ids: dict[str, str] = {}

    def own(call_id: str) -> str:
        return ids.setdefault(call_id, f"call{len(ids):05d}")

    return [
        replace(
            message,
            tool_calls=tuple(replace(call, id=own(call.id)) for call in message.tool_calls),
            tool_call_id=own(message.tool_call_id) if message.tool_call_id else "",
        )
        for message in messages
    ]
