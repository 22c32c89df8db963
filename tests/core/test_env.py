"""`Env`: one object that is synchronous under Gymnasium and asynchronous in the pool."""

import asyncio
import copy
import pickle
import threading
from typing import Any

import gymnasium
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, RecordEpisodeStatistics, TimeLimit

import gymllm
from gymllm.bridge import run_sync
from gymllm.errors import ClosedError, EnvTypeError
from gymllm.spaces import Unicode


class Countdown(gymllm.Env):
    """Ends after as many steps as it drew at the reset; waits in each."""

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012  # Gymnasium's own form

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.left = 0
        self.closes = 0
        self.loops: list[asyncio.AbstractEventLoop] = []

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        await asyncio.sleep(0)
        self.loops.append(asyncio.get_running_loop())
        self.left = int(self.np_random.integers(2, 6))
        return f"{self.left} left", {"seed": seed, "options": options}

    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        await asyncio.sleep(0)
        self.loops.append(asyncio.get_running_loop())
        self.left -= 1
        return f"{self.left} left", 1.0, self.left == 0, False, {"action": action}

    async def aclose(self) -> None:
        await asyncio.sleep(0)
        self.closes += 1


def play(env: gymnasium.Env[str, str], seed: int) -> list[str]:
    observation, _ = env.reset(seed=seed)
    observations, ended = [observation], False
    while not ended:
        observation, _, terminated, truncated, _ = env.step("go")
        observations.append(observation)
        ended = terminated or truncated
    return observations


def test_passes_gymnasiums_check_env() -> None:
    gymnasium.register("gymllm-test/Countdown-v0", Countdown)
    try:
        check_env(gymnasium.make("gymllm-test/Countdown-v0").unwrapped)
    finally:
        del gymnasium.registry["gymllm-test/Countdown-v0"]


def test_works_in_a_script_and_in_a_thread() -> None:
    env, answers = Countdown(), list[list[str]]()
    answers.append(play(env, seed=1))
    thread = threading.Thread(target=lambda: answers.append(play(env, seed=1)))
    thread.start()
    thread.join()
    assert answers[0] == answers[1]
    assert len(set(env.loops)) == 1


@pytest.mark.asyncio
async def test_works_in_a_notebook() -> None:
    env = Countdown()
    assert play(env, seed=1)[-1] == "0 left"
    assert set(env.loops) != {asyncio.get_running_loop()}
    env.close()


@pytest.mark.asyncio
async def test_works_on_the_running_loop_through_stock_wrappers() -> None:
    inner = Countdown()
    env = TimeLimit(RecordEpisodeStatistics(OrderEnforcing(PassiveEnvChecker(inner))), 50)
    observation, info = await run_sync(env.reset, seed=1, options={"a": 1})
    assert observation == f"{inner.left} left"
    assert info == {"seed": 1, "options": {"a": 1}}
    terminated = False
    while not terminated:
        _, _, terminated, _, info = await run_sync(env.step, "go")
    assert info["episode"]["r"] == info["episode"]["l"]
    await run_sync(env.close)
    assert inner.closes == 1
    assert set(inner.loops) == {asyncio.get_running_loop()}


@pytest.mark.asyncio
async def test_both_faces_are_equal_step_by_step() -> None:
    bridged = await run_sync(play, Countdown(), 7)
    assert bridged == play(Countdown(), 7)


def test_seed_reaches_np_random() -> None:
    assert play(Countdown(), 3) == play(Countdown(), 3)
    env = Countdown()
    env.reset(seed=9)
    assert env.np_random_seed == 9


def test_step_before_reset_raises() -> None:
    with pytest.raises(ResetNeeded, match="Countdown"):
        Countdown().step("go")


def test_step_after_done_raises() -> None:
    env = Countdown()
    play(env, seed=0)
    with pytest.raises(ResetNeeded, match="terminated or truncated"):
        env.step("go")
    env.reset(seed=0)
    env.step("go")


@pytest.mark.asyncio
async def test_step_after_a_cancelled_step_raises() -> None:
    class Hangs(Countdown):
        async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    env = Hangs()
    await run_sync(env.reset)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await run_sync(env.step, "go")
    with pytest.raises(ResetNeeded):
        await run_sync(env.step, "go")
    await run_sync(env.reset)


def test_close_runs_aclose_once_and_then_refuses_use() -> None:
    env = Countdown()
    env.reset(seed=0)
    env.close()
    env.close()
    assert env.closes == 1
    with pytest.raises(ClosedError, match="Countdown"):
        env.reset()
    with pytest.raises(ClosedError):
        env.step("go")


def test_instances_have_spaces_of_their_own() -> None:
    first, second = Countdown(), Countdown()
    assert first.action_space == second.action_space == Unicode()
    assert first.action_space is not second.action_space
    assert first.observation_space is not first.action_space


def test_render_gives_the_last_observation() -> None:
    env = Countdown(render_mode="ansi")
    observation, _ = env.reset(seed=0)
    assert env.render() == observation
    assert Countdown().render() is None


def test_copies_and_pickles() -> None:
    env = Countdown()
    env.reset(seed=4)
    env.loops.clear()  # the test's own; a loop can't be copied
    twin = copy.deepcopy(env)
    revived: Countdown = pickle.loads(pickle.dumps(env))
    assert env.step("go")[0] == twin.step("go")[0] == revived.step("go")[0]


def test_an_env_that_promises_not_to_wait_is_held_to_it() -> None:
    class Liar(Countdown):
        waits = False

    with pytest.raises(RuntimeError, match="waits = True"):
        Liar().reset()


def test_abstract_methods_are_demanded() -> None:
    with pytest.raises(TypeError, match="astep"):
        type("Half", (gymllm.Env,), {"areset": Countdown.areset})()


@pytest.mark.parametrize("answer", [None, "text", ("text", 1.0, False, False)])
def test_an_answer_that_cannot_be_unpacked_is_named(answer: Any) -> None:
    class Wrong(gymllm.Env):
        async def areset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> Any:
            return answer if seed else ("text", {})

        async def astep(self, action: str) -> Any:
            return answer

    env = Wrong()
    with pytest.raises(
        EnvTypeError, match=r"Wrong: areset must return .*info, got (None|'text'|\()"
    ):
        env.reset(seed=1)
    env.reset()
    with pytest.raises(
        EnvTypeError, match="Wrong: astep must return a tuple of observation, reward"
    ):
        env.step("x")


def test_an_action_that_is_no_text_is_refused_and_the_episode_goes_on() -> None:
    env = gymnasium.make("gymllm/FrozenLake-v0")
    env.reset(seed=0)
    with pytest.raises(EnvTypeError, match="FrozenLake-v0: the action must be a str, got 3"):
        env.unwrapped.step(3)
    env.unwrapped.step("right")


def test_an_environment_without_settings_takes_a_render_mode_and_nothing_else() -> None:
    class Plain(gymllm.Env):
        async def areset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[str, dict[str, Any]]:
            return "text", {}

        async def astep(self, action: str) -> Any: ...

    assert Plain(render_mode="ansi").render_mode == "ansi"
    with pytest.raises(TypeError, match="tyop"):
        Plain(tyop=3)  # type: ignore[call-arg]
