"""A conversation with a policy, token for token.

`Conversation` owns the ledger: it appends what is new, asks the engine, appends what came back.
Agents differ in what they say and in what they make of the answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, cast, final

from gymllm.agent import EpisodeContext
from gymllm.engine import GenerateRequest, Generation, SamplingParams
from gymllm.errors import ConfigError, LedgerError, ModelError, UnknownNameError
from gymllm.ledger import Segment, TokenLedger
from gymllm.message import Message, ToolCall
from gymllm.task import derive_seed
from gymllm_agents.chat_format import ChatFormat, OnRewrite
from gymllm_agents.growing_text import GrowingText
from gymllm_agents.parsers import ParsedReply, Said, ToolCallParser, UnreadableCall
from gymllm_agents.template_trials import Variable

CONTEXT_LENGTH = "context_length"
"""`Action.limit` of a turn that did not fit into the engine's context."""
SUMMARY_REQUEST = (
    "Our conversation is about to become too long. Sum up all of it that is needed to go on: the task, "
    "what was done, what is known, what is left to do. Answer with the summary alone."
)
DEEPEST_ARGUMENTS = 64
"""Levels of objects and lists in a call's arguments; deeper ones are refused."""
_SUMMED_UP = "A summary of what came before:"
_LEFT_OUT = "[{count} earlier messages were left out here]"


@dataclass(frozen=True, kw_only=True)
class ConversationConfig:
    """What the policy is told, and how it answers."""

    system_prompt: str = ""
    """Opens the conversation; empty sends no system message (some templates then add their own)."""
    few_shot: tuple[Message, ...] = ()
    """Example messages between the system prompt and the first observation; user, assistant, ..."""
    max_new_tokens: int = 64
    """Most tokens of one answer, >= 1; less where the engine's context leaves less."""
    temperature: float = 1.0
    """Softmax temperature of sampling, >= 0; 0 is greedy."""
    on_rewrite: OnRewrite = "segment"
    """What to do when the chat template rewrites earlier turns (drops `<think>` text, say): start a new
    training segment from the re-rendered conversation; keep earlier turns as they were said, against
    the template; or refuse such templates at start-up."""
    control_tokens_in_text: bool = False
    """Whether `<|im_end|>` and the like in an observation or a tool's result become the control tokens
    they spell. They are plain text otherwise, so nobody but the policy can end a turn."""
    template_variables: Mapping[str, Variable] = field(default_factory=dict[str, Variable])
    """What the chat template may read besides the conversation ("enable_thinking": false)."""
    compaction: Literal["none", "drop", "summarise"] = "none"
    """What to do when the context nears its end: nothing (the episode is truncated), drop old turns, or
    have the policy sum them up. What is left starts a new training segment."""
    compact_at: float = 0.8
    """Share of the engine's context that a prompt and its answer may take before that, > 0, <= 1."""
    keep_turns: int = 2
    """Newest turns that "drop" keeps, >= 1; the first turn always stays, for it says what the task is."""
    summary_tokens: int = 256
    """Most tokens of a summary, >= 1."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "keep_turns", "summary_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"agent.{name} must be >= 1, got {getattr(self, name)}.")
        if not self.temperature >= 0:
            raise ConfigError(f"agent.temperature must be >= 0, got {self.temperature}.")
        if not 0 < self.compact_at <= 1:
            raise ConfigError(f"agent.compact_at must be > 0 and <= 1, got {self.compact_at}.")
        for name, value, known in (
            ("agent.on_rewrite", self.on_rewrite, ("segment", "keep", "error")),
            ("agent.compaction", self.compaction, ("none", "drop", "summarise")),
        ):
            if value not in known:
                raise UnknownNameError(name, value, known)
        for name in ("messages", "tools", "add_generation_prompt"):
            if name in self.template_variables:
                raise ConfigError(
                    f"agent.template_variables can't set {name!r}, which the conversation decides."
                )
        for message in self.few_shot:
            if message.role not in ("user", "assistant", "tool"):
                raise ConfigError(
                    "agent.few_shot roles must be user, assistant or tool (the system prompt has "
                    f"its own setting), got {message.role!r}."
                )
        if self.few_shot and self.few_shot[-1].role != "assistant":
            raise ConfigError(
                "agent.few_shot must end with an assistant message, as an observation follows; it "
                f"ends with {self.few_shot[-1].role!r}."
            )

    @property
    def opening(self) -> tuple[Message, ...]:
        """The messages before the first observation."""
        if not self.system_prompt:
            return self.few_shot
        return (Message(role="system", content=self.system_prompt), *self.few_shot)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the policy answered."""

    text: str
    """What is outside of reasoning and calls, without control tokens."""
    reasoning: str = ""
    """What it thought before."""
    calls: tuple[ToolCall | UnreadableCall, ...] = ()
    """The tools it called, in its order."""
    raw: str = ""
    """All of it, control tokens included, but for the stop token that ended it."""
    limit: str = ""
    """Not empty: there is no answer, because this limit was reached."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    engine_s: float = 0.0


class Dialogue(Protocol):
    """A conversation with a model, whatever stands behind it."""

    @property
    def lists_tools(self) -> bool:
        """Whether the model is told of tools in a way of its own, with a role for their results."""
        ...

    async def reply(self, *new: Message) -> Reply:
        """Says `new` and returns the model's answer."""
        ...

    def segments(self) -> tuple[Segment, ...]:
        """The exact tokens so far; none where the engine gives none."""
        ...

    def messages(self) -> tuple[Message, ...]:
        """Everything said so far, opening included."""
        ...


@final
class Conversation:
    """One conversation's exact tokens and messages. Single owner."""

    def __init__(
        self,
        chat: ChatFormat,
        config: ConversationConfig,
        context: EpisodeContext,
        *,
        parser: ToolCallParser,
        lists_tools: bool = False,
    ) -> None:
        """Starts one.

        Args:
            chat: Messages to ids.
            config: Its settings.
            context: The episode and its engine.
            parser: Reads reasoning and calls in the answers.
            lists_tools: Whether the chat template lists tools, and has a role for their results.
        """
        self.lists_tools = lists_tools
        self._chat, self._config, self._context, self._parser = chat, config, context, parser
        self._ledger = TokenLedger()
        # Without it each turn that the template rewrites would encode all of the conversation.
        self._rendered = GrowingText(chat.tokenizer) if chat.may_rewrite else None
        self._said: list[Message] = []
        """Everything, for reading."""
        self._messages: list[Message] = []
        """What the policy has in its context."""
        self._replies = self._calls = 0
        self._thoughts = False  # the policy generated a thought in the current segment
        self._over = ""  # why nothing more can be said

    async def reply(self, *new: Message) -> Reply:
        """Says `new` and returns the policy's answer.

        Cancelling it frees the engine's slot; the conversation can't be used afterwards.

        Raises:
            EngineError: The engine broke.
            LedgerError: An earlier reply was not finished or met a limit.
            ModelError: A message holds an image, which this engine can't take.
        """
        if self._over:
            raise LedgerError(f"this conversation is over, as {self._over}; start a new one.")
        if any(message.parts for message in new):
            raise ModelError(
                "The observation holds an image, and this engine takes token ids alone, which no image "
                "has. Use an engine that takes messages (openai), or an environment that describes "
                "what it shows in text."
            )
        shown = self._as_taken(before=new[0].role)
        if shown is not self._messages and new[0].role == "tool":
            # Of calls that are not shown as such no template shows results as such.
            new = (Message(role="user", content="\n".join(message.content for message in new)),)
        self._messages, said = shown, new
        starts = rewritten = self._replies > 0 and self._chat.rewrites(
            new[0].role, thoughts=self._thoughts
        )
        if self._replies == 0 or rewritten:
            ids = self._whole_ids(new)
        else:
            ids = self._chat.extension_ids(self._messages, new, last_id=self._ledger.last_id)
        kept = 0 if rewritten else len(self._ledger)
        spent = Reply(text="")
        if self._is_too_long(kept + len(ids)) and (compacted := await self._compact(new)):
            spent, new = compacted
            ids, kept, starts = self._whole_ids(new), 0, True
        self._said.extend(said)
        room = self._context.engine.context_length - kept - len(ids)
        if room < 1:
            # Nothing is appended: no segment grows past what an engine or trainer can hold.
            self._over = "it reached the engine's context length"
            return replace(spent, limit=CONTEXT_LENGTH, prompt_tokens=kept + len(ids))
        if starts:
            self._ledger.start_segment()
            self._thoughts = False
        self._messages.extend(new)
        self._ledger.append_context(ids)
        reply = await self._generate(min(self._config.max_new_tokens, room))
        if not spent.generated_tokens:
            return reply
        return replace(
            reply,
            generated_tokens=reply.generated_tokens + spent.generated_tokens,
            engine_s=reply.engine_s + spent.engine_s,
        )

    def segments(self) -> tuple[Segment, ...]:
        """The exact tokens so far."""
        return self._ledger.segments()

    def messages(self) -> tuple[Message, ...]:
        """Everything said so far, opening included."""
        return (*self._chat.opening, *self._said)

    def _whole_ids(self, new: Sequence[Message]) -> list[int]:
        return self._chat.whole_ids([*self._messages, *new], encoder=self._rendered)

    def _as_taken(self, *, before: str) -> list[Message]:
        """What the policy has in its context, before a message of some role.

        Calls that the template refuses, or does not show all of, are shown as the text that they were
        generated as.
        """
        if not self._messages or self._chat.takes(self._messages[-1], before=before):
            return self._messages
        *earlier, reply = self._messages
        return [*earlier, Message(role=reply.role, content=reply.raw, raw=reply.raw)]

    def _is_too_long(self, prompt: int) -> bool:
        """Whether the context must be compacted before a prompt of so many tokens, and can be."""
        if self._config.compaction == "none" or not self._messages:
            return False
        most = self._config.compact_at * self._context.engine.context_length
        return prompt + self._config.max_new_tokens > most

    async def _compact(self, new: Sequence[Message]) -> tuple[Reply, tuple[Message, ...]] | None:
        """Shortens what the policy has in its context.

        Returns:
            What that took, and the new messages as they are to be said after it; None where nothing can
            be left out.
        """
        if self._config.compaction == "summarise":
            summary = await self._sum_up()
            if summary is not None:
                first = self._messages[0].content
                told = "\n\n".join([first, _SUMMED_UP, summary.text, *map(_as_text, new)])
                self._messages = []
                return summary, (Message(role="user", content=told),)
        shorter = _without_old_turns(self._messages, self._config.keep_turns)
        if shorter is None:
            return None
        self._messages = shorter
        return Reply(text=""), tuple(new)

    async def _sum_up(self) -> Reply | None:
        """Has the policy write a summary, as the end of the current segment; None without room."""
        request = Message(role="user", content=SUMMARY_REQUEST)
        before, self._messages = self._messages, self._as_taken(before="user")
        if self._chat.rewrites("user", thoughts=self._thoughts):
            ids, kept = self._whole_ids([request]), 0
        else:
            last_id = self._ledger.last_id
            ids = self._chat.extension_ids(self._messages, [request], last_id=last_id)
            kept = len(self._ledger)
        room = self._context.engine.context_length - kept - len(ids)
        if room < 1:
            self._messages = before
            return None
        if not kept:
            self._ledger.start_segment()
            self._thoughts = False
        self._messages.append(request)
        self._said.append(request)
        self._ledger.append_context(ids)
        return await self._generate(min(self._config.summary_tokens, room))

    async def _generate(self, max_new_tokens: int) -> Reply:
        prompt = self._ledger.ids
        request = GenerateRequest(
            prompt_ids=prompt,
            sampling=SamplingParams(
                max_new_tokens=max_new_tokens,
                temperature=self._config.temperature,
                stop_token_ids=self._chat.stop_token_ids,
                seed=derive_seed("turn", self._context.seed, self._replies),
            ),
            request_id=f"{self._context.name}/{self._replies}",
        )
        self._over = "its last request was not answered"
        started = time.perf_counter_ns()
        with self._context.timeline.span(self._context.name, "generate", prompt_tokens=len(prompt)):
            generation = await self._context.engine.generate(request)
        engine_s = (time.perf_counter_ns() - started) / 1e9
        self._ledger.append_generation(generation, prompt_length=len(prompt))
        self._over = ""
        said = self._read(generation)
        parsed = self._parser.parse(said)
        calls = tuple(map(self._usable, parsed.calls))
        message = _assistant_message(said.text, replace(parsed, calls=calls))
        self._messages.append(message)
        self._said.append(message)
        self._thoughts |= bool(parsed.reasoning) or "</think>" in said.text
        self._replies += 1
        return Reply(
            text=self._chat.tokenizer.without_special(parsed.text),
            reasoning=parsed.reasoning,
            calls=calls,
            raw=said.text,
            prompt_tokens=len(prompt),
            generated_tokens=len(generation.token_ids),
            engine_s=engine_s,
        )

    def _usable(self, call: ToolCall | UnreadableCall) -> ToolCall | UnreadableCall:
        """A call with an id, for templates that show one, whether the model wrote one or not."""
        self._calls += 1
        if isinstance(call, ToolCall) and _depth(call.arguments) > DEEPEST_ARGUMENTS:
            problem = f"The arguments are nested deeper than {DEEPEST_ARGUMENTS} levels."
            return UnreadableCall(problem=problem, id=call.id, name=call.name)
        # Nine letters and digits: Mistral's templates take no other.
        return call if call.id else replace(call, id=f"call{self._calls - 1:05d}")

    def _read(self, generation: Generation) -> Said:
        ids = generation.token_ids.tolist()
        stopped = ids[-1] in self._chat.stop_token_ids
        tokenizer = self._chat.tokenizer
        text, controls = tokenizer.decode_marked(ids[:-1] if stopped else ids)
        return Said(
            text=text,
            controls=controls,
            vocabulary=tokenizer.control_tokens,
            in_thought=self._chat.opens_thought,
            stopped_by=tokenizer.decode(ids[-1:], skip_special=False) if stopped else "",
        )


def _assistant_message(raw: str, parsed: ParsedReply) -> Message:
    """What was said, in parts where all of it could be read."""
    calls = tuple(call for call in parsed.calls if isinstance(call, ToolCall))
    if len(calls) < len(parsed.calls):
        return Message(role="assistant", content=raw, raw=raw)
    return Message(
        role="assistant",
        content=parsed.text,
        reasoning=parsed.reasoning,
        tool_calls=calls,
        raw=raw,
    )


def _depth(value: object) -> int:
    """How deep objects and lists are nested, up to just beyond `DEEPEST_ARGUMENTS`."""
    level, depth = [value], 0
    while level and depth <= DEEPEST_ARGUMENTS:
        inner: list[object] = []
        for held in level:
            if isinstance(held, Mapping):
                inner.extend(cast("Mapping[str, object]", held).values())
            elif isinstance(held, list):
                inner.extend(cast("list[object]", held))
        level = inner
        depth += 1
    return depth


def _as_text(message: Message) -> str:
    if message.role == "tool":
        return f"The result of {message.name or 'the tool'}:\n{message.content}"
    return message.content


def _without_old_turns(messages: Sequence[Message], keep_turns: int) -> list[Message] | None:
    """The first turn and the newest ones, a turn being a user message and all up to the next one.

    In a long loop of calls, where users say too little, it is an answer and its calls' results, and the
    first turn lasts until the first results. None if there are no others.
    """
    users = [i for i, message in enumerate(messages) if message.role == "user"]
    if len(users) > keep_turns + 1:
        first_end, rest = users[1], users[-keep_turns]
    else:
        loop = [i for i in range(1, len(messages)) if _follows_result(messages, i)]
        starts = sorted(users + loop)
        if not loop or len(starts) <= keep_turns + 1:
            return None
        # Where it is cut, a result is followed by an answer: users and answers must alternate.
        first_end, rest = loop[0], starts[-keep_turns]
        rest -= messages[rest].role == "user"
        if rest <= first_end:
            return None
    note = _LEFT_OUT.format(count=rest - first_end)
    first, newest = list(messages[:first_end]), list(messages[rest:])
    if newest[0].role == "user":
        newest[0] = replace(newest[0], content=f"{note}\n{newest[0].content}")
    else:  # a message of its own would be one that not every template takes there
        first[-1] = replace(first[-1], content=f"{first[-1].content}\n{note}")
    return [*first, *newest]


def _follows_result(messages: Sequence[Message], at: int) -> bool:
    return messages[at].role == "assistant" and messages[at - 1].role == "tool"
