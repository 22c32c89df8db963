"""What an agent is: observations in, actions out, exact tokens kept.

One agent object plays one episode. It is made by an `AgentFactory` from an `EpisodeContext`; it knows the
engine's protocol, and neither the environment's insides nor the trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from gymllm.engine import Engine
from gymllm.ledger import Segment
from gymllm.message import Message
from gymllm.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class EpisodeContext:
    """What an agent is given for one episode."""

    engine: Engine
    seed: int
    """Sampling seed of the episode; a turn's seed is derived from it."""
    name: str
    """The episode's name in traces."""
    timeline: Timeline


@dataclass(frozen=True, kw_only=True)
class Action:
    """What an agent decided in one turn."""

    text: str
    """The action, for the environment's `step`."""
    limit: str = ""
    """Not empty: no action could be made because this limit was reached ("context_length"); the episode
    ends truncated."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    engine_s: float = 0.0


class Agent(Protocol):
    """Plays one episode.

    One that holds something open has an async method `aclose` besides: `run_episode` calls it once the
    episode is over, however it ended, shielded from cancellation.
    """

    async def act(self, observation: Any) -> Action:
        """Appends the observation to the conversation and returns the policy's action.

        Args:
            observation: A text; or a `gymllm.spaces.ChatMessage`, from environments that show images.
        """
        ...

    def segments(self) -> tuple[Segment, ...]:
        """The exact tokens so far."""
        ...

    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, for reading."""
        ...


AgentFactory = Callable[[EpisodeContext], Agent]
