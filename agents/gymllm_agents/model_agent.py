"""Agents without tools: the whole answer is the action, or a part of it."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import ClassVar, final

from gymllm.agent import AgentFactory
from gymllm.errors import ConfigError
from gymllm.spaces import TextOrMessage
from gymllm_agents.conversation import ConversationConfig, Dialogue
from gymllm_agents.conversation_agent import ConversationAgent
from gymllm_agents.setting import Setting
from gymllm_agents.tokenizer import Tokenizer


@final
class ModelAgent(ConversationAgent):
    """Says each observation as a user message; the policy's whole answer is the action.

    What it thought (`<think>`) is not part of its answer.
    """

    async def answer(self, observation: TextOrMessage) -> str:
        """The answer's text."""
        return (await self.say(observation)).text


@dataclass(frozen=True, kw_only=True)
class FormatConfig(ConversationConfig):
    """A conversation's settings and the form of an action in an answer."""

    tag: str = "action"
    """The action is what is in the last `<tag>...</tag>`."""
    pattern: str = ""
    """Not empty: a regular expression instead; the action is its last match: the group "action", else the
    first group, else all of it."""
    asks: int = 1
    """How often the policy is asked again, in the same turn, where its answer has no action, >= 0. Then
    the whole answer is the action."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.asks < 0:
            raise ConfigError(f"agent.asks must be >= 0, got {self.asks}.")
        if not self.pattern and not re.fullmatch(r"[\w.-]+", self.tag):
            raise ConfigError(
                f"agent.tag must be a name of letters, digits, '_', '-' or '.', got {self.tag!r}."
            )
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(
                f"agent.pattern is no regular expression ({error}): {self.pattern!r}."
            ) from error


@final
class FormatAgent(ConversationAgent):
    """Takes the action out of the policy's answer, by a tag or a regular expression."""

    config_class: ClassVar[type[ConversationConfig]] = FormatConfig

    def __init__(self, dialogue: Dialogue, config: FormatConfig) -> None:
        """Builds one; `factory` is the way to get them."""
        super().__init__(dialogue)
        self._asks = config.asks
        self._pattern = re.compile(config.pattern, re.DOTALL) if config.pattern else None
        self._open, self._close = f"<{config.tag}>", f"</{config.tag}>"
        form = f"the form {config.pattern}" if config.pattern else f"{self._open}...{self._close}"
        self._again = f"Your answer has no action in it. Answer again, with it in {form}."

    @classmethod
    def factory(
        cls, tokenizer: Tokenizer | None, config: ConversationConfig | None = None
    ) -> AgentFactory:
        """Makes agents that share the tokenizer, the opening and what is known of the template.

        Raises:
            ConfigError: The config is no `FormatConfig`.
            ModelError: The tokenizer has no chat template, or one that can't be used like this.
        """
        config = config or FormatConfig()
        if not isinstance(config, FormatConfig):
            raise ConfigError(f"A FormatAgent needs a FormatConfig, got a {type(config).__name__}.")
        setting = Setting(tokenizer, config)
        return lambda context: cls(setting.open(context), config).bind(context)

    async def answer(self, observation: TextOrMessage) -> str:
        """The action in the answer, which is asked for again where there is none."""
        reply = await self.say(observation)
        for _ in range(self._asks):
            if self._found(reply.text) is not None:
                break
            reply = await self.say(self._again)
        found = self._found(reply.text)
        return reply.text if found is None else found

    def _found(self, text: str) -> str | None:
        if self._pattern is None:
            # The last closing tag decides, and the opening one nearest before it.
            end = text.rfind(self._close)
            start = text.rfind(self._open, 0, max(end, 0))
            return text[start + len(self._open) : end].strip() if 0 <= start < end else None
        last = next(iter(deque(self._pattern.finditer(text), maxlen=1)), None)
        if last is None:
            return None
        groups = last.groupdict()
        if "action" in groups:
            return groups["action"] or ""
        return (last.group(1) or "") if last.re.groups else last.group()
