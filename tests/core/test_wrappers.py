"""All wrappers of our own: what they export, and that they stack, are specified, copied and pooled."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, RecordEpisodeStatistics

import gymllm
import gymllm.wrappers
from gymllm.testing import check_env_conformance
from gymllm.transcripts import read_jsonl
from gymllm.wrappers import (
    Episode,
    FewShot,
    History,
    RecordTranscript,
    RetryIdempotentReset,
    Reward,
    Rubric,
    RubricReward,
    TimeLimit,
)

LAKE = "gymllm/FrozenLake-v0"
EXAMPLES = [("The goal is to the right.", "right")]


def brevity(episode: Episode) -> float:
    return 1.0 / len(episode.last.action)


def stacked(folder: Path, env_id: str = LAKE) -> gymnasium.Env[str, str]:
    """Every wrapper at once, between Gymnasium's own."""
    env = gymnasium.make(env_id)
    env = RetryIdempotentReset(env, retry_on=ConnectionError)
    env = RubricReward(env, Rubric([Reward(brevity, every_step=True)]))
    env = FewShot(History(OrderEnforcing(env), turns=2), EXAMPLES)
    env = TimeLimit(PassiveEnvChecker(env), max_turns=3, max_tokens=10_000, count_tokens=len)
    return RecordEpisodeStatistics(RecordTranscript(env, folder))


def json_able(folder: Path) -> gymnasium.Env[str, str]:
    """Those whose arguments are JSON."""
    env = FewShot(History(gymnasium.make(LAKE), turns=2), EXAMPLES)
    return RecordTranscript(TimeLimit(env, max_turns=2, wall_clock_s=60.0), folder)


def play(env: gymnasium.Env[str, str]) -> list[Any]:
    answers: list[Any] = [env.reset(seed=3)]
    while len(answers) == 1 or not (answers[-1][2] or answers[-1][3]):
        answers.append(env.step("down"))
    for answer in answers:
        answer[-1].pop("episode", None)  # it holds a time
    return answers


def test_all_is_sorted_and_complete() -> None:
    exported = gymllm.wrappers.__all__
    assert exported == sorted(exported)
    assert all(hasattr(gymllm.wrappers, name) for name in exported)
    public = {name for name, value in vars(gymllm.wrappers).items() if isinstance(value, type)}
    assert public == set(exported)


def test_every_wrapper_at_once_works_in_a_script(tmp_path: Path) -> None:
    env = stacked(tmp_path)
    first, *steps = play(env)
    assert first[0].startswith("Worked examples:")
    assert first[1]["reset_tries"] == 1
    assert steps[0][0].startswith("So far:")
    assert steps[0][1] == steps[0][-1]["rewards"]["environment"] + 1 / len("down")
    env.close()


def test_every_wrapper_at_once_conforms(tmp_path: Path) -> None:
    check_env_conformance(lambda: json_able(tmp_path))


@pytest.mark.asyncio
async def test_every_wrapper_at_once_works_in_the_pool_as_in_a_script(tmp_path: Path) -> None:
    alone = play(stacked(tmp_path / "script"))
    pool = gymllm.EnvPool(lambda: stacked(tmp_path / "pool"), 2)
    async with pool.lease() as env:
        observation, _ = await env.reset(seed=3)
        assert observation == alone[0][0]
        for answer in alone[1:]:
            result = await env.step("down")
            assert (result.observation, result.reward) == (answer[0], answer[1])
            assert (result.terminated, result.truncated) == (answer[2], answer[3])
    await pool.aclose()
    (recorded,) = read_jsonl(tmp_path / "pool" / "transcript-0.jsonl")
    (as_alone,) = read_jsonl(tmp_path / "script" / "transcript-0.jsonl")
    assert recorded.messages == as_alone.messages
    assert (tmp_path / "pool" / "transcript-0.html").exists()


def test_spec_goes_through_json_and_makes_the_same_stack(tmp_path: Path) -> None:
    env = json_able(tmp_path)
    assert env.spec is not None
    remade = gymnasium.make(EnvSpec.from_json(json.loads(json.dumps(env.spec.to_json()))))
    assert str(remade) == str(env)
    assert play(remade) == play(env)


def test_spec_without_json_makes_the_same_stack_too(tmp_path: Path) -> None:
    env = stacked(tmp_path)
    assert env.spec is not None
    assert play(gymnasium.make(env.spec)) == play(env)


def test_copies_and_pickles_play_on(tmp_path: Path) -> None:
    env = stacked(tmp_path, "gymllm/Arithmetic-v0")
    env.reset(seed=3)
    twin, revived = copy.deepcopy(env), pickle.loads(pickle.dumps(env))
    expected = env.step("3")[:4]
    assert twin.step("3")[:4] == revived.step("3")[:4] == expected


def test_stacks_work_in_gymnasiums_vector_env(tmp_path: Path) -> None:
    envs: Any = SyncVectorEnv([lambda: json_able(tmp_path)] * 2)
    observations, _ = envs.reset(seed=1)
    assert observations in envs.observation_space
    for _ in range(2):
        observations, _, _, truncated, _ = envs.step(("nothing", "nothing"))
    assert truncated.all()
    assert observations in envs.observation_space
    envs.close()
    assert len(list(tmp_path.glob("*.html"))) == 2
