"""What every gymllm environment must do, as rules that a third party runs over its own.

All of them in one test:

    def test_my_env():
        check_env_conformance(lambda: gymnasium.make("me/MyEnv-v0"))

or each as a test of its own:

    @pytest.mark.parametrize("rule", RULES)
    def test_my_env(rule):
        check_rule(lambda: gymnasium.make("me/MyEnv-v0"), rule)

A rule that can't be judged because another one is broken passes, so what fails is what to mend.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from itertools import zip_longest
from typing import cast

from gymnasium.envs.registration import EnvSpec
from gymnasium.vector.utils import CloudpickleWrapper

from gymllm.bridge import helper_loop
from gymllm.env import Env
from gymllm.errors import EnvTypeError, UnknownNameError
from gymllm.spaces import is_text
from gymllm.team import finite_reward
from gymllm.testing.held import held, new_since
from gymllm.testing.playing import (
    OTHER_SEED,
    Case,
    TextEnv,
    difference,
    fresh_episode,
    play,
    repeatable_episode,
    require,
)
from gymllm.testing.pool_rules import both_faces, cancellation, timeouts
from gymllm.tool_calls import tools_problem

UNREADABLE = ("", " ", "\n\n", "\x00", "é🙂日本", "<action>", "[1, 2", "{" * 64, "a" * 5_000)
"""Texts that few environments can read; none may make one raise."""


def check_env_conformance(
    make_env: Callable[[], TextEnv],
    *,
    actions: Sequence[str] = UNREADABLE,
    longest_episode: int = 100,
    skip: Collection[str] = (),
    timeout_s: float = 60.0,
) -> None:
    """Checks an environment against every rule; raises at the first one that it breaks.

    Args:
        make_env: Makes a new environment, wrapped or not, on each call.
        actions: What is played, over and over; mix in actions that the environment can read.
        longest_episode: Steps after which an episode that has not ended is left.
        skip: Rules to leave out, by name.
        timeout_s: Longest that one reset, step or close may take.

    Raises:
        AssertionError: A rule is broken; the message says which and how.
        UnknownNameError: `skip` has a name that no rule has.
        ConfigError: An argument is out of its range.
    """
    for name in skip:
        _named(name)
    for name in RULES:
        if name not in skip:
            check_rule(
                make_env,
                name,
                actions=actions,
                longest_episode=longest_episode,
                timeout_s=timeout_s,
            )


def check_rule(
    make_env: Callable[[], TextEnv],
    rule: str,
    *,
    actions: Sequence[str] = UNREADABLE,
    longest_episode: int = 100,
    timeout_s: float = 60.0,
) -> None:
    """Checks one rule of `RULES`; arguments and errors as for `check_env_conformance`."""
    check = _named(rule)
    case = Case(
        make_env=make_env, actions=actions, longest_episode=longest_episode, timeout_s=timeout_s
    )
    try:
        check(case)
    except AssertionError as error:
        raise AssertionError(f"{rule}: {error}") from error


def texts(case: Case) -> None:
    """Observations are texts that lie in their space, and so are actions; all types are Gymnasium's."""
    with closing(case.make_env()) as env:
        require(is_text(env.action_space), f"the action space is {env.action_space}, not text")
        for event in play(env, case):
            if isinstance(event.error, EnvTypeError):
                raise AssertionError(f"{event.call}: {event.error}")
            if event.call.startswith("reset") and event.error is not None:
                raise AssertionError(f"{event.call} raised {event.error!r}") from event.error
            if event.answer:
                require(
                    env.observation_space.contains(cast("str", event.answer[0])),
                    f"the observation of {event.call} does not lie in {env.observation_space}: "
                    f"{event}",
                )


def seeds(case: Case) -> None:
    """The same seed and actions give the same episode, whatever is played beside it."""
    with closing(case.make_env()) as first, closing(case.make_env()) as second:
        pairs = list(zip_longest(play(first, case), play(second, case)))
    one, other = (
        [event for event in side if event is not None] for side in zip(*pairs, strict=True)
    )
    differs = difference(one, other, "the first", "the second")
    require(
        differs is None,
        f"two environments with the same seed and actions differ: {differs}. Draw all randomness "
        "from self.np_random.",
    )


def reset_isolation(case: Case) -> None:
    """An earlier episode leaves no trace in a later one."""
    expected = repeatable_episode(case)
    if expected is None:
        return
    with closing(case.make_env()) as env:
        list(play(env, case, seed=OTHER_SEED, backwards=True))
        differs = difference(expected, list(play(env, case)), "a new environment", "a used one")
    require(differs is None, f"an earlier episode changes a later one: {differs}")


def invalid_actions(case: Case) -> None:
    """No action makes a step raise; `info["invalid_action"]` says whether it could be read."""
    with closing(case.make_env()) as env:
        _, *steps = play(env, case)
        for event in steps:
            if event.fault.startswith("raised"):
                raise AssertionError(f"{event.call} raised {event.error!r}") from event.error
            if len(event.answer) == 5:
                info = cast("dict[str, object]", event.answer[4])
                invalid = info.get("invalid_action", False)
                require(
                    isinstance(invalid, bool),
                    f'info["invalid_action"] must be a bool, {event.call} has {invalid!r}',
                )


def agents(case: Case) -> None:
    """Where there are several agents, `info["agent"]` always names who acts next, and
    `info["agent_rewards"]` gives finite rewards to names."""
    with closing(case.make_env()) as env:
        several = False
        for number, event in enumerate(play(env, case)):
            if not event.answer:
                continue
            info = cast("dict[str, object]", event.answer[-1])
            several = several or (number == 0 and "agent" in info)
            require(
                isinstance(info.get("agent", ""), str),
                f'info["agent"] must be a str, {event.call} has {info.get("agent")!r}',
            )
            require(
                "agent" in info or not several or event.ended,
                f'info["agent"] must say who acts next, as after the reset; {event.call} has none',
            )
            rewards = info.get("agent_rewards", {})
            good = isinstance(rewards, Mapping) and all(
                isinstance(name, str) and finite_reward(reward) is not None
                for name, reward in cast("Mapping[object, object]", rewards).items()
            )
            require(
                good,
                f'info["agent_rewards"] must be finite rewards by name, {event.call} has {rewards!r}',
            )


def tools(case: Case) -> None:
    """What the environment offers, if it does, are schemas of functions, and no episode changes them."""
    with closing(case.make_env()) as env, closing(case.make_env()) as other:
        one, another = env.unwrapped, other.unwrapped
        if not isinstance(one, Env) or not isinstance(another, Env):
            return
        problem = tools_problem(one.tools)
        require(not problem, problem)
        before = repr(one.tools)
        list(play(env, case))
        require(
            repr(one.tools) == before == repr(another.tools),
            f"tools must stay the same: at first they are {before}, after an episode {one.tools!r}, in "
            f"another environment {another.tools!r}",
        )


def step_order(case: Case) -> None:
    """A step before the first reset raises, and so does one after an episode's end."""
    with closing(case.make_env()) as env:
        _require_refuses_step(env, "before the first reset")
        events = list(play(env, case))
        if events[-1].ended and not events[-1].fault:
            _require_refuses_step(env, "after the episode's end")


def close_twice(case: Case) -> None:
    """`close` can be called twice, and without a reset."""
    for episodes in range(2):
        env = case.make_env()
        if episodes:
            list(play(env, case))
        env.close()
        try:
            env.close()
        except Exception as error:
            raise AssertionError(f"the second close() raised {error!r}") from error


def close_releases(case: Case) -> None:
    """After `close`, no thread, task, descriptor or child process is left.

    One life goes first and does not count: what is made once for the whole process is no leak.
    """
    loop = helper_loop()
    _live(case)
    before = held(loop)
    env = _live(case)  # kept: what only goes with the object was not released by close()
    left = new_since(before, loop, timeout_s=case.timeout_s)
    require(not left, f"after close() these are left: {', '.join(left)}")
    del env


def picklability(case: Case) -> None:
    """What makes the environment can be sent to another process, and its spec, if any, to a file."""
    expected = repeatable_episode(case)
    with closing(case.make_env()) as env:
        spec = env.spec
    try:
        copied = pickle.loads(pickle.dumps(CloudpickleWrapper(case.make_env))).fn
    except Exception as error:
        raise AssertionError(
            f"what makes the environment can't be pickled ({type(error).__name__}: {error}), so it "
            "can't run in another process: open files, locks and connections in areset()"
        ) from error
    if expected is not None:
        differs = difference(expected, fresh_episode(copied, case), "the original", "the copy")
        require(differs is None, f"a pickled copy of make_env makes another environment: {differs}")
    if spec is not None:
        _check_spec(spec)


def _check_spec(spec: EnvSpec) -> None:
    try:
        text = spec.to_json()
        again = EnvSpec.from_json(text).to_json()
        pickle.loads(pickle.dumps(spec))
    except Exception as error:
        raise AssertionError(
            f"the spec of {spec.id} can't be kept ({type(error).__name__}: {error}): register it with "
            "an entry point in words, and with arguments that JSON has"
        ) from error
    require(
        again == text, f"the spec of {spec.id} changes on its way through JSON: {text}, {again}"
    )


def _live(case: Case) -> TextEnv:
    """One environment that is left in the midst of its second episode and closed."""
    env = case.make_env()
    list(play(env, case))
    episode = play(env, case)
    next(episode)
    next(episode, None)
    env.close()
    return env


def _require_refuses_step(env: TextEnv, when: str) -> None:
    try:
        env.step("")
    except Exception:  # any will do: wrappers raise their own
        return
    raise AssertionError(f"step {when} must raise, for instance gymnasium.error.ResetNeeded")


def _named(rule: str) -> Callable[[Case], None]:
    if rule not in _CHECKS:
        raise UnknownNameError("conformance rule", rule, RULES)
    return _CHECKS[rule]


_CHECKS: dict[str, Callable[[Case], None]] = {
    check.__name__: check
    for check in (
        *(texts, seeds, reset_isolation, invalid_actions, agents, tools, step_order, both_faces),
        *(cancellation, timeouts, close_twice, close_releases, picklability),
    )
}
RULES = tuple(_CHECKS)
"""Every rule's name; each is a function of this package whose docstring says what it asks."""
