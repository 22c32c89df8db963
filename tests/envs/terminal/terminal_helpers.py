"""A task to attack, and how one is played."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymllm.message import ToolCall
from gymllm.tool_calls import write_calls
from gymllm_envs.terminal.env import TerminalEnv
from gymllm_envs.terminal.task import TerminalTask

SUBMIT = "```bash\nsubmit\n```"


def bash(command: str) -> str:
    """An action."""
    return f"```bash\n{command}\n```"


def call(name: str, **arguments: object) -> str:
    """An action that is one call."""
    return write_calls([ToolCall(name=name, arguments=arguments)])


@dataclass(frozen=True, kw_only=True)
class Played:
    """How an episode went."""

    first: str
    texts: list[str]
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]

    @property
    def reason(self) -> str:
        return str(self.info["check"]["reason"])


def play(task: TerminalTask | str, *actions: str, **settings: Any) -> Played:
    """Plays actions, in an environment of its own, until the episode ends."""
    if isinstance(task, TerminalTask):
        settings["tasks"], task = [task], task.id
    with closing(TerminalEnv(**settings)) as env:
        first, _ = env.reset(seed=0, options={"task": task})
        texts: list[str] = []
        for action in actions:
            text, reward, terminated, truncated, info = env.step(action)
            texts.append(text)
            if terminated or truncated:
                break
    return Played(
        first=first,
        texts=texts,
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        info=info,
    )


def hello_task(folder: Path, **more: Any) -> TerminalTask:
    """Solved by a file out.txt with the checker's own text in it."""
    tests = folder / "tests"
    tests.mkdir(exist_ok=True)
    (tests / "expected.txt").write_text("hello\n")
    (tests / "test.sh").write_text("cmp out.txt /tests/expected.txt\n")
    made: dict[str, Any] = {"check": "bash /tests/test.sh", "file_mb": 8, **more}
    return TerminalTask(id="hello", instruction="Say hello in out.txt.", tests=tests, **made)
