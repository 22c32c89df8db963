"""Tasks of a package made on the spot, and the file they are in."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import anyio
import pytest

from gymllm.errors import ConfigError, EnvError, UnknownNameError
from gymllm_envs.swe.changes import Changes
from gymllm_envs.swe.grading import gold_changes, grade
from gymllm_envs.swe.making import making
from gymllm_envs.swe.making.making import Made, default_tasks, make_tasks
from gymllm_envs.swe.making.package_maker import Attempt, PackageMaker
from gymllm_envs.swe.making.packages import PACKAGES, Package
from gymllm_envs.swe.making.running import PackageSandbox, Run
from gymllm_envs.swe.making.sdists import tree
from gymllm_envs.swe.making.site import site_folder
from gymllm_envs.swe.patching import apply_patch
from gymllm_envs.swe.task import SweTask, read_tasks
from gymllm_envs.swe.trees import prepare

FILE = "tests/test_shapes.py"


@pytest.fixture
def no_canaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Canaries have tests of their own."""

    async def none(task: SweTask) -> tuple[str, ...]:
        return ()

    monkeypatch.setattr(making, "working_canaries", none)


async def made_by(package: Package, count: int, *, first: int = 0) -> list[Attempt]:
    attempts: list[Attempt] = []

    async def tell(attempt: Attempt) -> None:
        attempts.append(attempt)

    await PackageMaker(package, seed=3, first=first).make(count, tell)
    return attempts


@pytest.mark.asyncio
async def test_a_task_is_what_it_says(shapes: Package) -> None:
    tasks = [attempt.task for attempt in await made_by(shapes, 4) if attempt.task]
    assert len({task.id for task in tasks}) == 4
    async with await PackageSandbox.open(shapes) as sandbox:

        def read(path: str) -> str | None:
            file = sandbox.folder / path
            return file.read_text() if file.exists() else None

        for task in tasks:
            faulty = apply_patch(task.bug_patch, read)
            hidden = apply_patch(task.hide_patch, read)
            mended = apply_patch(task.patch, lambda p, faulty=faulty: faulty[p])
            assert list(faulty) == list(mended) == ["shapes.py"]
            assert mended["shapes.py"] == read("shapes.py")
            assert list(hidden) == [FILE]
            tests = (*task.fail_to_pass, *task.pass_to_pass)
            before = {p: t or "" for p, t in faulty.items()}
            shown = {**before, **{p: t or "" for p, t in hidden.items()}}
            runs = [
                Run(targets=(FILE,), tests=tests, files=before, cpu_s=20),
                Run(targets=(FILE,), tests=tests, cpu_s=20),
                Run(targets=(FILE,), files=shown, cpu_s=20),
            ]
            wrong, right, given = await sandbox.run(runs, hash_seed=5)
            assert wrong.having("failed") == set(task.fail_to_pass)
            assert wrong.having("passed") == set(task.pass_to_pass)
            assert right.having("passed") == set(tests)
            assert not set(given.tests) & set(task.fail_to_pass)
            assert {t.rpartition("::")[2] for t in given.having("failed")} <= {
                "test_fails_always",
                "test_depends_on_the_hash_seed",
            }
            assert task.extra["function"] != "shapes.py:unreached"
            assert "shapes 1.0" in task.problem_statement


@pytest.mark.asyncio
async def test_same_seed_same_tasks_and_later_ones_go_on(shapes: Package) -> None:
    attempts = await made_by(shapes, 3)
    tasks = [attempt.task for attempt in attempts if attempt.task]
    (last,) = [t.extra["candidate"] for t in tasks[1:2]]
    assert isinstance(last, int)
    again = [a.task for a in await made_by(shapes, 1, first=last) if a.task]
    assert [dataclasses.asdict(t) for t in again] == [dataclasses.asdict(t) for t in tasks[2:]]


@pytest.mark.asyncio
async def test_file_is_filled_and_goes_on(
    shapes: Package, no_canaries: None, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "tasks.jsonl"
    made = await make_tasks(out, count=1, packages=["shapes"], seed=3)
    first = read_tasks(out)
    assert made.tasks == first
    out.write_text(out.read_text() + '{"instance_id": "torn')
    made = await make_tasks(out, count=2, packages=["shapes"], seed=3)
    assert made.before == 1
    assert read_tasks(out)[:1] == first
    assert len(read_tasks(out)) == 2
    assert not list(out.parent.glob(".*"))


@pytest.mark.asyncio
async def test_another_seed_needs_another_file(shapes: Package, tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl"
    row = {"instance_id": "a", "problem_statement": "p", "FAIL_TO_PASS": ["t"], "sdist": "a==1"}
    out.write_text(json.dumps({**row, "seed": 1}) + "\n")
    with pytest.raises(ConfigError, match="made with seed 1, got seed 2"):
        await make_tasks(out, count=2, packages=["shapes"], seed=2)


@pytest.mark.asyncio
async def test_arguments_that_can_not_be_used(tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl"
    with pytest.raises(ConfigError, match="count must be >= 1, got 0"):
        await make_tasks(out, count=0)
    with pytest.raises(UnknownNameError, match="Did you mean toolz"):
        await make_tasks(out, count=1, packages=["tolz"])
    assert not out.exists()


@pytest.mark.asyncio
async def test_packages_that_fail_do_not_stop_others(
    shapes: Package,
    no_canaries: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CERT", "")
    monkeypatch.setattr("gymllm_envs.swe.making.sdists._pip_config", dict)
    out = tmp_path / "tasks.jsonl"
    made = await make_tasks(out, count=2, packages=["toolz", "shapes"], seed=3)
    assert [task.repo for task in made.tasks] == ["shapes", "shapes"]
    assert "Check the network" in str(made.failed["toolz"])
    with pytest.raises(EnvError, match=r"toolz.*Check the network"):
        await make_tasks(tmp_path / "none.jsonl", count=2, packages=["toolz"])


def test_default_tasks_are_made_once(
    shapes: Package, no_canaries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "DEFAULT_PACKAGES", ("shapes",))
    monkeypatch.setattr(making, "DEFAULT_COUNT", 1)
    told: list[Made] = []
    path = default_tasks(told.append)
    assert len(read_tasks(path)) == 1
    assert told
    told.clear()
    assert default_tasks(told.append) == path
    assert not told
    monkeypatch.setattr(making, "DEFAULT_COUNT", 3)
    monkeypatch.setattr(making, "make_tasks", None)
    with pytest.raises(TypeError):  # made anew
        default_tasks(told.append)


def test_progress_is_plain_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    task = SweTask(id="a", repo="a", problem_statement="p", fail_to_pass=("t",), sdist="a==1")
    progress = making.Progress("Making tasks")
    made = Made(count=2)
    progress(made)
    made.add(Attempt(operator="flag", task=None, reason="survived"))
    made.add(Attempt(operator="flag", task=task))
    assert made.line() == "1 of 2 tasks, 1 package, 2 bugs tried, 0 s, about 0 s left"
    made.add(Attempt(operator="twin", task=task))
    progress(made)
    assert capsys.readouterr().err == "Making tasks.\n2 of 2 tasks, 1 package, 3 bugs tried, 0 s\n"
    assert made.operators == {"flag": (2, 1), "twin": (1, 1)}
    assert made.dropped == {"survived": 1}


def test_real_package_end_to_end(tmp_path: Path) -> None:
    """From the package index to tasks whose gold patch is worth 1, and nothing 0."""
    try:
        tree(PACKAGES["isodate"].sdist)
        site_folder()
    except EnvError as problem:
        pytest.skip(f"the package index can't be reached: {problem}")

    async def make() -> None:
        made = await make_tasks(tmp_path / "t.jsonl", count=2, packages=["isodate"])
        assert len(made.tasks) == 2
        task = made.tasks[0]
        assert (await grade(task, gold_changes(task, await prepare(task)))).reward() == 1
        assert (await grade(task, Changes(files={}))).reward() == 0

    anyio.run(make)
