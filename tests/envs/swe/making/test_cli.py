"""`gymllm-swe-tasks`: what it prints, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymllm_envs.swe.making import cli, making
from gymllm_envs.swe.making.packages import PACKAGES, Package
from gymllm_envs.swe.task import SweTask, read_tasks


def test_list_names_every_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PACKAGES)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["make", "--packages", "tolz"], "Did you mean toolz"),
        (["make", "--count", "0"], "count must be >= 1, got 0"),
        (["make", "--engine-url", "http://x"], "--engine-url and --engine-model go together"),
    ],
)
def test_arguments_that_can_not_be_used(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "t.jsonl")
    assert cli.main([arguments[0], "--out", out, *arguments[1:]]) == cli.EXIT_CONFIG
    assert said in capsys.readouterr().err


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", "nowhere.jsonl"]) == cli.EXIT_CONFIG
    assert "nowhere.jsonl" in capsys.readouterr().err


def test_make_validate_show(
    shapes: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "t.jsonl")
    arguments = ["make", "--out", out, "--count", "1", "--packages", "shapes", "--seed", "3"]
    assert cli.main(arguments) == 0
    assert "1 task of 1 package," in capsys.readouterr().out
    assert cli.main(["validate", out]) == 0
    assert "1 of 1 tasks valid" in capsys.readouterr().out
    (task,) = read_tasks(Path(out))
    assert set(task.canaries) <= set(task.fail_to_pass)
    assert cli.main(["show", out, task.id]) == 0
    shown = capsys.readouterr().out
    assert task.problem_statement in shown
    assert task.patch in shown
    assert cli.main(["show", out, task.id + "x"]) == cli.EXIT_CONFIG
    assert f"Did you mean {task.id}" in capsys.readouterr().err


def test_too_few_bugs_is_told(
    shapes: Package,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def none(task: SweTask) -> tuple[str, ...]:
        return ()

    monkeypatch.setattr(making, "working_canaries", none)
    monkeypatch.setattr("gymllm_envs.swe.making.package_maker._ROUNDS", 1)
    out = str(tmp_path / "t.jsonl")
    arguments = ["make", "--out", out, "--count", "999", "--packages", "shapes"]
    assert cli.main(arguments) == cli.EXIT_BROKEN
    said = capsys.readouterr()
    assert "of 999 tasks: these packages have no more bugs to give" in said.err
    assert "bugs tried" in said.out


def test_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def interrupted(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "make_tasks", interrupted)
    assert cli.main(["make", "--out", str(tmp_path / "t.jsonl")]) == cli.EXIT_INTERRUPTED
    assert "what is made is kept" in capsys.readouterr().err
