"""A language model as a judge of finished trajectories, through each kind of engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from gymllm.chat_engine import ChatReply, ChatRequest
from gymllm.engine import FinishReason
from gymllm.engines.scripted import ScriptedEngine
from gymllm.errors import ConfigError, EngineError, EnvError
from gymllm.message import Message, ToolCall
from gymllm.task import Task
from gymllm.timeline import Timeline
from gymllm.trajectory import Ending, Trajectory
from gymllm_agents import Tokenizer, train_tokenizer
from gymllm_trainers.engine import EngineConfig, JaxEngine
from gymllm_trainers.models import random_decoder, tiny_config
from gymllm_trainers.rewards import JudgeReward, RewardConfig, apply_rewards, open_reward
from gymllm_trainers.rewards.judge import episode_of

CONFIG = RewardConfig(kind="judge", model="policy", question="Was the agent polite?", tries=2)


def trajectory(*messages: Message) -> Trajectory:
    return Trajectory(
        task=Task(index=0, id="t", seed=0),
        member=0,
        attempt=0,
        segments=(),
        turns=(),
        messages=messages,
        ending=Ending.TERMINATED,
        reward=1.0,
    )


PLAYED = trajectory(
    Message(role="system", content="Be brief."),
    Message(role="user", content="hello"),
    Message(
        role="assistant",
        content="please <|im_end|> wait",
        reasoning="who is it?",
        tool_calls=(ToolCall(name="look", arguments={"where": "up"}),),
    ),
    Message(role="tool", content="a bird"),
    Message(role="assistant", content="a bird, thanks"),
    Message(role="user", content="goodbye"),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["Score: 0.5 a sentence of words, please"] * 10, vocab_size=320)


def scripted(tokenizer: Tokenizer, answer: Callable[[str], str]) -> ScriptedEngine:
    return ScriptedEngine(lambda prompt, rng: answer(prompt), tokenizer, context_length=8192)


def test_an_episode_is_the_conversation_without_the_system_prompt() -> None:
    episode = episode_of(PLAYED)
    assert [(move.observation, move.action) for move in episode.moves] == [
        ("hello", "(thinks) who is it?\nplease <|im_end|> wait\n[calls look with {'where': 'up'}]"),
        ("a bird", "a bird, thanks"),
    ]
    assert episode.moves[0].next_observation == "a bird"
    assert episode.last.next_observation == "goodbye\n(the episode ended: terminated)"
    assert episode.terminated
    assert not episode.truncated


def test_an_episode_without_a_turn_can_be_judged() -> None:
    (move,) = episode_of(trajectory(Message(role="user", content="hello"))).moves
    assert (move.observation, move.action) == ("hello", "")


@pytest.mark.asyncio
async def test_an_engine_of_tokens_reads_the_conversation(tokenizer: Tokenizer) -> None:
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return "It thanked.\nScore: 0.75"

    engine = scripted(tokenizer, answer)
    async with open_reward(CONFIG, engine=engine, tokenizer=tokenizer) as judge:
        (scored,) = await apply_rewards([PLAYED], judge, CONFIG)
    assert scored.reward == 1.75
    (prompt,) = prompts
    assert "Was the agent polite?" in prompt
    assert "Agent: a bird, thanks\nEnvironment: goodbye" in prompt
    # What the policy wrote opens or ends no turn: one turn of the user, one of the judge.
    ids = tokenizer.encode(prompt, allow_special=True)
    assert prompt.count("<|im_end|>") == 2  # its text, and the end of the prompt's turn
    assert ids.count(tokenizer.token_to_id("<|im_start|>")) == 2


@pytest.mark.asyncio
async def test_a_judge_without_a_score_fails_the_episode(tokenizer: Tokenizer) -> None:
    judge = JudgeReward(scripted(tokenizer, lambda prompt: "Fine."), CONFIG, tokenizer=tokenizer)
    with pytest.raises(EnvError, match="no score in 2 tries"):
        await judge.score(PLAYED)
    (scored,) = await apply_rewards([PLAYED], judge, CONFIG)
    assert scored.ending is Ending.FAILED
    assert scored.reason.startswith("RewardError: EnvError: the judge gave no score in 2 tries")


def test_tokens_need_a_tokenizer(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="needs its tokenizer"):
        JudgeReward(scripted(tokenizer, lambda prompt: ""), CONFIG)


@pytest.mark.asyncio
async def test_the_runs_own_engine_must_be_given() -> None:
    with pytest.raises(ConfigError, match="the run's own engine, and there is none"):
        async with open_reward(CONFIG):
            pass


class Chat:
    """A chat engine that answers what a function says."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        self.answer = answer
        self.seeds: list[int] = []

    async def chat(self, request: ChatRequest) -> ChatReply:
        self.seeds.append(request.sampling.seed)
        assert request.sampling.stop_token_ids == ()
        (message,) = request.messages
        return ChatReply(
            message=Message(role="assistant", content=self.answer(message.content)),
            finish_reason=FinishReason.STOP,
        )


@pytest.mark.asyncio
async def test_a_chat_engine_is_asked_with_one_message() -> None:
    prompts: list[str] = []
    answers = iter(["", "Très bien 👍\nScore: 1"])

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return next(answers)

    chat = Chat(answer)
    assert await JudgeReward(chat, CONFIG).score(PLAYED) == 1.0
    assert chat.seeds == [0, 1]
    assert prompts[0] == prompts[1]
    assert "please <|im_end|> wait" in prompts[0]


@pytest.mark.asyncio
async def test_a_chat_engine_that_breaks_is_no_score() -> None:
    def answer(prompt: str) -> str:
        raise EngineError("502")

    with pytest.raises(EnvError, match="502"):
        await JudgeReward(Chat(answer), CONFIG).score(PLAYED)


def test_a_chat_engine_is_held_to_nothing() -> None:
    config = RewardConfig(kind="judge", model="policy", question="?", answer="choices")
    with pytest.raises(ConfigError, match="can't be held to a form"):
        JudgeReward(Chat(str), config)


# ---------------------------------------------------------------------- held to a form


@pytest_asyncio.fixture
async def engine(tokenizer: Tokenizer) -> AsyncIterator[JaxEngine]:
    decoder = random_decoder(tiny_config(tokenizer.vocab_size), seed=0)
    config = EngineConfig(slots=2, context_length=1024)
    made = JaxEngine(decoder, config, timeline=Timeline(), tokenizer=tokenizer)
    await asyncio.to_thread(made.ready.wait)
    yield made
    await made.aclose()


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("form", ["grammar", "choices"])
async def test_a_model_that_knows_nothing_gives_a_score_in_the_form(
    engine: JaxEngine, tokenizer: Tokenizer, form: str
) -> None:
    config = RewardConfig(
        kind="judge",
        model="policy",
        question="?",
        answer=form,  # type: ignore[arg-type]  # one of its values
        max_new_tokens=600,
        tries=1,
    )
    async with open_reward(config, engine=engine, tokenizer=tokenizer) as judge:
        assert judge is not None
        score = await judge.score(PLAYED)
    assert round(10 * score) / 10 == pytest.approx(score)
    assert 0 <= score <= 1
