"""Plays episodes as an agent would: calls of tools, then submit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gymllm.message import ToolCall
from gymllm.tool_calls import write_calls
from gymllm_envs.swe.env import SWE
from gymllm_envs.swe.task import SweTask


def call(name: str, **arguments: object) -> str:
    """An action."""
    return write_calls([ToolCall(name=name, arguments=arguments)])


def bash(command: str) -> str:
    return call("bash", command=command)


SUBMIT = call("submit")


@dataclass
class Played:
    """How an episode went."""

    reward: float
    info: dict[str, Any]
    observations: list[str] = field(default_factory=list[str])

    @property
    def said(self) -> str:
        """Why it isn't resolved, and what was left out."""
        left = "; ".join(f"{path}: {why}" for path, why in self.info["left_out"].items())
        return f"{self.info['reason']} | {left}"


async def play(task: SweTask, *actions: str, **settings: Any) -> Played:
    """An episode of these actions, and a submission."""
    env = SWE(tasks=[task], **settings)
    try:
        observation, info = await env.areset(seed=0)
        observations = [observation]
        for action in (*actions, SUBMIT):
            observation, reward, terminated, truncated, info = await env.astep(action)
            observations.append(observation)
            if terminated or truncated:
                return Played(float(reward), info, observations)
    finally:
        await env.aclose()
    raise AssertionError("submit didn't end the episode")
