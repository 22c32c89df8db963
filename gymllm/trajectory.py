"""What one episode leaves behind: its tokens, its turns, its reward and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from gymllm.ledger import Segment
from gymllm.message import Message
from gymllm.task import Task


class Ending(StrEnum):
    """How an episode ended. Only the first two have a reward (invariant 3)."""

    TERMINATED = "terminated"  # the environment said so
    TRUNCATED = "truncated"  # a limit was reached; `Trajectory.reason` says which
    FAILED = "failed"  # something broke; `Trajectory.reason` says what. Never trained on


class Turn(NamedTuple):
    """One step of the environment and the action that led to it.

    A tuple, because one is made at every step and a frozen dataclass takes three times as long.
    """

    observation: str
    """What the agent was shown before it acted; of a message with images, its text."""
    action: str
    """What the environment was given."""
    reward: float
    """Reward of the step; among several agents, also of the others' steps until this one's next turn."""
    prompt_tokens: int
    """Length of the turn's first prompt."""
    generated_tokens: int
    """Tokens that the policy generated in the turn, tool calls included."""
    invalid_action: bool = False
    """The environment could not read the action; it was told so and did not move."""
    tool_calls: int = 0
    """Tools that were called in the turn."""
    tool_errors: int = 0
    """Tool calls that could not be read or that raised."""
    engine_s: float = 0.0
    """Seconds waiting for the engine."""
    env_s: float = 0.0
    """Seconds waiting for the environment's step."""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One finished episode, as one agent played it."""

    task: Task
    member: int
    """Which of the group, 0 <= member < group size."""
    attempt: int
    """0, or how many failed episodes of this member came before."""
    agent: str = ""
    """Whose it is, where the environment has several."""
    segments: tuple[Segment, ...]
    """Training sequences: exact tokens."""
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    """The conversation, for reading."""
    ending: Ending
    reason: str = ""
    """Which limit truncated it, or what broke."""
    reward: float = 0.0
    """The return, undiscounted: sum of the turns' rewards, and of any before the first turn."""
    started_ns: int = 0
    """`time.perf_counter_ns` at the start."""
    ended_ns: int = 0
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Further numbers, averaged into the log."""

    @property
    def tokens(self) -> int:
        """Tokens over every segment. Without any (a chat engine): of the last turn, as the server counts."""
        if not self.segments and self.turns:
            return self.turns[-1].prompt_tokens + self.turns[-1].generated_tokens
        return sum(len(s) for s in self.segments)

    @property
    def generated_tokens(self) -> int:
        """Tokens that the policy generated."""
        if not self.segments:
            return sum(turn.generated_tokens for turn in self.turns)
        return sum(int(s.mask.sum()) for s in self.segments)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Every member's trajectory of one task and agent; what a group baseline needs."""

    task: Task
    agent: str = ""
    """Whose they are, where the environment has several."""
    trajectories: tuple[Trajectory, ...]
    """In member order; none of them failed."""

    @property
    def rewards(self) -> tuple[float, ...]:
        """Return of each member."""
        return tuple(t.reward for t in self.trajectories)
