"""Tasks as JSON lines, as folders in Harbor's and Terminal-Bench's forms; Dockerfiles for local sandboxes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from terminal_helpers import SUBMIT, bash, play

from gymllm.errors import ConfigError, EnvError, UnknownNameError
from gymllm_envs.terminal.dockerfile import Interpreted, interpret
from gymllm_envs.terminal.env import TerminalEnv
from gymllm_envs.terminal.harbor import read_folder
from gymllm_envs.terminal.task import CopyStep, RunStep, read_tasks

TOML = """
schema_version = "1.1"
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 30.0
env = { WANTED = "hello" }
[environment]
cpus = 1
memory_mb = 512
storage = "64M"
"""
DOCKERFILE = """
# syntax=docker/dockerfile:1
FROM ubuntu:24.04
ARG NAME=data
ENV GREETING="good day" LEVEL=3
WORKDIR /app
COPY seed.txt words/ ./in/
COPY words ./${NAME}
RUN echo "$GREETING" >greeting.txt && \\
    # a comment in between
    mkdir -p out
RUN <<EOF
echo one >a
echo two >b
EOF
WORKDIR src
CMD ["bash"]
"""
REWARD = 'grep -qx "$WANTED" /app/out/hello.txt && echo 1 || echo 0.25'


def harbor(folder: Path, *, test: str = f"({REWARD}) >/logs/verifier/reward.txt\n") -> Path:
    """A task of Harbor's form."""
    files = {
        "task.toml": TOML,
        "instruction.md": "Write hello to /app/out/hello.txt.\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/seed.txt": "seed\n",
        "environment/words/w.txt": "w\n",
        "solution/solve.sh": "echo hello >/app/out/hello.txt\n",
        "tests/test.sh": test,
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def commands(found: Interpreted) -> list[str]:
    steps = [step for step in found.steps if isinstance(step, RunStep)]
    return [step.command for step in steps if step.command]


def test_harbor_folders_are_read(tmp_path: Path) -> None:
    harbor(tmp_path / "b")
    harbor(tmp_path / "a")
    (tmp_path / "README.md").touch()
    tasks = read_folder(tmp_path)
    assert [task.id for task in tasks] == ["a", "b"]
    task = tasks[0]
    assert task.instruction == "Write hello to /app/out/hello.txt."
    assert (task.agent_timeout_s, task.check_timeout_s) == (120.0, 30.0)
    assert (task.memory_mb, task.file_mb, task.cpus) == (512, 64, 1.0)
    assert task.check_env == {"WANTED": "hello"}
    assert task.solution == "echo hello >/app/out/hello.txt\n"


def test_a_dockerfile_becomes_steps(tmp_path: Path) -> None:
    found = interpret(harbor(tmp_path) / "environment" / "Dockerfile")
    assert (found.tree, found.workdir) == ("/app", "/app/src")
    assert found.env == {"GREETING": "good day", "LEVEL": "3"}
    assert found.notes == ("FROM ubuntu:24.04: this machine's system instead",)
    copies = [step.target for step in found.steps if isinstance(step, CopyStep)]
    assert copies == ["/app/in/", "/app/data"]
    assert commands(found) == [
        'echo "$GREETING" >greeting.txt && mkdir -p out',
        "echo one >a\necho two >b",
    ]


@pytest.mark.usefixtures("needs_bwrap")
def test_a_harbor_task_is_played(tmp_path: Path) -> None:
    folder = harbor(tmp_path)
    look = bash("pwd; cd ..; cat greeting.txt a b in/* data/*; echo $LEVEL; stat -c %a in/seed.txt")
    played = play(folder.name, look, SUBMIT, tasks=folder)
    assert "/app/src\ngood day\none\ntwo\nseed\nw\nw\n3\n644" in played.texts[0]
    assert (played.reward, played.reason) == (0.25, "the checker says 0.25")
    played = play(folder.name, bash("echo hello >../out/hello.txt"), SUBMIT, tasks=folder)
    assert (played.reward, played.info["check"]["in_place"]) == (1.0, False)


@pytest.mark.usefixtures("needs_bwrap")
@pytest.mark.parametrize(
    ("test", "reward", "reason"),
    [
        ("echo 7 >/logs/verifier/reward.txt", 1.0, "the checker says 7, taken as 1"),
        ("echo -1 >/logs/verifier/reward.txt", 0.0, "the checker says -1, taken as 0"),
        ("""echo '{"reward": 0.5, "style": 1}' >/logs/verifier/reward.json""", 0.5, "says 0.5"),
        ("""echo '{"tests": 0.75}' >/logs/verifier/reward.json; exit 1""", 0.75, "says 0.75"),
        ("exit 3", 0.0, "the checker failed and left no reward"),
        ("echo nan >/logs/verifier/reward.txt; exit 1", 0.0, "failed and left no reward"),
    ],
)
def test_what_a_checker_leaves_is_the_reward(
    tmp_path: Path, test: str, reward: float, reason: str
) -> None:
    folder = harbor(tmp_path, test=test)
    played = play(folder.name, SUBMIT, tasks=folder)
    assert played.reward == reward
    assert reason in played.reason


@pytest.mark.usefixtures("needs_bwrap")
@pytest.mark.parametrize("test", ["true", "echo much >/logs/verifier/reward.txt"])
def test_a_checker_that_says_nothing_is_at_fault_itself(tmp_path: Path, test: str) -> None:
    folder = harbor(tmp_path, test=test)
    with pytest.raises(EnvError, match="left no number in /logs/verifier"):
        play(folder.name, SUBMIT, tasks=folder)


UV = """#!/bin/bash
apt-get update && apt-get install -y curl
curl -LsSf https://astral.sh/uv/0.9.5/install.sh | sh
uvx -p 3.13 -w pytest==8.4.1 -w pytest-json-ctrf==0.3.5 {more} pytest /tests/test_outputs.py
if [ $? -eq 0 ]; then echo 1 >/logs/verifier/reward.txt; else echo 0 >/logs/verifier/reward.txt; fi
"""


@pytest.mark.usefixtures("needs_bwrap")
def test_tests_that_only_fetch_pytest_run_with_ours(tmp_path: Path) -> None:
    folder = harbor(tmp_path, test=UV.format(more=""))
    (folder / "tests" / "test_outputs.py").write_text(
        "from pathlib import Path\n\n\ndef test_out():\n"
        "    assert Path('/app/out/hello.txt').exists()\n"
    )
    task = read_folder(folder)[0]
    assert task.notes == (
        "its tests run with gymllm's pytest: sandboxes have no network to fetch one",
    )
    played = play(task, bash("touch ../out/hello.txt"), SUBMIT)
    assert (played.reward, played.reason) == (1.0, "1 of 1 tests passed")


def test_tests_that_fetch_more_are_refused(tmp_path: Path) -> None:
    folder = harbor(tmp_path, test=UV.format(more="-w numpy==2.1"))
    (folder / "tests" / "test_outputs.py").touch()
    with pytest.raises(ConfigError, match="its tests fetch the packages numpy and sandboxes have"):
        read_folder(folder)
    folder = harbor(tmp_path, test="wget example.org/answers; cmp answers out")
    with pytest.raises(ConfigError, match="its tests fetch 'wget example"):
        read_folder(folder)


@pytest.mark.usefixtures("needs_bwrap")
def test_the_first_terminal_benchs_form(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    files = {
        "task.yaml": "instruction: |-\n  Write hello.\nparser_name: pytest\n"
        "max_agent_timeout_sec: 360.0\nmax_test_timeout_sec: 45.0\nrun_tests_in_same_shell: false\n",
        "Dockerfile": "FROM ghcr.io/x/base:1\nWORKDIR /app\n",
        "docker-compose.yaml": "services: {client: {}}\n",
        "run-tests.sh": UV.format(more=""),
        "solution.sh": "echo hello >out.txt",
        "tests/test_outputs.py": "import os\n\n\ndef test_it():\n"
        "    assert os.path.exists('/app/out.txt')\n",
    }
    (tmp_path / "tests").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    task = read_folder(tmp_path)[0]
    assert (task.instruction, task.check_timeout_s) == ("Write hello.", 45.0)
    assert play(task, SUBMIT).reward == 0.0
    assert play(task, bash(task.solution), SUBMIT).reward == 1.0
    (tmp_path / "task.yaml").write_text("instruction: x\nparser_name: ctest\n")
    with pytest.raises(ConfigError, match="only results of pytest can be read, not of 'ctest'"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (
            "WORKDIR /app\nRUN apt-get update && apt-get install -y no-such-thing",
            "no-such-thing; use",
        ),
        (
            "WORKDIR /app\nRUN pip install numpy",
            r"line 3, RUN pip install numpy: .* network \(pip\)",
        ),
        ("WORKDIR /app\nADD https://example.org/x /app/", "a download"),
        ("WORKDIR /app\nCOPY seed.txt /etc/seed.txt", "it writes to /app, /etc"),
        ("WORKDIR /app\nCOPY --from=other /x /app/", "a copy from another stage"),
        ("WORKDIR /app\nFROM debian", "more than one stage"),
        ("WORKDIR /app\nCOPY gone.txt .", "there is no 'gone.txt' in"),
        ("WORKDIR /app\nCOPY ../../x .", "there is no|leads out of"),
        ("WORKDIR /app\nFROB x", "the instruction FROB"),
        ("RUN true", "it has no WORKDIR"),
    ],
)
def test_what_a_local_sandbox_can_not_do_is_refused(
    tmp_path: Path, lines: str, problem: str
) -> None:
    (tmp_path / "seed.txt").touch()
    (tmp_path / "Dockerfile").write_text(f"FROM debian:12\n{lines}\n")
    with pytest.raises(ConfigError, match=problem):
        interpret(tmp_path / "Dockerfile")


def test_packages_that_are_here_need_no_network(tmp_path: Path) -> None:
    if not Path("/var/lib/dpkg/status").exists():
        pytest.skip("no Debian")
    (tmp_path / "Dockerfile").write_text(
        "FROM debian\nWORKDIR /app\nRUN apt-get update && apt-get install -y --no-install-recommends "
        "bash coreutils && rm -rf /var/lib/apt/lists/* && touch made\n"
    )
    assert commands(interpret(tmp_path / "Dockerfile")) == ["touch made"]


@pytest.mark.usefixtures("needs_bwrap")
def test_a_step_that_fails_says_which_and_what_it_said(tmp_path: Path) -> None:
    folder = harbor(tmp_path)
    with (folder / "environment" / "Dockerfile").open("a") as file:
        file.write("RUN echo so it goes; touch /etc/x\n")
    problem = r'(?s)RUN echo so it goes.* failed: so it goes.*kind="docker"'
    with pytest.raises(ConfigError, match=problem):
        play(folder.name, SUBMIT, tasks=folder)


def test_json_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    row = {
        "id": "a",
        "instruction": "Do.",
        "check": "true",
        "setup": "touch x",
        "files": {"f": "t"},
    }
    path.write_text(json.dumps(row) + "\n\n" + json.dumps({**row, "id": "b"}) + "\n")
    tasks = read_tasks(path)
    assert [task.id for task in tasks] == ["a", "b"]
    assert tasks[0].steps == (RunStep(command="touch x", cwd="/app", line="the setup of a"),)
    assert TerminalEnv(tasks=str(path)).task_ids() == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "kind", "problem"),
    [
        ("{", ConfigError, "line 1: not JSON"),
        ("[]", ConfigError, "must be a JSON object"),
        ('{"id": "a", "instruction": "b"}', ConfigError, "the task has no 'check'"),
        ('{"id": "a", "instruction": "b", "chek": "c"}', UnknownNameError, "Did you mean check"),
        ('{"id": 1, "instruction": "b", "check": "c"}', ConfigError, "'id' must be a text, got 1"),
        ('{"id": "a", "instruction": "b", "check": "c", "cpus": 0}', ConfigError, "> 0, got 0"),
        ('{"id": "a", "instruction": "b", "check": "c", "env": []}', ConfigError, "an object of"),
        ("", ConfigError, "holds none"),
    ],
)
def test_lines_that_are_no_tasks_are_refused(
    tmp_path: Path, line: str, kind: type[Exception], problem: str
) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(line)
    with pytest.raises(kind, match=problem):
        read_tasks(path)


def test_folders_without_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no folder with a task"):
        TerminalEnv(tasks=tmp_path)
    with pytest.raises(ConfigError, match="which doesn't exist"):
        TerminalEnv(tasks=tmp_path / "x")
    (harbor(tmp_path / "a") / "tests" / "test.sh").unlink()
    with pytest.raises(ConfigError, match=r"tests/test\.sh is needed"):
        TerminalEnv(tasks=tmp_path)
    twice = [*read_folder(harbor(tmp_path / "a"))] * 2
    with pytest.raises(ConfigError, match="more than one has 'a'"):
        TerminalEnv(tasks=twice)
