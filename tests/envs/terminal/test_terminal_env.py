"""`gymllm/Terminal-v0`: the built-in tasks, actions and limits, conformance, many at once."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import gymnasium
import numpy as np
import pytest
from terminal_helpers import SUBMIT, bash, call, hello_task, play

from gymllm.errors import ConfigError, SandboxError, UnknownNameError
from gymllm.pool import EnvPool
from gymllm.sandbox import SandboxSpec, open_sandbox
from gymllm.testing import RULES, check_rule
from gymllm_envs.scripted import scripted_player
from gymllm_envs.terminal import ENV_ID
from gymllm_envs.terminal.building import prepare
from gymllm_envs.terminal.checking import check
from gymllm_envs.terminal.default_tasks import default_tasks
from gymllm_envs.terminal.env import TerminalEnv
from gymllm_envs.terminal.task import TerminalTask

pytestmark = pytest.mark.usefixtures("needs_bwrap")

TASKS = {task.id: task for task in default_tasks()}
SMALL = TerminalTask(
    id="small",
    instruction="Say hello.",
    files={"in.txt": "x\n"},
    check="grep -qx hello out.txt",
    file_mb=8,
)


@pytest.mark.parametrize("name", TASKS)
def test_a_built_in_task_is_worth_1_solved_and_0_untouched(name: str) -> None:
    task = TASKS[name]
    solved = play(name, bash(task.solution), SUBMIT)
    assert (solved.reward, solved.terminated, solved.truncated) == (1.0, True, False), solved
    assert solved.info["check"]["in_place"] is task.check_in_place
    untouched = play(name, SUBMIT)
    assert (untouched.reward, untouched.terminated) == (0.0, True)
    assert task.instruction in untouched.first


def test_there_are_enough_built_in_tasks_and_none_shows_how_it_is_solved() -> None:
    assert len(TASKS) >= 10
    assert all(task.solution and task.solution not in task.instruction for task in TASKS.values())


def test_the_scripted_player_solves_them_as_often_as_it_is_skilled() -> None:
    player, rng = scripted_player(ENV_ID), np.random.default_rng(0)
    env = TerminalEnv()
    for skill in (1.0, 0.0):
        text, _ = env.reset(seed=3)
        said = text
        terminated, steps, reward = False, 0, 0.0
        while not terminated:
            action = player(said, rng, skill)
            text, reward, terminated, _, _ = env.step(action)
            said += action + text
            steps += 1
        assert (reward, steps) == (skill, 1 + skill)
    env.close()


def test_calls_and_blocks_of_bash_are_taken() -> None:
    two = (
        call("bash", command="cd /tmp; x=5") + "\n" + call("bash", command="echo $x $PWD; exit_me")
    )
    played = play(
        SMALL, two, bash("echo still $x; false"), "I think it is done.\n" + call("submit")
    )
    assert played.texts[0].startswith("[no output]\n\n5 /tmp\n")
    assert "exit_me: command not found\n[exit code 127]" in played.texts[0]
    assert played.texts[1] == "still 5\n[exit code 1]"
    assert played.texts[2] == "submitted"
    assert played.info["submitted"] is True


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        ("hello", "Error: this is no call of a tool. Write one like <tool_call>"),
        ("```bash\nls\n```\n```bash\nls\n```", "Error: this is no call of a tool"),
        (call("bsh", command="ls"), "there is no tool 'bsh'; there is: bash, submit. Did you mean"),
        (call("bash"), "bash needs the argument 'command'"),
        (call("bash", command=3), "must be of type string, got 3"),
        ("<tool_call>{", "Error: Tool call 1"),
        (call("keys", keys=["x"]), "there is no tool 'keys'"),
    ],
)
def test_what_is_no_action_is_answered(action: str, answer: str) -> None:
    played = play(SMALL, action)
    assert played.info["invalid_action"] is True
    assert answer in played.texts[0]


def test_long_outputs_lose_their_middle_and_say_how_much() -> None:
    played = play(SMALL, bash("seq 100000"), max_output_chars=400)
    assert played.texts[0].startswith("1\n2\n")
    assert played.texts[0].endswith("99999\n100000")
    assert "left out ...]" in played.texts[0]
    assert len(played.texts[0]) < 500


@pytest.mark.parametrize(
    ("settings", "actions", "reached"),
    [
        ({"max_turns": 2}, ["?", "?", "?"], "turns"),
        ({"wall_clock_s": 0.05}, [bash("sleep 9"), "?"], "wall_clock"),
        (
            {"command_timeout_s": 0.03, "max_command_timeouts": 2},
            [bash("sleep 9"), bash("echo x"), bash("sleep 9"), "?"],
            "command_timeouts",
        ),
    ],
)
def test_limits_truncate_and_what_was_done_is_checked(
    settings: dict[str, Any], actions: list[str], reached: str
) -> None:
    done = play(SMALL, *actions, **settings)
    assert (done.truncated, done.terminated) == (True, False)
    assert done.info["truncated_by"] == reached
    assert (done.reward, done.reason) == (0.0, "the checker says no")
    left = play(SMALL, *actions, check_truncated=False, **settings)
    assert (left.truncated, left.reward, "check" in left.info) == (True, 0.0, False)


def test_what_was_done_by_the_limit_counts() -> None:
    played = play(SMALL, bash("echo hello >out.txt"), max_turns=1)
    assert (played.reward, played.truncated, played.info["truncated_by"]) == (1.0, True, "turns")


def test_a_command_that_takes_too_long_is_told_and_the_shell_lives_on() -> None:
    played = play(SMALL, bash("echo a; x=1; sleep 9"), bash("echo $x"), command_timeout_s=0.2)
    assert played.texts[0] == "a\n[killed: it took longer than 0.2 s]"
    assert played.texts[1] == "1"


def test_the_last_turns_are_announced() -> None:
    played = play(SMALL, "?", bash("true"), max_turns=3)
    assert played.texts[0].endswith("[2 turns left]")
    assert played.texts[1].endswith("[1 turn left]")


def test_the_seed_chooses_and_so_do_options() -> None:
    env = TerminalEnv()
    chosen = [env.reset(seed=seed)[1]["task"] for seed in (3, 3, 4, 5, 6, 7)]
    assert chosen[0] == chosen[1]
    assert len(set(chosen)) > 2
    assert env.reset(options={"task": 1})[1]["task"] == list(TASKS)[1]
    with pytest.raises(UnknownNameError, match="Did you mean count-words"):
        env.reset(options={"task": "count-word"})
    with pytest.raises(ConfigError, match="has the reset option 'task'"):
        env.reset(options={"tusk": 1})
    with pytest.raises(ConfigError, match="task must be from 0 to"):
        env.reset(options={"task": 99})
    env.close()


@pytest.mark.parametrize(
    ("settings", "kind", "problem"),
    [
        ({"mode": "scren"}, UnknownNameError, "Did you mean screen"),
        ({"kind": "dockr"}, UnknownNameError, "Did you mean docker"),
        ({"max_turns": 0}, ConfigError, "max_turns must be >= 1 , got 0"),
        ({"columns": 1000}, ConfigError, "columns must be >= 20 and <= 300 , got 1000"),
        ({"command_timeout_s": float("nan")}, ConfigError, "got nan"),
        ({"tasks": []}, ConfigError, "tasks must not be empty"),
    ],
)
def test_settings_that_can_not_be_are_refused(
    settings: dict[str, Any], kind: type[Exception], problem: str
) -> None:
    with pytest.raises(kind, match=problem):
        TerminalEnv(**settings)


def test_an_image_needs_a_kind_that_has_them() -> None:
    task = TerminalTask(id="a", instruction="", check="true", image="debian:12")
    with pytest.raises(ConfigError, match="needs the image 'debian:12', so kind='docker'"):
        play(task)
    with pytest.raises(ConfigError, match="names no image, so kind='local'"):
        play(SMALL, kind="docker")


def test_a_tree_is_made_once_and_never_changed_by_an_episode(tmp_path: Path) -> None:
    task = hello_task(tmp_path, files={"in.txt": "x\n"})
    play(task, bash("echo changed >in.txt"))
    assert play(task, bash("cat in.txt")).texts == ["x"]

    async def specs() -> tuple[SandboxSpec, SandboxSpec]:
        return (await prepare(task, "local")).spec, (await prepare(task, "local")).spec

    one, other = anyio.run(specs)
    assert one is other


def test_a_check_that_breaks_raises_and_is_no_reward() -> None:
    async def run() -> None:
        prepared = await prepare(SMALL, "local")
        sandbox = await open_sandbox(prepared.spec)
        os.kill(sandbox.pid, 9)  # type: ignore[attr-defined]  # a local one has it
        await check(prepared, sandbox, "local", None)

    with pytest.raises(SandboxError):
        anyio.run(run)


def test_checks_in_place_see_processes_and_bring_their_tests_late(tmp_path: Path) -> None:
    task = hello_task(tmp_path, check_in_place=True)
    watch = bash("ls /tests; (while ! cp /tests/expected.txt out.txt 2>/dev/null; do :; done) &")
    played = play(task, watch, SUBMIT)
    assert "expected" not in played.texts[0]
    assert played.info["check"]["in_place"] is True


def small_env() -> gymnasium.Env[str, str]:
    return gymnasium.make(ENV_ID, tasks=[SMALL], max_turns=6)


@pytest.mark.parametrize("rule", RULES)
def test_it_conforms(rule: str) -> None:
    actions = (bash("cat in.txt; echo hello >out.txt"), "?", call("bash", command="ls"), SUBMIT)
    if rule == "picklability":  # a spec's arguments must be JSON
        check_rule(lambda: gymnasium.make(ENV_ID, max_turns=6), rule, actions=actions)
    else:
        check_rule(small_env, rule, actions=actions)


SCREEN_RULES = ("texts", "invalid_actions", "step_order", "cancellation", "close_releases")


@pytest.mark.parametrize("rule", SCREEN_RULES)
def test_its_screen_conforms(rule: str) -> None:
    keys = call("keys", keys=["echo hello >out.txt", "Enter"])
    # Episodes are compared there, and what a program has drawn by some moment depends on the machine.
    actions = ("?", call("submit")) if rule == "cancellation" else (keys, "?", call("submit"))
    check_rule(
        lambda: gymnasium.make(ENV_ID, tasks=[SMALL], mode="screen", max_turns=4),
        rule,
        actions=actions,
    )


def test_sixteen_at_once_leave_nothing() -> None:
    async def run() -> list[float]:
        pool = EnvPool(functools.partial(TerminalEnv, tasks=[SMALL]), 16)
        rewards: list[float] = []

        async def one(number: int) -> None:
            async with pool.lease() as env:
                await env.reset(seed=number)
                if number % 2:
                    await env.step(bash("echo hello >out.txt"))
                rewards.append((await env.step(SUBMIT)).reward)

        async with anyio.create_task_group() as tasks:
            for number in range(16):
                tasks.start_soon(one, number)
        await pool.aclose()
        return rewards

    anyio.run(run)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    assert sorted(anyio.run(run)) == [0.0] * 8 + [1.0] * 8
    assert len(os.listdir("/proc/self/fd")) == before


def test_it_is_imported_only_when_it_is_made() -> None:
    code = "import gymllm, sys; print('gymllm_envs.terminal' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"
