"""`RecordTranscript`: every episode as a line of JSON, and all of them as a page to read."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, SupportsFloat, TypeVar

import gymnasium
from gymnasium.utils import RecordConstructorArgs

from gymllm.errors import ConfigError
from gymllm.message import Message
from gymllm.spaces import TextOrMessage
from gymllm.task import Task
from gymllm.trajectory import Ending, Trajectory, Turn
from gymllm.transcripts import append_jsonl, read_jsonl, write_html

Obs = TypeVar("Obs", bound=TextOrMessage)
Act = TypeVar("Act", bound=TextOrMessage)


class RecordTranscript(gymnasium.Wrapper[Obs, Act, Obs, Act], RecordConstructorArgs):
    """Writes what was shown and done, `gymllm.transcripts` style.

    Each wrapped environment writes a file of its own, `<name>-<number>.jsonl`: many may share a folder, in
    several processes too. An episode is written when it ends, so a crash costs no more than the one that was
    being played: by its last step; by a step that raised, as *failed*; by a reset or `close` before its end,
    as truncated by "reset" or "close". `close` also writes `<name>-<number>.html`. Images are noted by their
    size only, the seed of a reset without one is -1, and there are no token ids, because an environment sees
    none. A reset that raises leaves nothing.
    """

    def __init__(
        self, env: gymnasium.Env[Obs, Act], folder: str | Path, *, name: str = "transcript"
    ) -> None:
        """Wraps `env`.

        Args:
            env: What is recorded.
            folder: Where files go; made if need be, at the first episode's end.
            name: What file names start with.

        Raises:
            ConfigError: `folder` is a file, or `name` holds a slash.
        """
        RecordConstructorArgs.__init__(self, folder=str(folder), name=name)
        super().__init__(env)
        self._folder, self._name = Path(folder), name
        if self._folder.exists() and not self._folder.is_dir():
            raise ConfigError(f"folder must be one, or new, but {folder} is a file.")
        if Path(name).name != name and name:
            raise ConfigError(
                f"name must be the start of a file's name, got {name!r}; give folders as folder=."
            )
        self._path: Path | None = None
        self._episodes = 0
        self._task: Task | None = None  # of the episode that is being played
        self._shown = ""
        self._turns: list[Turn] = []
        self._started_ns = 0

    @property
    def path(self) -> Path | None:
        """The JSON lines; None before the first episode's end."""
        return self._path

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        self._end(Ending.TRUNCATED, "reset")
        self._started_ns = time.perf_counter_ns()
        observation, info = self.env.reset(seed=seed, options=options)
        spec = self.env.unwrapped.spec
        self._task = Task(
            index=self._episodes,
            id=spec.id if spec is not None else type(self.env.unwrapped).__name__,
            seed=-1 if seed is None else seed,
            options={str(name): _written(value) for name, value in (options or {}).items()},
        )
        self._turns, self._shown = [], as_read(observation)
        return observation, info

    def step(self, action: Act) -> tuple[Obs, SupportsFloat, bool, bool, dict[str, Any]]:
        started = time.perf_counter_ns()
        try:
            result = self.env.step(action)
        except BaseException as error:  # cancellation too: the pool's limit ends a step so
            self._end(Ending.FAILED, f"{type(error).__name__}: {error}", as_read(action))
            raise
        observation, reward, terminated, truncated, info = result
        self._turns.append(
            Turn(
                observation=self._shown,
                action=as_read(action),
                reward=float(reward),
                prompt_tokens=0,
                generated_tokens=0,
                invalid_action=bool(info.get("invalid_action", False)),
                env_s=(time.perf_counter_ns() - started) / 1e9,
            )
        )
        self._shown = as_read(observation)
        if terminated:
            self._end(Ending.TERMINATED, "")
        elif truncated:
            self._end(Ending.TRUNCATED, str(info.get("truncated_by", "environment")))
        return result

    def close(self) -> None:
        try:
            self._end(Ending.TRUNCATED, "close")
            if self._path is not None:
                page = self._path.with_suffix(".html")
                write_html(page, read_jsonl(self._path), title=self._path.stem)
        finally:  # a full disk must not keep the environment open
            self.env.close()

    def _end(self, ending: Ending, reason: str, last_action: str | None = None) -> None:
        if self._task is None:
            return
        said = [text for turn in self._turns for text in (turn.observation, turn.action)]
        said += [self._shown] if last_action is None else [self._shown, last_action]
        roles = ("user", "assistant")
        trajectory = Trajectory(
            task=self._task,
            member=0,
            attempt=0,
            segments=(),
            turns=tuple(self._turns),
            messages=tuple(Message(role=roles[i % 2], content=s) for i, s in enumerate(said)),
            ending=ending,
            reason=reason,
            reward=sum(turn.reward for turn in self._turns),
            started_ns=self._started_ns,
            ended_ns=time.perf_counter_ns(),
        )
        self._task = None
        self._episodes += 1
        if self._path is None:
            self._path = _new_file(self._folder, self._name)
        append_jsonl(self._path, trajectory)


def _written(option: object) -> object:
    """An option as it is, or in words where JSON can't hold it: no episode fails of its transcript."""
    try:
        json.dumps(option, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return repr(option)
    return option


def as_read(content: TextOrMessage) -> str:
    """The text of an observation or action, an image noted as its size."""
    if isinstance(content, str):
        return content
    return "\n".join(
        part["text"]
        if part["type"] == "text"
        else f"[image, {part['image'].shape[1]} x {part['image'].shape[0]}]"
        for part in content["content"]
    )


def _new_file(folder: Path, name: str) -> Path:
    """An empty file that nobody else has: the first free number."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        path = folder / f"{name}-{number}.jsonl"
        try:
            path.open("x").close()
        except FileExistsError:
            number += 1
        else:
            return path
