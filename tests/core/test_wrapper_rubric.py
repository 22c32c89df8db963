"""`Rubric`, `RubricReward` and `Judge`: what is rewarded, when, and what happens if it can't be told."""

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded

import gymllm
from gymllm.bridge import run_sync
from gymllm.engine import GenerateRequest, Generation, SamplingParams
from gymllm.engines import ScriptedEngine
from gymllm.errors import ConfigError, EngineError, EnvCrashedError, EnvError, EnvTypeError
from gymllm.wrappers import Episode, Judge, Reward, Rubric, RubricReward
from gymllm.wrappers.judge import judge_prompt, read_score

STOP = 0


class Echo(gymllm.Env):
    """Says what it is told and pays 2 for it; "end" ends the episode."""

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        await asyncio.sleep(0)
        return "begin", {}

    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        await asyncio.sleep(0)
        return f"said {action}", 2.0, action == "end", False, {"own": action}


def brevity(episode: Episode) -> float:
    return 1 / len(episode.last.action)


def moves(episode: Episode) -> int:
    return len(episode.moves)


async def shouting(episode: Episode) -> float:
    await asyncio.sleep(0)
    return float(any(str(move.action).isupper() for move in episode.moves))


def play(
    env: gymnasium.Env[str, str], actions: Sequence[str]
) -> list[tuple[float, dict[str, Any]]]:
    env.reset(seed=0)
    answers = [env.step(action) for action in actions]
    return [(float(reward), info) for _, reward, _, _, info in answers]


def test_rewards_are_added_by_weight_each_when_it_is_due() -> None:
    rubric = Rubric([Reward(brevity, weight=3.0, every_step=True), Reward(moves, weight=-1.0)])
    env = RubricReward(Echo(), rubric)
    for _ in range(2):
        played = play(env, ["ab", "a", "end"])
        assert [reward for reward, _ in played] == [2 + 1.5, 2 + 3.0, 2 + 1.0 - 3]
        assert [info["rewards"] for _, info in played] == [
            {"environment": 2.0, "brevity": 0.5},
            {"environment": 2.0, "brevity": 1.0},
            {"environment": 2.0, "brevity": 1 / 3, "moves": 3.0},
        ]
        assert played[0][1]["own"] == "ab"


def test_the_environments_own_reward_has_a_weight() -> None:
    env = RubricReward(Echo(), Rubric([Reward(moves)]), env_weight=0.0)
    assert [reward for reward, _ in play(env, ["a", "end"])] == [0.0, 2.0]


def test_a_reward_function_sees_the_whole_episode() -> None:
    seen: list[Episode] = []

    def look(episode: Episode) -> float:
        seen.append(episode)
        return 0.0

    play(RubricReward(Echo(), Rubric([Reward(look)])), ["a", "end"])
    (episode,) = seen
    assert [(m.observation, m.action, m.next_observation, m.reward) for m in episode.moves] == [
        ("begin", "a", "said a", 2.0),
        ("said a", "end", "said end", 2.0),
    ]
    assert episode.moves[0].info == {"own": "a"}
    assert (episode.terminated, episode.truncated) == (True, False)


def test_truncation_is_an_end_too() -> None:
    env = RubricReward(gymnasium.wrappers.TimeLimit(Echo(), 2), Rubric([Reward(moves)]))
    assert ["moves" in info["rewards"] for _, info in play(env, ["a", "a"])] == [False, True]


def test_async_rewards_work_in_a_script() -> None:
    env = RubricReward(Echo(), Rubric([Reward(shouting, weight=5.0), Reward(moves)]))
    assert [reward for reward, _ in play(env, ["LOUD", "end"])] == [2.0, 2.0 + 5.0 + 2.0]


@pytest.mark.asyncio
async def test_async_rewards_are_awaited_on_the_pools_loop_without_blocking_it() -> None:
    """Each waits for all the others, so a reward that blocked the loop would never end."""
    count, loops = 4, set[asyncio.AbstractEventLoop]()
    arrived, all_here = [0], asyncio.Event()

    async def meet(episode: Episode) -> float:
        loops.add(asyncio.get_running_loop())
        arrived[0] += 1
        if arrived[0] == count:
            all_here.set()
        await all_here.wait()
        return 1.0

    pool = gymllm.EnvPool(lambda: RubricReward(Echo(), Rubric([Reward(meet)])), count)

    async def episode() -> None:
        async with pool.lease() as env:
            await env.reset(seed=0)
            rewards.append((await env.step("end")).reward)

    rewards: list[float] = []
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            for number in range(count):
                group.start_soon(episode, name=f"episode {number}")
        await pool.aclose()
    assert rewards == [3.0] * count
    assert loops == {asyncio.get_running_loop()}


@pytest.mark.parametrize(
    "value", [None, "1", float("nan"), float("inf"), [1.0], 10**400, np.complex64(1)]
)
def test_what_is_no_finite_number_is_no_reward(value: Any) -> None:
    env = RubricReward(Echo(), Rubric([Reward(lambda episode: value, name="odd")]))
    env.reset()
    with pytest.raises(EnvTypeError, match="reward 'odd' must be a finite number"):
        env.step("end")


@pytest.mark.parametrize("value", [1, True, np.float32(1.0), np.int64(1), np.bool(1)])
def test_any_number_is_a_reward(value: Any) -> None:
    env = RubricReward(Echo(), Rubric([Reward(lambda episode: value, name="one")]))
    (reward, info), *_ = play(env, ["end"])
    assert reward == 3.0
    assert type(info["rewards"]["one"]) is float


def test_whether_a_function_waits_is_known_before() -> None:
    assert not Rubric([Reward(brevity)]).waits
    assert Rubric([Reward(brevity), Reward(shouting)]).waits
    assert Reward(functools.partial(shouting), name="partial").waits


def test_a_hidden_async_function_is_named() -> None:
    env = RubricReward(Echo(), Rubric([Reward(lambda episode: shouting(episode), name="hidden")]))
    env.reset()
    with pytest.raises(ConfigError, match="'hidden' answered with an awaitable"):
        env.step("end")


def test_what_a_reward_raises_leaves_the_step() -> None:
    def broken(episode: Episode) -> float:
        raise KeyError("no file")

    env = RubricReward(Echo(), Rubric([Reward(broken)]))
    env.reset()
    with pytest.raises(KeyError, match="no file"):
        env.step("end")


def test_mistakes_in_a_rubric_are_refused() -> None:
    with pytest.raises(ConfigError, match="names of their own, got \\[\\]"):
        Rubric([])
    with pytest.raises(ConfigError, match="'moves', 'moves'"):
        Rubric([Reward(moves), Reward(brevity, name="moves")])
    with pytest.raises(ConfigError, match="name"):
        Reward(lambda episode: 1.0)
    with pytest.raises(ConfigError, match="name"):
        Reward(moves, name="environment")
    with pytest.raises(ConfigError, match="got nan"):
        Reward(moves, weight=float("nan"))
    with pytest.raises(ConfigError, match="must be Rubric"):
        RubricReward(Echo(), [Reward(moves)])  # type: ignore[arg-type]  # what is tested
    with pytest.raises(ResetNeeded):
        RubricReward(Echo(), Rubric([Reward(moves)])).step("a")


class Letters:
    """A codec of one id a character; "$" is the stop token."""

    stop_token_ids = (STOP,)

    def encode(self, text: str, *, allow_special: bool) -> list[int]:
        return [STOP if allow_special and c == "$" else ord(c) for c in text]

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        return "".join(chr(i) if i != STOP else "" if skip_special else "$" for i in ids)


def make_judge(
    reply: Callable[[str, np.random.Generator], str] | Any,
    max_new_tokens: int = 100,
    **settings: Any,
) -> Judge:
    codec = Letters()
    engine = ScriptedEngine(reply, codec, context_length=4096) if callable(reply) else reply
    return Judge(
        engine,
        question="Was the agent polite?",
        encode=functools.partial(codec.encode, allow_special=False),
        decode=functools.partial(codec.decode, skip_special=True),
        sampling=SamplingParams(max_new_tokens=max_new_tokens, seed=10),
        **settings,
    )


def judged(judge: Judge) -> gymnasium.Env[str, str]:
    return RubricReward(Echo(), Rubric([Reward(judge, name="judge", weight=10.0)]))


def test_a_judge_reads_the_episode_and_its_score_is_the_reward() -> None:
    prompts: list[str] = []

    def reply(prompt: str, rng: np.random.Generator) -> str:
        prompts.append(prompt)
        return "It said please.\nScore: 0.75"

    played = play(judged(make_judge(reply)), ["please$", "end"])
    assert [reward for reward, _ in played] == [2.0, 2.0 + 7.5]
    assert played[1][1]["rewards"]["judge"] == 0.75
    (prompt,) = prompts
    assert "Was the agent polite?" in prompt
    assert (
        "Environment: begin\nAgent: please$\nEnvironment: said please$\n"
        "Agent: end\nEnvironment: said end\n" in prompt
    )


@pytest.mark.asyncio
async def test_a_judge_works_in_the_bridge() -> None:
    env = judged(make_judge(lambda prompt, rng: "Score: 1"))
    await run_sync(env.reset)
    assert (await run_sync(env.step, "end"))[1] == 12.0


def test_an_unreadable_answer_is_asked_again_with_another_seed() -> None:
    answers = iter(["I like it.", "Score: 7/10", "Score: 0.5"])
    draws: list[int] = []

    def reply(prompt: str, rng: np.random.Generator) -> str:
        draws.append(int(rng.integers(1 << 30)))
        return next(answers)

    assert play(judged(make_judge(reply)), ["end"])[0][0] == 2.0 + 5.0
    assert draws == [int(np.random.default_rng(10 + i).integers(1 << 30)) for i in range(3)]


@pytest.mark.parametrize("answer", ["No.", "Score: 2", "Score: -0.5", ""])
def test_a_judge_without_a_score_is_an_env_error_and_no_reward(answer: str) -> None:
    env = judged(make_judge(lambda prompt, rng: answer, tries=2))
    env.reset()
    with pytest.raises(EnvError, match="no score in 2 tries"):
        env.step("end")


def test_a_score_that_was_cut_is_not_read() -> None:
    env = judged(
        make_judge(lambda prompt, rng: "Score: 0.9", max_new_tokens=len("Score: 0"), tries=1)
    )
    env.reset()
    with pytest.raises(EnvError, match="cut at 8 tokens"):
        env.step("end")


def test_a_broken_engine_is_an_env_error() -> None:
    def broken(prompt: str, rng: np.random.Generator) -> str:
        raise KeyError("weights")

    env = judged(make_judge(broken))
    env.reset()
    with pytest.raises(EnvError, match="weights") as raised:
        env.step("end")
    assert isinstance(raised.value.__cause__, EngineError)


def test_an_engine_that_breaks_once_is_asked_again() -> None:
    problems = [KeyError("once")]

    def reply(prompt: str, rng: np.random.Generator) -> str:
        if problems:
            raise problems.pop()
        return "Score: 0"

    assert play(judged(make_judge(reply)), ["end"])[0][1]["rewards"]["judge"] == 0.0


def test_a_prompt_that_is_too_long_is_an_env_error() -> None:
    env = judged(make_judge(lambda prompt, rng: "Score: 1"))
    env.reset()
    env.step("a" * 5000)
    with pytest.raises(EnvError, match="too long for its engine"):
        env.step("end")


class Stuck:
    """An engine that never answers."""

    context_length, version, asked = 4096, 0, 0

    async def generate(self, request: GenerateRequest) -> Generation:
        self.asked += 1
        await anyio.sleep_forever()
        raise AssertionError("unreachable")

    async def aclose(self) -> None: ...


def test_an_engine_that_does_not_answer_is_left_after_its_limit() -> None:
    stuck = Stuck()
    env = judged(make_judge(stuck, tries=2, timeout_s=0.01))
    env.reset()
    with pytest.raises(EnvError, match=r"no answer within timeout_s \(0.01 s\)"):
        env.step("end")
    assert stuck.asked == 2


@pytest.mark.asyncio
async def test_in_the_pool_a_failing_judge_fails_the_episode() -> None:
    pool = gymllm.EnvPool(lambda: judged(make_judge(lambda prompt, rng: "Hm.")), 1)
    async with pool.lease() as env:
        await env.reset(seed=0)
        with pytest.raises(EnvCrashedError, match="no score in 3 tries"):
            await env.step("end")
    await pool.aclose()


def test_the_prompt_can_be_written_otherwise() -> None:
    prompts: list[str] = []

    def reply(prompt: str, rng: np.random.Generator) -> str:
        prompts.append(prompt)
        return "score: 1"

    judge = make_judge(reply, write_prompt=lambda episode, question: f"{moves(episode)}|{question}")
    play(judged(judge), ["end"])
    assert prompts == ["1|Was the agent polite?"]


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Score: 0.7", 0.7),
        ("score 1", 1.0),
        ("It is good.\n\n**Score:** `0.25`.\n", 0.25),
        ("Score: 0.1\nNo, better:\nFinal score = .5", 0.5),
        ("Score: 0", 0.0),
        ("0.7", None),
        ("Score: 0.7 of 1", None),
        ("Score: 7/10", None),
        ("Score: 0.7/1", None),
        ("Score: 70%", None),
        ("Score: 0,7", None),
        ("Score: 1e-3", None),
        ("Score: 1.0.1", None),
        ("Score (0 to 1)", None),
        ("Score: 0.3\nThat is all.", None),
        ("Score: 1.01", None),
        ("Score: -0.0001", None),
        ("underscore: 0.5", None),
        ("", None),
    ],
)
def test_only_a_plain_score_on_the_last_line_is_read(answer: str, score: float | None) -> None:
    assert read_score(answer) == score


def test_settings_of_a_judge_are_checked() -> None:
    for settings, says in (
        ({"tries": 0}, "tries must be >= 1, got 0"),
        ({"timeout_s": 0.0}, "timeout_s must be > 0, got 0.0"),
    ):
        with pytest.raises(ConfigError, match=says):
            make_judge(lambda prompt, rng: "", **settings)
    with pytest.raises(ConfigError, match="question"):
        Judge(Stuck(), question=" ", encode=lambda text: [1], decode=lambda ids: "")


def test_the_default_prompt_says_how_to_answer_in_a_form_that_is_read() -> None:
    seen: list[Episode] = []
    look = Reward(lambda episode: float(bool(seen.append(episode))), name="look")
    play(RubricReward(Echo(), Rubric([look])), ["end"])
    example = judge_prompt(seen[0], "Good?").rpartition("for instance ")[2].strip('".')
    assert read_score(example) == 0.7


def test_weights_and_functions_are_checked() -> None:
    with pytest.raises(ConfigError, match="env_weight must be a finite number, got nan"):
        RubricReward(Echo(), Rubric([Reward(lambda episode: 1.0, name="one")]), env_weight=np.nan)
    with pytest.raises(ConfigError, match="a reward function must be a function, got None"):
        Reward(None)  # type: ignore[arg-type]  # what is tested
