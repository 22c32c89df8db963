"""The conformance suite: good environments pass every rule; each rule catches what only it asks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import re
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import gymnasium
import pytest

import gymllm
from gymllm.bridge import helper_loop, in_bridge
from gymllm.errors import ConfigError, UnknownNameError
from gymllm.testing import RULES, check_env_conformance, check_rule
from gymllm.testing.env_conformance import UNREADABLE

ACTIONS = ("left", "?", "left")
LIMIT_S = 0.05
LEFT = contextlib.ExitStack()
"""Removes what the environments that leave something behind have left."""


class Good(gymllm.Env):
    """Three turns; waits in each call. The broken ones below change one thing."""

    held: list[str]

    def __init__(self, held: list[str] | None = None) -> None:
        self.held = [] if held is None else held
        self.turns = 0

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        await anyio.lowlevel.checkpoint()
        self.turns = 0
        return f"number {self.np_random.integers(1_000_000)}", {}

    async def astep(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        await anyio.lowlevel.checkpoint()
        self.turns += 1
        drawn = self.np_random.integers(1_000_000)
        invalid = action not in ("left", "right")
        return f"{action} {drawn}", 1.0, self.turns == 3, False, {"invalid_action": invalid}


class Bytes(Good):
    async def areset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = await super().areset(**kwargs)
        return observation.encode(), info


class OutsideItsSpace(Good):
    async def areset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self.observation_space = gymllm.Unicode(3)
        return await super().areset(**kwargs)


class DropsTheSeed(Good):
    async def areset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        await super().areset(**kwargs)
        return os.urandom(8).hex(), {}


class SeedsTheWholeProcess(Good):
    """Repeatable alone, and not beside another one."""

    async def areset(self, *, seed: int | None = None, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        random.seed(seed)
        return await super().areset(seed=seed, **kwargs)

    async def astep(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return str(random.random()), *(await super().astep(action))[1:]


class Remembers(Good):
    async def areset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = await super().areset(**kwargs)
        self.episodes = getattr(self, "episodes", 0) + 1
        return observation, {**info, "episodes": self.episodes}


class RaisesOnInvalid(Good):
    async def astep(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action not in ("left", "right"):
            raise KeyError(action)
        return await super().astep(action)


class InvalidInWords(Good):
    async def astep(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return *(await super().astep(action))[:4], {"invalid_action": "no"}


class Plain(gymnasium.Env[str, str]):
    """Gymnasium's own kind, which guards nothing by itself."""

    def __init__(self) -> None:
        self.observation_space = self.action_space = gymllm.Unicode()
        self.turns: int | None = None
        self.closed = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.turns = 0
        return "begin", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.turns in (None, 3):
            raise RuntimeError("nothing to step")
        self.turns += 1
        return action, 0.0, self.turns == 3, False, {}


class StepsBeforeReset(Plain):
    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns = self.turns or 0
        return super().step(action)


class StepsAfterTheEnd(Plain):
    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.turns == 3:
            return action, 0.0, True, False, {}
        return super().step(action)


class ClosesOnce(Plain):
    def close(self) -> None:
        self.closed += 1
        if self.closed > 1:
            raise ValueError("closed already")


class KnowsThePool(Good):
    async def astep(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, *rest = await super().astep(action)
        running = threading.current_thread().name.startswith("gymllm-conformance")
        return f"{observation} {running}", *rest


class BlocksTheBridge(Plain):
    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if in_bridge():
            raise RuntimeError("not from here")
        return super().step(action)


class HoldsWhenCancelled(Good):
    """Takes something that all share and gives it back only if nothing goes wrong."""

    async def astep(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.held:
            raise RuntimeError("taken by another")
        self.held.append(action)
        answer = await super().astep(action)
        self.held.clear()
        return answer


class AnswersCancellation(Good):
    """The pool's limit cancels until it is obeyed, so only others' cancellation is swallowed."""

    async def astep(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        with contextlib.suppress(asyncio.CancelledError):
            await anyio.lowlevel.checkpoint()
        return await super().astep(action)


class Shielded(Good):
    async def astep(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        with anyio.CancelScope(shield=True):
            return await super().astep(action)


class ShieldedForEver(Good):
    async def areset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        with anyio.CancelScope(shield=True):
            await anyio.sleep_forever()
        raise AssertionError("unreachable")


class LeavesThread(Good):
    async def aclose(self) -> None:
        gate = threading.Event()
        LEFT.callback(gate.set)
        threading.Thread(target=gate.wait, args=[10], name="left behind").start()


class LeavesDescriptor(Good):
    async def aclose(self) -> None:
        descriptor = os.open(os.devnull, os.O_RDONLY)
        LEFT.callback(os.close, descriptor)


class LeavesChild(Good):
    async def aclose(self) -> None:
        child = subprocess.Popen(["sleep", "10"])  # noqa: ASYNC220  # returns at once
        LEFT.callback(child.wait)
        LEFT.callback(child.kill)


class LeavesTask(Good):
    async def aclose(self) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(anyio.sleep_forever(), name="left behind")
        if loop is helper_loop():  # others cancel what is left on them when they stop
            LEFT.callback(loop.call_soon_threadsafe, task.cancel)


class Other(Good):
    async def areset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        return "another", (await super().areset(**kwargs))[1]


class Maker:
    """A factory whose pickled form makes something else."""

    def __call__(self) -> gymllm.Env:
        return Good()

    def __reduce__(self) -> tuple[Any, ...]:
        return (functools.partial, (Other,))


class ForgetsWhoseTurnItIs(Good):
    """One of two agents, until an action can't be read."""

    async def areset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        return (await super().areset(**kwargs))[0], {"agent": "a"}

    async def astep(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *answer, info = await super().astep(action)
        return *answer, info if info["invalid_action"] else {**info, "agent": "b"}


class NumbersItsAgents(Good):
    async def areset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        return (await super().areset(**kwargs))[0], {"agent": 0}


class RewardsNobody(Good):
    async def astep(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *answer, info = await super().astep(action)
        return *answer, {**info, "agent_rewards": {"a": None}}


class OffersWords(Good):
    tools = ({"type": "function", "function": {"description": "Has no name."}},)


class OffersMoreAndMore(Good):
    async def areset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self.tools = [
            *self.tools,
            {"type": "function", "function": {"name": f"t{len(self.tools)}"}},
        ]
        return await super().areset(**kwargs)


BROKEN: list[tuple[str, Callable[..., Any], str]] = [
    ("texts", Bytes, r"reset\(seed=11\): the observation must be a str, got bytes"),
    ("texts", OutsideItsSpace, r"the observation of reset\(seed=11\) does not lie in Unicode\(3\)"),
    ("seeds", DropsTheSeed, r"differ: at call 0, reset\(seed=11\), the first: .*; the second: "),
    ("seeds", SeedsTheWholeProcess, r"at call 1, step\('left'\)"),
    ("reset_isolation", Remembers, r"a new environment: .*'episodes': 1.*; a used one: .*2"),
    ("invalid_actions", RaisesOnInvalid, r"step\('\?'\) raised KeyError\('\?'\)"),
    ("invalid_actions", InvalidInWords, r"must be a bool, step\('left'\) has 'no'"),
    ("agents", ForgetsWhoseTurnItIs, r"must say who acts next, .*; step\('\?'\) has none"),
    ("agents", NumbersItsAgents, r"must be a str, reset\(seed=11\) has 0"),
    ("agents", RewardsNobody, r"must be finite rewards by name, step\('left'\) has {'a': None}"),
    ("tools", OffersWords, r"tools must be .* got .*Has no name"),
    ("tools", OffersMoreAndMore, "tools must stay the same: .* after an episode .*t0"),
    ("step_order", StepsBeforeReset, "step before the first reset must raise"),
    ("step_order", StepsAfterTheEnd, "step after the episode's end must raise"),
    ("both_faces", KnowsThePool, r"step\('left'\), elsewhere: .*False.*True"),
    ("both_faces", BlocksTheBridge, "in a pool .*here: raised RuntimeError"),
    (
        "cancellation",
        HoldsWhenCancelled,
        r"after step\('left'\) was cancelled, a new episode: raised",
    ),
    (
        "cancellation",
        AnswersCancellation,
        r"step\('left'\) was cancelled and answered all the same",
    ),
    ("timeouts", Shielded, r"the limit of step\('left'\) passed and it answered all the same"),
    ("close_twice", ClosesOnce, r"the second close\(\) raised ValueError\('closed already'\)"),
    ("close_releases", LeavesThread, "left: thread 'left behind'"),
    ("close_releases", LeavesDescriptor, r"left: descriptor \d+ \(/dev/null\)"),
    ("close_releases", LeavesChild, r"left: child process \d+ \(sleep\)"),
    ("close_releases", LeavesTask, "left: task 'left behind'"),
    ("picklability", Maker, "a pickled copy of make_env makes another environment: at call 0"),
]


@pytest.mark.parametrize(
    ("rule", "make", "message"), BROKEN, ids=[f"{rule}-{make.__name__}" for rule, make, _ in BROKEN]
)
def test_a_broken_env_is_caught_by_its_rule_alone(
    rule: str, make: Callable[..., Any], message: str
) -> None:
    caught: dict[str, str] = {}
    for name in RULES:
        make_env = Maker() if make is Maker else make
        if issubclass(make, Good):
            make_env = functools.partial(make, [])
        try:
            check_rule(make_env, name, actions=ACTIONS, timeout_s=LIMIT_S if name == rule else 10)
        except AssertionError as error:
            caught[name] = str(error)
        finally:
            LEFT.close()
    assert set(caught) == {rule}
    assert caught[rule].startswith(f"{rule}: ")
    assert re.search(message, caught[rule])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "make_env",
    [
        *(Good, Plain),
        functools.partial(gymnasium.make, "gymllm/FrozenLake-v0"),
        functools.partial(gymnasium.make, "gymllm/Arithmetic-v0"),
        functools.partial(gymllm.make, "CartPole-v1"),
        lambda: gymnasium.wrappers.OrderEnforcing(gymnasium.wrappers.TimeLimit(Good(), 9)),
    ],
    ids=["waits", "plain", "lake", "arithmetic", "adapter", "wrapped"],
)
def test_good_envs_pass_every_rule(rule: str, make_env: Callable[[], Any]) -> None:
    actions = [*UNREADABLE, "left", "1", "right"]
    check_rule(make_env, rule, actions=actions, longest_episode=30, timeout_s=10)


def test_a_limit_that_is_never_obeyed_is_reported_and_not_waited_for() -> None:
    with pytest.raises(
        AssertionError, match=r"the limit of reset\(seed=11\) passed and it goes on"
    ):
        check_rule(ShieldedForEver, "timeouts", timeout_s=LIMIT_S)


def test_a_factory_that_holds_a_lock_can_not_be_sent_elsewhere() -> None:
    lock = threading.Lock()
    with pytest.raises(AssertionError, match=r"picklability: .*cannot pickle '_thread.lock'"):
        check_rule(lambda: Good([lock]), "picklability")


def test_a_spec_that_is_no_json_is_reported() -> None:
    gymnasium.register("tests/Unkept-v0", entry_point=Good)
    try:
        with pytest.raises(AssertionError, match="the spec of tests/Unkept-v0 can't be kept"):
            check_rule(lambda: gymnasium.make("tests/Unkept-v0"), "picklability")
    finally:
        del gymnasium.registry["tests/Unkept-v0"]


def test_the_suite_works_where_a_loop_runs() -> None:
    async def main() -> None:
        check_env_conformance(Good, longest_episode=3)

    asyncio.run(main())


def test_rules_can_be_left_out_by_name() -> None:
    with pytest.raises(AssertionError, match=r"^seeds: "):
        check_env_conformance(DropsTheSeed)
    check_env_conformance(DropsTheSeed, skip=("seeds",))


def test_unknown_rules_and_bad_arguments_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean cancellation"):
        check_env_conformance(Good, skip=("cancelation",))
    with pytest.raises(UnknownNameError, match="conformance rule 'close'"):
        check_rule(Good, "close")
    with pytest.raises(ConfigError, match="actions must not be empty"):
        check_rule(Good, "seeds", actions=())
    with pytest.raises(ConfigError, match="longest_episode must be >= 1, got 0"):
        check_rule(Good, "seeds", longest_episode=0)
    with pytest.raises(ConfigError, match="timeout_s must be > 0, got 0"):
        check_rule(Good, "seeds", timeout_s=0)
