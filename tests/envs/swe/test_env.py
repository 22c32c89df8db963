"""`gymllm/SWE-v0` on the sample package: conformance, limits, observations, settings."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import gymnasium
import pytest
from playing import SUBMIT, bash, call, play
from sample import MEND

import gymllm
from gymllm.errors import ConfigError, UnknownNameError
from gymllm.message import ToolCall
from gymllm.testing import RULES, check_rule
from gymllm.testing.env_conformance import UNREADABLE
from gymllm.tool_calls import write_calls
from gymllm_envs.swe.env import SWE
from gymllm_envs.swe.task import SweTask, write_tasks

ACTIONS = (
    bash("ls"),
    call("edit", command="view", path="README.md"),
    call("search", pattern="def "),
    *UNREADABLE,
    "```bash\necho $((1 + 1)); exit 3\n```",
    call("edit", command="str_replace", path="README.md", old_str="sample", new_str="s"),
)


@pytest.mark.parametrize("rule", RULES)
def test_conformance(task: SweTask, tmp_path: Path, rule: str) -> None:
    path = tmp_path / "tasks.jsonl"
    write_tasks(path, [task])

    def make() -> gymnasium.Env[str, str]:
        return gymnasium.make("gymllm/SWE-v0", tasks=str(path), max_turns=16)

    check_rule(make, rule, actions=ACTIONS, longest_episode=16)


def test_as_a_gymnasium_environment(task: SweTask) -> None:
    env = gymnasium.make("gymllm/SWE-v0", tasks=[task])
    observation, info = env.reset(seed=0)
    assert observation.startswith(
        "There is a fault in sample, whose source tree is in /testbed:\n\nchunks("
    )
    assert info == {"task": task.id, "repo": "sample"}
    observation, *_ = env.step(bash("pwd; python -m pytest -q 2>&1 | tail -1"))
    assert observation.startswith("/testbed\n")
    assert "passed" in observation
    env.step(bash(MEND))
    observation, reward, terminated, truncated, info = env.step(SUBMIT)
    assert (observation, reward, terminated, truncated) == ("submitted", 1.0, True, False)
    assert set(info["fail_to_pass"].values()) == {"passed"} == set(info["pass_to_pass"].values())
    json.dumps(info)
    env.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("grade", [False, True])
@pytest.mark.parametrize(
    ("limit", "settings", "actions"),
    [
        ("turns", {"max_turns": 2}, [bash("ls"), bash("ls")]),
        ("turns", {"max_turns": 1}, ["what?"]),
        ("wall_clock", {"wall_clock_s": 0.2}, [bash("sleep 9")]),
        ("context", {"max_context_chars": 900}, [bash("seq 200")]),
        ("context", {"max_context_chars": 900}, ["x" * 900]),
        (
            "command_timeouts",
            {"max_command_timeouts": 2, "command_timeout_s": 0.1},
            [bash("sleep 9")] * 2,
        ),
    ],
)
async def test_limits(
    task: SweTask, limit: str, settings: dict[str, float], actions: list[str], grade: bool
) -> None:
    actions = [*actions[:-1], f"{actions[-1]}"]
    env = SWE(tasks=[task], grade_truncated=grade, **settings)  # type: ignore[arg-type]  # a table
    try:
        await env.areset(seed=0)
        for action in actions[:-1]:
            assert not (await env.astep(action))[3]
        await env._place.sandbox.exec(["sh", "-c", MEND])
        _, reward, terminated, truncated, info = await env.astep(actions[-1])
        assert (terminated, truncated, info["truncated_by"]) == (False, True, limit)
        assert reward == float(grade)
        assert info.get("resolved", False) == grade
        assert env._place is None
    finally:
        await env.aclose()


@pytest.mark.asyncio
async def test_calls_after_a_limit_are_not_run(task: SweTask) -> None:
    calls = [ToolCall(name="bash", arguments={"command": f"echo {n}; sleep 9"}) for n in range(9)]
    env = SWE(tasks=[task], command_timeout_s=0.1, max_command_timeouts=2)
    await env.areset(seed=0)
    observation, _, _, truncated, info = await env.astep(write_calls(calls))
    assert (truncated, info["truncated_by"]) == (True, "command_timeouts")
    assert observation.count("killed: it took longer than 0.1 s") == 2
    await env.aclose()


@pytest.mark.asyncio
async def test_observations(task: SweTask) -> None:
    played = await play(
        task,
        bash("seq 100000"),
        bash(r"printf 'a\033[31mred\033[0m\rb\033]0;t\007\n'; printf '\xff\x07'"),
        bash("true"),
        bash("sleep 9"),
        bash("echo out; echo err >&2; exit 7"),
        bash("kill -9 $$"),
        bash("cd src; x=1; echo 1"),
        bash("pwd; echo $x"),
        call("edit", command="view", path="nothing.py"),
        call("edit", command="create", path="a.py"),
        call("search", pattern="("),
        call("search", pattern="def chunks"),
        call("search", pattern="nothing like it"),
        call("bsh", command="ls"),
        call("bash", command=3),
        "no call",
        max_output_chars=1000,
        command_timeout_s=0.5,
        max_turns=19,
    )
    said = iter(played.observations[1:])
    cut = next(said)
    assert cut.startswith("1\n2\n3\n")
    assert cut.endswith("\n100000")
    assert "left out" in cut
    assert len(cut) < 1200
    assert next(said) == "bred\n\ufffd\\x07"
    assert next(said) == "[no output]"
    assert next(said) == "[killed: it took longer than 0.5 s]"
    assert next(said).startswith("out\nerr\nexit\n[exit code 7]\n[the shell has ended; a fresh one")
    assert next(said).startswith("[killed by signal 9]\n[the shell has ended")
    assert next(said) == "1"
    assert next(said) == "/testbed/src\n1"
    assert next(said).startswith("Error: ")
    assert "needs the argument 'file_text'" in next(said)
    assert next(said).startswith("Error: grep: ")
    assert next(said) == "./src/sample/chunks.py:4:def chunks(items, size):"
    assert next(said) == "[nothing matches]"
    assert "Did you mean 'bash'?" in next(said)
    assert next(said).startswith("Error: ")
    assert "this is no call of a tool" in next(said)
    assert next(said) == "submitted"


@pytest.mark.asyncio
async def test_the_last_turns_are_announced(task: SweTask) -> None:
    played = await play(task, *[bash("true")] * 4, max_turns=5)
    assert [text.partition("\n")[2] for text in played.observations[1:5]] == [
        "",
        "[3 turns left]",
        "[2 turns left]",
        "[1 turn left]",
    ]


@pytest.mark.asyncio
async def test_bash_alone(task: SweTask) -> None:
    env = SWE(tasks=[task], tools="bash")
    assert env.tools == ()
    observation, _ = await env.areset(seed=0)
    assert "exactly one command for bash in a block" in observation
    observation, *_, info = await env.astep(bash("ls"))
    assert observation.startswith("Error: give exactly one command")
    assert info["invalid_action"]
    observation, *_ = await env.astep("I do it.\n```bash\ncd src\npwd\n```\n")
    assert observation == "/testbed/src"
    observation, *_ = await env.astep("```bash\nls\n```\n```bash\nls\n```")
    assert observation.startswith("Error: give exactly one command")
    await env.astep(f"```bash\ncd ..; {MEND}\n```")
    _, reward, terminated, *_ = await env.astep("```bash\nsubmit\n```")
    assert (reward, terminated) == (1.0, True)


@pytest.mark.asyncio
async def test_partial_credit(task: SweTask) -> None:
    half = (
        "cat > src/sample/chunks.py <<'END'\ndef flatten(nested): return []\n"
        "def chunks(items, size):\n"
        "    return list(items) if isinstance(items, str) and len(items) == 1 else [items[:size]]\nEND"
    )
    played = await play(task, bash(half), partial_credit=True)
    mended = sum(result == "passed" for result in played.info["fail_to_pass"].values())
    kept = sum(result == "passed" for result in played.info["pass_to_pass"].values())
    assert (mended, kept) == (1, 3)
    assert played.reward == pytest.approx(1 / 4 * 3 / 7)
    assert not played.info["resolved"]


@pytest.mark.asyncio
async def test_no_partial_credit_where_tests_that_must_fail_were_not_run(task: SweTask) -> None:
    mended_and_away = (
        f"{MEND}; echo 'import atexit, os\natexit.register(os._exit, 3)' >> src/sample/text.py"
    )
    gone = "def initials(text):\n    import os\n    os._exit(0)"
    command = f"{mended_and_away}\ncat >> src/sample/text.py <<'END'\n{gone}\nEND"
    played = await play(task, bash(command), partial_credit=True)
    assert set(played.info["fail_to_pass"].values()) == {"passed"}
    assert played.reward == 0.0


@pytest.mark.asyncio
async def test_eight_at_once_in_a_pool(task: SweTask) -> None:
    rewards: dict[int, float] = {}

    async with gymllm.EnvPool(lambda: SWE(tasks=[task]), 8) as pool:

        async def one(number: int) -> None:
            async with pool.lease() as env:
                await env.reset(seed=number)
                await env.step(bash(f"echo {number} > /tmp/mine; echo {number} > mine"))
                if number % 2:
                    await env.step(bash(MEND))
                seen = (await env.step(bash("cat /tmp/mine mine; ls /tmp"))).observation
                assert seen == f"{number}\n{number}\nmine"
                rewards[number] = float((await env.step(SUBMIT)).reward)

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(one, number)
    assert rewards == {number: float(number % 2) for number in range(8)}


@pytest.mark.asyncio
async def test_reset_options(task: SweTask) -> None:
    env = SWE(tasks=[task])
    assert env.task_ids() == [task.id]
    for wanted in (task.id, 0):
        _, info = await env.areset(options={"task": wanted})
        assert info["task"] == task.id
    with pytest.raises(UnknownNameError, match="Did you mean sample__chunks-1"):
        await env.areset(options={"task": "sample__chunk-1"})
    with pytest.raises(ConfigError, match="from 0 to 0, got 1"):
        await env.areset(options={"task": 1})
    with pytest.raises(ConfigError, match="reset option 'task', got"):
        await env.areset(options={"tsk": 1})
    await env.aclose()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_turns": 0}, "max_turns must be >= 1, got 0"),
        ({"command_timeout_s": 0}, "command_timeout_s must be"),
        ({"wall_clock_s": float("nan")}, "wall_clock_s must be"),
        ({"memory_mb": True}, "memory_mb must be"),
        ({"tools": "fall"}, "Did you mean full"),
        ({"kind": "dockr"}, "Did you mean docker"),
        ({"tasks": []}, "empty list"),
    ],
)
def test_wrong_settings(task: SweTask, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SWE(**{"tasks": [task], **settings})  # type: ignore[arg-type]  # that is what is tested


@pytest.mark.asyncio
async def test_a_task_of_another_sort_of_sandbox(task: SweTask) -> None:
    env = SWE(tasks=[task], kind="docker")
    with pytest.raises(ConfigError, match="needs kind='local', got 'docker'"):
        await env.areset()
