"""Supervised data: trajectories that a run has written, or chats, as sequences to imitate.

Of a trajectory the exact tokens are taken, so it must be of the same tokenizer. A chat is said again,
message by message, through the conversation that an agent would have: its tokens are those that the policy
would have seen and made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import anyio
import numpy as np

from gymllm.agent import EpisodeContext
from gymllm.engines.scripted import ScriptedEngine
from gymllm.errors import ConfigError, GymLLMError
from gymllm.ledger import Segment
from gymllm.message import Message
from gymllm.timeline import Timeline
from gymllm.trajectory import Ending
from gymllm.transcripts import from_json
from gymllm_agents import (
    ChatFormat,
    Conversation,
    ConversationConfig,
    PlainParser,
    Tokenizer,
)
from gymllm_trainers.tree import TrainingSequence

_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig:
    """What algorithm.preset sft imitates."""

    files: tuple[Path, ...] = ()
    """JSONL files, or folders of them, such as a run's trajectories/. A line is a trajectory, as runs write
    them, or a chat: {"messages": [{"role": "user", "content": "..."}, ...]}."""
    min_reward: float | None = None
    """Trajectories with a lower reward are left out; none takes all. Chats have none and are all taken."""
    examples_per_step: int = 32
    """Trajectories or chats in an optimizer step. When all were seen they come again, in another order."""

    def __post_init__(self) -> None:
        if self.examples_per_step < 1:
            raise ConfigError(
                f"supervised.examples_per_step must be >= 1, got {self.examples_per_step}."
            )


Example = tuple[Segment, ...]
"""The segments of one trajectory or chat."""


def load_examples(
    config: SupervisedConfig,
    tokenizer: Tokenizer,
    agent: ConversationConfig,
    *,
    context_length: int,
) -> list[Example]:
    """Everything in the files that can be imitated, in their order.

    Args:
        config: Which files, and what is taken of them.
        tokenizer: The model's.
        agent: How chats are shown to the model: its template's variables, what a rewrite does. Its own
            system prompt and examples are not added.
        context_length: Longest sequence, in tokens.

    Raises:
        ConfigError: A file is missing or has a line that is neither; or nothing is left.
    """
    paths = find_files(config)
    reader = _ChatReader(tokenizer, agent, context_length=context_length)
    examples: list[Example] = []
    seen = poor = long = 0
    for path in paths:
        for number, line in _lines(path):
            seen += 1
            where = f"{path}, line {number}"
            example = _example(line, where, config.min_reward, reader)
            if example is None:
                poor += 1
            elif not example or any(len(segment) > context_length for segment in example):
                long += 1
            else:
                _check_ids(example, tokenizer, where)
                examples.append(example)
    if not examples:
        raise ConfigError(
            f"nothing to imitate: of {seen} lines in {', '.join(map(str, config.files))}, {poor} failed, "
            f"have no tokens of a policy or a reward below supervised.min_reward {config.min_reward}, and "
            f"{long} are longer than engine.context_length {context_length}."
        )
    return examples


def find_files(config: SupervisedConfig) -> list[Path]:
    """The files that hold the examples, those of folders by name.

    Raises:
        ConfigError: None is set, one does not exist, or a folder has none.
    """
    if not config.files:
        raise ConfigError(
            "algorithm.preset sft needs data: set supervised.files to JSONL files of trajectories or "
            "chats, such as a run's trajectories/."
        )
    return list(_files(config.files))


def imitation(segments: Sequence[Segment]) -> list[TrainingSequence]:
    """Segments as sequences whose every generated token is imitated; those without one are left out."""
    return [
        TrainingSequence(
            ids=segment.ids,
            mask=segment.mask.astype(np.float32),
            behaviour=segment.logprobs,
            advantage=np.ones(len(segment), np.float32),
        )
        for segment in segments
        if segment.mask[1:].any()
    ]


def batches(count: int, size: int, *, seed: int, first: int) -> Iterator[list[int]]:
    """Numbers of the examples of each step from `first` on, without an end.

    All are seen once before any is seen again, each time in another order. The same arguments give the
    same numbers, so a resumed run goes on as if it had never stopped.

    Args:
        count: Examples there are.
        size: Of a batch.
        seed: Decides the orders.
        first: Batches that are left out at the beginning.
    """
    position = first * size
    while True:
        batch: list[int] = []
        while len(batch) < size:
            epoch, offset = divmod(position, count)
            order = np.random.default_rng((seed, epoch)).permutation(count)
            taken = order[offset : offset + size - len(batch)]
            batch += taken.tolist()
            position += len(taken)
        yield batch


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            found = sorted(path.glob("*.jsonl"))
            if not found:
                raise ConfigError(f"supervised.files: there is no .jsonl file in {path}.")
            yield from found
        elif path.is_file():
            yield path
        else:
            raise ConfigError(f"supervised.files: {path} does not exist.")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that aren't empty, with their numbers from 1; a last one torn by a crash is left out."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if line.strip() and (line.endswith("\n") or _is_json(line)):
                yield number, line


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _example(
    line: str, where: str, min_reward: float | None, reader: _ChatReader
) -> Example | None:
    """None: it is not wanted, or has nothing to imitate. Empty: a chat that is too long."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}.") from error
    if isinstance(record, dict) and "segments" in record:
        trajectory = from_json(line)
        if trajectory.ending is Ending.FAILED:
            return None
        if min_reward is not None and not trajectory.reward >= min_reward:
            return None
        segments = trajectory.segments
    elif isinstance(record, dict) and isinstance(record.get("messages"), list):
        try:
            segments = reader.segments([_message(each) for each in record["messages"]])
        except GymLLMError as error:
            raise ConfigError(f"{where}: {error}") from error
        if not segments:
            return ()
    else:
        raise ConfigError(
            f'{where} is neither a trajectory (with "segments") nor a chat (with "messages").'
        )
    return segments if any(segment.mask[1:].any() for segment in segments) else None


def _message(record: object) -> Message:
    if not isinstance(record, Mapping):
        raise ConfigError(f"a message must be a mapping with role and content, got {record!r}.")
    fields = cast("Mapping[str, object]", record)
    role, content = fields.get("role"), fields.get("raw") or fields.get("content")
    if role not in _ROLES or not isinstance(content, str):
        raise ConfigError(
            f"a message needs a role of {', '.join(_ROLES)} and its text as content, got {dict(fields)}."
        )
    if fields.get("tool_calls") and not fields.get("raw"):
        raise ConfigError(
            "a message has tool_calls: write them into its content, in the model's own form of calls."
        )
    return Message(role=str(role), content=content)


def _check_ids(example: Example, tokenizer: Tokenizer, where: str) -> None:
    largest = max(int(segment.ids.max()) for segment in example)
    if largest >= tokenizer.vocab_size:
        raise ConfigError(
            f"{where} has token {largest}, but the model's tokenizer has {tokenizer.vocab_size}: it was "
            "made with another model. Give its messages alone, as a chat."
        )


class _ChatReader:
    """Says chats again, with their own answers instead of a model's."""

    def __init__(
        self, tokenizer: Tokenizer, agent: ConversationConfig, *, context_length: int
    ) -> None:
        self._tokenizer = tokenizer
        # The chat's own words alone, however long.
        self._config = replace(
            agent,
            system_prompt="",
            few_shot=(),
            max_new_tokens=context_length,
            compaction="none",
        )
        self._context_length = context_length
        self._formats: dict[tuple[Message, ...], ChatFormat] = {}

    def segments(self, messages: Sequence[Message]) -> Example:
        """The tokens of a chat; those of its assistant messages have mask 1. Empty if it is too long.

        Raises:
            ConfigError: It does not start with a user's message after system messages, or roles don't
                take turns.
            ModelError: The chat template refuses it.
        """
        opening = tuple(m for m in messages if m.role == "system")
        turns = messages[len(opening) :]
        if any(message.role == "system" for message in turns) or not turns:
            raise ConfigError("system messages must come first, and others after them.")
        if opening not in self._formats:
            self._formats[opening] = ChatFormat(
                self._tokenizer,
                opening=opening,
                variables=self._config.template_variables,
                control_tokens_in_text=self._config.control_tokens_in_text,
                on_rewrite=self._config.on_rewrite,
                report=False,
            )
        return anyio.run(self._say, self._formats[opening], turns)

    async def _say(self, chat: ChatFormat, turns: Sequence[Message]) -> Example:
        answers = iter([m.content for m in turns if m.role == "assistant"])
        engine = ScriptedEngine(
            lambda prompt, rng: next(answers), self._tokenizer, context_length=self._context_length
        )
        context = EpisodeContext(engine=engine, seed=0, name="chat", timeline=Timeline(1))
        conversation = Conversation(chat, self._config, context, parser=PlainParser(()))
        new: list[Message] = []
        for message in turns:
            if message.role != "assistant":
                new.append(message)
                continue
            if not new:
                raise ConfigError("an assistant's message must follow a user's or a tool's.")
            if (await conversation.reply(*new)).limit:
                return ()
            new = []
        segments = conversation.segments()
        # An answer that fills the context may have been cut off there.
        cut = any(len(segment) >= self._context_length for segment in segments)
        return () if cut else segments
