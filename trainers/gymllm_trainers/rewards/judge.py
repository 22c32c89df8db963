"""A language model as a reward model: `gymllm.wrappers.Judge`, asked about a finished trajectory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import final

import numpy as np

from gymllm.chat_engine import ChatEngine, ChatRequest
from gymllm.engine import Engine, GenerateRequest, Generation, SamplingParams
from gymllm.errors import ConfigError
from gymllm.message import Message
from gymllm.trajectory import Trajectory
from gymllm.wrappers.judge import Judge, judge_prompt
from gymllm.wrappers.rubric import Episode, Move
from gymllm_agents import ChatFormat, Tokenizer
from gymllm_trainers.rewards.config import RewardConfig

_TENTHS = tuple(f"Score: {tenth / 10:g}" for tenth in range(11))
_GRAMMAR = r"[^\n]{1,400}\nScore: (0|1|0\.[0-9])"


@final
class JudgeReward:
    """Asks a model to score an episode, from 0 to 1; see `Judge`, which reads the answers.

    The model is shown the conversation as it was: what the policy wrote, its thoughts and tool calls
    included, and what it was answered. The policy can learn to write what a judge likes to read.
    """

    def __init__(
        self,
        engine: Engine | ChatEngine,
        config: RewardConfig,
        *,
        tokenizer: Tokenizer | None = None,
        sampling: SamplingParams | None = None,
    ) -> None:
        """Keeps the engine; does not close it.

        Args:
            engine: The model, of tokens or of messages.
            config: The question, the form of the answer, and how often it is asked for.
            tokenizer: The engine's, with a chat template; a chat engine needs none.
            sampling: How answers are sampled; by default at temperature 1.

        Raises:
            ConfigError: An engine of tokens without a tokenizer, or a chat engine whose answers should be
                held to a form.
            ModelError: The tokenizer's chat template can't be used.
        """
        forms = {"grammar": {"regex": _GRAMMAR}, "choices": {"choices": _TENTHS}}
        sampling = sampling or SamplingParams(
            max_new_tokens=config.max_new_tokens, **forms.get(config.answer, {})
        )
        encode: Callable[[str], Sequence[int]]
        decode: Callable[[Sequence[int]], str]
        if isinstance(engine, ChatEngine):
            if config.answer != "text":
                raise ConfigError(
                    f"reward.answer {config.answer} is for a judge whose tokens are sampled here; a chat "
                    "engine can't be held to a form. Set it to text."
                )
            engine = _Characters(engine)
            encode, decode = _to_characters, _from_characters
        elif tokenizer is None:
            raise ConfigError("a judge of tokens needs its tokenizer=, got none.")
        else:
            form = ChatFormat(tokenizer, report=False)
            # The policy wrote some of it: what spells a control token there is none.
            encode = functools.partial(_prompt_ids, form)
            decode = functools.partial(tokenizer.decode, skip_special=True)
            stops = sampling.stop_token_ids or form.stop_token_ids
            sampling = replace(sampling, stop_token_ids=stops)
        self._judge = Judge(
            engine,
            question=config.question,
            encode=encode,
            decode=decode,
            sampling=sampling,
            write_prompt=_choice_prompt if config.answer == "choices" else judge_prompt,
            tries=config.tries,
            timeout_s=config.timeout_s / config.tries,
        )

    async def score(self, trajectory: Trajectory) -> float:
        """The model's score, from 0 to 1.

        Raises:
            EnvError: It gave none in `tries` answers, or broke at each.
        """
        return await self._judge(episode_of(trajectory))


def episode_of(trajectory: Trajectory) -> Episode:
    """The conversation as an episode: an action is all that the policy wrote between two other messages."""
    shown: list[str] = []
    said: list[str] = []
    moves: list[tuple[str, str]] = []
    for message in trajectory.messages:
        if message.role == "system":
            continue
        if message.role == "assistant":
            said.append(_written(message))
            continue
        if said:
            moves.append(("\n".join(shown), "\n".join(said)))
            shown, said = [], []
        shown.append(message.content)
    if said or not moves:
        moves.append(("\n".join(shown), "\n".join(said)))
        shown = []
    end = "\n".join([*shown, f"(the episode ended: {trajectory.ending})"])
    following = [*(observation for observation, _ in moves[1:]), end]
    return Episode(
        moves=[
            Move(
                observation=observation, action=action, next_observation=after, reward=0.0, info={}
            )
            for (observation, action), after in zip(moves, following, strict=True)
        ],
        terminated=trajectory.ending == "terminated",
        truncated=trajectory.ending == "truncated",
    )


def _written(message: Message) -> str:
    calls = [f"[calls {call.name} with {dict(call.arguments)}]" for call in message.tool_calls]
    thought = [f"(thinks) {message.reasoning}"] if message.reasoning else []
    return "\n".join(part for part in [*thought, message.content, *calls] if part)


def _choice_prompt(episode: Episode, question: str) -> str:
    """The judge's prompt for an answer of one line."""
    head, _, _ = judge_prompt(episode, question).rpartition(" Say in a sentence")
    return f'{head} Answer with one line: "Score: " and a number from 0 (worst) to 1 (best).'


def _prompt_ids(form: ChatFormat, text: str) -> list[int]:
    return form.whole_ids([Message(role="user", content=text)])


@final
class _Characters:
    """A chat engine as an engine whose ids are the characters of one user message, for `Judge`."""

    version = 0
    context_length = 1 << 30

    def __init__(self, engine: ChatEngine) -> None:
        self._engine = engine

    async def generate(self, request: GenerateRequest) -> Generation:
        """The answer's characters; nobody knows its tokens, so their log-probabilities are 0."""
        message = Message(role="user", content=_from_characters(request.prompt_ids))
        reply = await self._engine.chat(
            ChatRequest(
                messages=[message], sampling=request.sampling, request_id=request.request_id
            )
        )
        ids = np.array(_to_characters(reply.message.content) or [ord(" ")], np.int32)
        return Generation(
            token_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            versions=np.zeros(len(ids), np.int32),
            finish_reason=reply.finish_reason,
        )

    async def aclose(self) -> None:
        """The chat engine is closed by who made it."""


def _to_characters(text: str) -> list[int]:
    return [ord(character) for character in text]


def _from_characters(ids: Iterable[int]) -> str:
    return "".join(map(chr, ids))
