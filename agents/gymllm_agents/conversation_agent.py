"""The agent that a person subclasses, and the plain one.

An agent is a conversation and what is made of its replies: `answer` gets an observation, says what it
wants to the model, as often as it wants, and returns the action.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Self, cast, final

from gymllm.agent import Action, AgentFactory, EpisodeContext
from gymllm.errors import GymLLMError
from gymllm.ledger import Segment
from gymllm.message import Message
from gymllm.spaces import Image, TextOrMessage
from gymllm_agents.conversation import ConversationConfig, Dialogue, Reply
from gymllm_agents.setting import Setting
from gymllm_agents.tokenizer import Tokenizer


class LimitReachedError(Exception):
    """A reply met a limit; `ConversationAgent.act` makes it the episode's truncation."""

    def __init__(self, limit: str) -> None:
        super().__init__(limit)
        self.limit = limit


class ConversationAgent(ABC):
    """Plays one episode by a conversation; override `answer`.

    Example:
        class Planner(ConversationAgent):
            async def answer(self, observation):
                await self.say(observation, "Write a short plan.")
                return (await self.say("Now the next action, and nothing else.")).text
    """

    config_class: ClassVar[type[ConversationConfig]] = ConversationConfig

    def __init__(self, dialogue: Dialogue) -> None:
        """Builds one; `factory` is the way to get them."""
        self._dialogue = dialogue
        self._context: EpisodeContext | None = None
        self._action = Action(text="")

    @classmethod
    def factory(
        cls, tokenizer: Tokenizer | None, config: ConversationConfig | None = None
    ) -> AgentFactory:
        """Makes agents that share the tokenizer, the opening and what is known of the template.

        Args:
            tokenizer: Has a chat template. None: for chat engines alone (OpenAI), which need none.
            config: Defaults to `config_class()`.

        Raises:
            ModelError: The tokenizer has no chat template, or one that can't be used like this.
        """
        setting = Setting(tokenizer, config or cls.config_class())
        return lambda context: cls(setting.open(context)).bind(context)

    def bind(self, context: EpisodeContext) -> Self:
        """Says which episode it plays; for factories of your own."""
        self._context = context
        return self

    @property
    def context(self) -> EpisodeContext:
        """The episode: its name, seed, engine and timeline."""
        if self._context is None:
            raise GymLLMError("this agent plays no episode; its factory must call bind(context).")
        return self._context

    @property
    def lists_tools(self) -> bool:
        """Whether the model is told of tools in a way of its own, with a role for their results."""
        return self._dialogue.lists_tools

    @abstractmethod
    async def answer(self, observation: TextOrMessage) -> str:
        """The action for an observation.

        Raises:
            Exception: Anything ends the run but `EngineError`, which fails the episode.
        """

    async def say(self, *messages: TextOrMessage | Message) -> Reply:
        """Says something to the model, as one user message or in roles of your own, and returns its answer.

        Raises:
            LimitReachedError: There is no answer; let it through.
            EngineError: The engine broke.
            GymLLMError: Nothing is said, or texts together with messages in other roles than "user".
        """
        if not messages:
            raise GymLLMError("say needs something to say, got nothing.")
        if all(isinstance(message, Message) for message in messages):
            said = cast("tuple[Message, ...]", messages)
        else:
            said = (_user_message(messages),)
        reply = await self._dialogue.reply(*said)
        seen = self._action
        self._action = replace(
            seen,
            prompt_tokens=seen.prompt_tokens or reply.prompt_tokens,
            generated_tokens=seen.generated_tokens + reply.generated_tokens,
            engine_s=seen.engine_s + reply.engine_s,
        )
        if reply.limit:
            raise LimitReachedError(reply.limit)
        return reply

    def count_calls(self, calls: int, errors: int) -> None:
        """Adds to what the turn's record says of tools."""
        seen = self._action
        self._action = replace(
            seen, tool_calls=seen.tool_calls + calls, tool_errors=seen.tool_errors + errors
        )

    @final
    async def act(self, observation: TextOrMessage) -> Action:
        """Says the observation and returns the action.

        Raises:
            EngineError: The engine broke.
        """
        self._action = Action(text="")
        text = limit = ""
        try:
            text = await self.answer(observation)
        except LimitReachedError as reached:
            limit = reached.limit
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GymLLMError(
                f"{type(self).__name__}.answer must return the action, a str, got {text!r}. Of a reply "
                "that is `reply.text`."
            )
        return replace(self._action, text=text, limit=limit)

    def segments(self) -> tuple[Segment, ...]:
        """The exact tokens so far."""
        return self._dialogue.segments()

    def messages(self) -> tuple[Message, ...]:
        """Everything said so far, opening included."""
        return self._dialogue.messages()


def _user_message(parts: Sequence[TextOrMessage | Message]) -> Message:
    """One user message of everything that is said at once."""
    said: list[str | Image] = []
    for part in parts:
        if isinstance(part, str):
            said.append(part)
        elif isinstance(part, Message):
            if part.role != "user":
                raise GymLLMError(
                    "say takes texts and observations, which become one user message, or messages "
                    f"alone, got a {part.role!r} message beside others."
                )
            said.extend(part.parts or (part.content,))
        elif not isinstance(part, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GymLLMError(f"say takes texts, observations and messages, got {part!r}.")
        else:
            said.extend(p["text"] if p["type"] == "text" else p["image"] for p in part["content"])
    text = "\n".join(part for part in said if isinstance(part, str))
    images = any(not isinstance(part, str) for part in said)
    return Message(role="user", content=text, parts=tuple(said) if images else ())
