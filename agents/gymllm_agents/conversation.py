"""A conversation with a policy, token for token, and the plain agent that holds one.

`Conversation` owns the ledger: it appends what is new, asks the engine, appends what came back.
Agents differ in what they say and in what they make of the answer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, final

from gymllm.agent import Action, AgentFactory, EpisodeContext
from gymllm.engine import GenerateRequest, SamplingParams
from gymllm.errors import ConfigError, LedgerError, ModelError
from gymllm.ledger import Segment, TokenLedger
from gymllm.message import Message
from gymllm.task import derive_seed
from gymllm_agents.chat_format import ChatFormat
from gymllm_agents.tokenizer import Tokenizer

CONTEXT_LENGTH = "context_length"
"""`Action.limit` of a turn that did not fit into the engine's context."""


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
    on_rewrite: Literal["segment", "error"] = "segment"
    """What to do when the chat template rewrites earlier turns: start a new training segment from
    the re-rendered conversation, or refuse such templates at start-up."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"agent.max_new_tokens must be >= 1, got {self.max_new_tokens}.")
        if not self.temperature >= 0:
            raise ConfigError(f"agent.temperature must be >= 0, got {self.temperature}.")
        if self.on_rewrite not in ("segment", "error"):
            raise ConfigError(
                f'agent.on_rewrite must be "segment" or "error", got {self.on_rewrite!r}.'
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
    """Its text, without control tokens that are special."""
    limit: str = ""
    """Not empty: there is no answer, because this limit was reached."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    engine_s: float = 0.0


@final
class Conversation:
    """One conversation's exact tokens and messages. Single owner."""

    def __init__(
        self, chat: ChatFormat, config: ConversationConfig, context: EpisodeContext
    ) -> None:
        self._chat, self._config, self._context = chat, config, context
        self._ledger = TokenLedger()
        self._messages: list[Message] = []
        self._replies = 0
        self._thoughts = False  # the policy generated <think> text in the current segment
        self._over = ""  # why nothing more can be said

    async def reply(self, *new: Message) -> Reply:
        """Says `new` and returns the policy's answer.

        Cancelling it frees the engine's slot; the conversation can't be used afterwards.

        Raises:
            EngineError: The engine broke.
            LedgerError: An earlier reply was not finished or met a limit.
        """
        if self._over:
            raise LedgerError(f"this conversation is over, as {self._over}; start a new one.")
        rewritten = self._replies > 0 and self._chat.rewrites(new[0].role, thoughts=self._thoughts)
        history = self._messages[:-1]  # up to the assistant turn that `new` follows
        self._messages.extend(new)
        if self._replies == 0 or rewritten:
            ids = self._chat.whole_ids(self._messages)
            kept = 0
        else:
            ids = self._chat.extension_ids(history, new, last_id=self._ledger.last_id)
            kept = len(self._ledger)
        room = self._context.engine.context_length - kept - len(ids)
        if room < 1:
            # Nothing is appended: no segment grows past what an engine or trainer can hold.
            self._over = "it reached the engine's context length"
            return Reply(text="", limit=CONTEXT_LENGTH, prompt_tokens=kept + len(ids))
        if rewritten:
            self._ledger.start_segment()
            self._thoughts = False
        self._ledger.append_context(ids)
        return await self._generate(room)

    def segments(self) -> tuple[Segment, ...]:
        """The exact tokens so far."""
        return self._ledger.segments()

    def messages(self) -> tuple[Message, ...]:
        """Everything said so far, opening included."""
        return (*self._chat.opening, *self._messages)

    async def _generate(self, room: int) -> Reply:
        prompt = self._ledger.ids
        request = GenerateRequest(
            prompt_ids=prompt,
            sampling=SamplingParams(
                max_new_tokens=min(self._config.max_new_tokens, room),
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
        ids = [int(i) for i in generation.token_ids]
        shown = ids[:-1] if ids[-1] in self._chat.stop_token_ids else ids
        said = self._chat.tokenizer.decode(shown, skip_special=False)
        self._messages.append(Message(role="assistant", content=said, raw=said))
        self._thoughts |= "</think>" in said
        self._replies += 1
        return Reply(
            text=self._chat.tokenizer.decode(shown, skip_special=True),
            prompt_tokens=len(prompt),
            generated_tokens=len(ids),
            engine_s=engine_s,
        )


@final
class ConversationAgent:
    """Says each observation as a user message; the policy's whole answer is the action."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation

    @staticmethod
    def factory(tokenizer: Tokenizer, config: ConversationConfig | None = None) -> AgentFactory:
        """Makes agents that share the tokenizer, the opening and what is known of the template.

        Raises:
            ModelError: The tokenizer has no chat template, or one that can't be used like this.
        """
        config = config or ConversationConfig()
        chat = ChatFormat(tokenizer, opening=config.opening)
        refuse_rewrites(chat, config)
        return lambda context: ConversationAgent(Conversation(chat, config, context))

    async def act(self, observation: str) -> Action:
        """Says the observation and returns the answer.

        Raises:
            EngineError: The engine broke.
        """
        reply = await self._conversation.reply(Message(role="user", content=observation))
        return Action(
            text=reply.text,
            limit=reply.limit,
            prompt_tokens=reply.prompt_tokens,
            generated_tokens=reply.generated_tokens,
            engine_s=reply.engine_s,
        )

    def segments(self) -> tuple[Segment, ...]:
        """The exact tokens so far."""
        return self._conversation.segments()

    def messages(self) -> tuple[Message, ...]:
        """Everything said so far, opening included."""
        return self._conversation.messages()


def refuse_rewrites(chat: ChatFormat, config: ConversationConfig) -> None:
    """Raises `ModelError` if the template can rewrite earlier turns and the config refuses that."""
    if config.on_rewrite == "error" and chat.may_rewrite:
        raise ModelError(
            "The chat template rewrites earlier turns (it drops <think> text, or moves what it "
            'adds), and agent.on_rewrite is "error". Set it to "segment", or use another template.'
        )
