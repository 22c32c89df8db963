"""Tasks in containers, played and graded on a real daemon: honest work gets 1, nothing and forgeries 0."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import gymnasium
import pytest
from anyio import to_thread

sys.path.append(str(Path(__file__).parent))  # task_image
sys.path.append(str(Path(__file__).parents[2] / "core/sandbox"))  # podman_service

import podman_service
import task_image

from gymllm.errors import ConfigError, EnvError, SandboxError, SandboxStartError, UnknownNameError
from gymllm.sandbox.docker import DockerHost
from gymllm_envs.swe.grading import Verdict
from gymllm_envs.swe.image_place import grade_gold
from gymllm_envs.swe.image_tree import counting
from gymllm_envs.swe.patching import make_patch
from gymllm_envs.swe.place import open_place
from gymllm_envs.swe.readers import read_row
from gymllm_envs.swe.recipe import Recipe
from gymllm_envs.swe.task import SweTask

if TYPE_CHECKING:
    import docker

CORE, TESTS = "halving/core.py", "tests/test_core.py"
GOLD = make_patch({CORE: task_image.FAULTY}, {CORE: task_image.MENDED})
BUG = make_patch({CORE: task_image.MENDED}, {CORE: task_image.FAULTY})
TEST_PATCH = make_patch({TESTS: task_image.TESTS}, {TESTS: task_image.HIDDEN})
F2P = [f"{TESTS}::test_seven", f"{TESTS}::test_nine"]
P2P = [f"{TESTS}::test_zero", f"{TESTS}::test_double"]
MEND = f"sed -i 's#n // 3#n // 2#' {CORE}"
SCRIPT = f"""#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
cd /testbed
git checkout {"1" * 40} {TESTS}
git apply -v - <<'EOF_1'
{TEST_PATCH}
EOF_1
: '>>>>> Start Test Output'
pytest -rA -p no:cacheprovider {TESTS}
: '>>>>> End Test Output'
git checkout {"1" * 40} {TESTS}
"""


@pytest.fixture(scope="session")
def host() -> Iterator[DockerHost]:
    docker = pytest.importorskip("docker", reason='needs pip install "gymllm[docker]"')
    if podman_service.why_not():
        pytest.skip(podman_service.why_not())
    with podman_service.podman_service() as address:
        api = docker.APIClient(base_url=address)
        api.import_image_from_data(task_image.packed(), repository=task_image.NAME, tag="latest")
        api.close()
        yield DockerHost(url=address, pull="never")


def swe_bench(**changes: object) -> SweTask:
    row: dict[str, object] = {
        "instance_id": "john__halving-1",
        "repo": "john/halving",
        "base_commit": "1" * 40,
        "problem_statement": "halve(7) gives 2.",
        "patch": GOLD,
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": json.dumps(F2P),
        "PASS_TO_PASS": json.dumps(P2P),
        "version": "1.0",
        "image": task_image.NAME,
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "eval_script": SCRIPT,
    }
    return replace(read_row({**row, **changes}, "row"), timeout_s=60)


def swe_smith() -> SweTask:
    row: dict[str, object] = {
        "instance_id": "john__halving.0123abcd.func__1",
        "repo": "swesmith/john__halving.0123abcd",
        "problem_statement": "",
        "patch": BUG,
        "FAIL_TO_PASS": F2P,
        "PASS_TO_PASS": P2P,
        "image_name": task_image.NAME,
    }
    return replace(read_row(row, "row"), workdir="/smith", timeout_s=60)


def r2e_gym() -> SweTask:
    expected = dict.fromkeys(("test_seven", "test_nine", "test_zero", "test_double"), "PASSED")
    row: dict[str, object] = {
        "repo_name": "halving",
        "docker_image": task_image.NAME,
        "commit_hash": "5" * 40,
        "problem_statement": "[ISSUE]halve(7) gives 2.[/ISSUE]",
        "expected_output_json": json.dumps(expected),
        "parsed_commit_content": "{}",
    }
    task = replace(read_row(row, "row"), workdir="/r2e", timeout_s=60)
    recipe = replace(Recipe.of(task), path=Recipe.of(swe_bench()).path)
    return replace(task, extra=recipe.extra())


def swe_rebench() -> SweTask:
    command = f"pytest --no-header -rA --tb=line -p no:cacheprovider {TESTS}"
    config = {"log_parser": "parse_log_pytest", "test_cmd": [command]}
    row = {
        "instance_id": "john__testbed-1",
        "repo": "john/testbed",
        "problem_statement": "halve(7) gives 2.",
        "patch": GOLD,
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": F2P,
        "PASS_TO_PASS": P2P,
        "image_name": task_image.NAME,
        "install_config": config,
    }
    task = read_row(row, "row")
    recipe = replace(Recipe.of(task), path=Recipe.of(swe_bench()).path)
    return replace(task, extra=recipe.extra(), timeout_s=60)


def docker_api(host: DockerHost) -> docker.APIClient:
    import docker

    return docker.APIClient(base_url=host.url)


async def play(host: DockerHost, task: SweTask, *commands: str) -> tuple[Verdict, str]:
    """Runs commands as an agent would, and hands in; what the last one said."""
    place = await open_place(task, host, memory_mb=1024)
    said = b""
    try:
        shell = await place.sandbox.shell()
        for command in commands:
            said = bytes((await shell.run(command, timeout_s=30)).stdout)
        return await place.submit(), said.decode()
    finally:
        await place.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize("make", [swe_bench, swe_smith, r2e_gym, swe_rebench])
async def test_gold_gets_1_and_nothing_gets_0(make: type[SweTask], host: DockerHost) -> None:
    task = make()
    if task.patch:
        solved = await grade_gold(task, host)
    else:
        solved, _ = await play(host, task, MEND)
    assert (solved.resolved, solved.reward(), solved.reason) == (True, 1.0, "")
    assert {*solved.fail_to_pass.values()} == {"passed"}
    assert "+    return n // 2" in solved.patch
    idle, _ = await play(host, task)
    assert (idle.resolved, idle.reward(), idle.patch) == (False, 0.0, "")
    assert "2 of" in idle.reason


def put(text: str, *files: str) -> str:
    """A command that adds text to files."""
    return f"tee -a {' '.join(files)} >/dev/null <<'END'\n{text}\nEND\n"


HONEST = {
    "a commit, junk and caches": f"{MEND}; git commit -qam x; echo j > junk; python -m pytest -q",
    "the file anew": f"rm {CORE}\n{put(task_image.MENDED, CORE)}",
    "another module": put("def half(n):\n    return n // 2", "halving/more.py")
    + f"sed -i '1i from halving.more import half' {CORE}; sed -i 's#n // 3#half(n)#' {CORE}",
    "broken tests on top": f"{MEND}\n"
    + put("import nothing", TESTS)
    + put("raise SystemExit", "conftest.py", "tests/conftest.py"),
    "without access": f"{MEND}; chmod 000 {CORE} halving/__init__.py",
    "a background process": f"{MEND}; (while :; do echo $((n += 1)) > log.txt; done) &",
}


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize("work", HONEST.values(), ids=HONEST)
async def test_honest_work_of_every_kind_gets_1(work: str, host: DockerHost) -> None:
    verdict, _ = await play(host, swe_bench(), work)
    assert verdict.reason == ""
    assert verdict.reward() == 1.0


SAY = "\\n".join(["", *(f"PASSED {test}" for test in (*F2P, *P2P)), ""])
HOOK = """import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    result = yield
    result.get_result().outcome = "passed"
"""
PASSES = """import _pytest.reports

def passes(item, call, old=_pytest.reports.TestReport.from_item_and_call):
    call.excinfo = None
    return old(item, call)

_pytest.reports.TestReport.from_item_and_call = passes
"""
FORGES = f"""import os
for fd in range(1, 64):
    try:
        os.write(fd, b'{SAY}')
    except OSError:
        pass
os._exit(%d)
"""
ATTACKS = {
    "edits the tests": f"sed -i 's/assert .*/pass/' {TESTS}",
    "a hook in conftest.py": put(HOOK, "conftest.py", "tests/conftest.py"),
    "patches pytest": put(PASSES, CORE),
    "says PASSED and leaves": put(FORGES % 0, CORE),
}
MORE_ATTACKS = {
    "says PASSED and leaves with 1": put(FORGES % 1, CORE),
    "says PASSED at the end": put(
        f"import atexit, os\natexit.register(lambda: (os.write(1, b'{SAY}'), os._exit(1)))", CORE
    ),
    "takes the tests away": "rm -r tests; ln -s /tmp tests",
    "a plug-in by pytest.ini": put(HOOK, "halving/plug.py")
    + put("[pytest]\naddopts = -p halving.plug", "pytest.ini", "tox.ini"),
    "start-up files": put(
        "export PYTEST_ADDOPTS=--co", "~/.bashrc", "~/.profile", "~/.bash_profile"
    ),
    "skips all": put("import pytest\npytest.skip('x', allow_module_level=True)", CORE),
    "another pytest": "mkdir pytest\n" + put("raise SystemExit(0)", "pytest/__init__.py", "py.py"),
    "sitecustomize": put("import os\nos._exit(0)", "sitecustomize.py", "usercustomize.py"),
    "an interpreter of its own": "rm /opt/miniconda3/envs/testbed/bin/pytest\n"
    + put("#!/bin/sh\nexit 0", "/opt/miniconda3/envs/testbed/bin/pytest"),
    "tools of its own": "rm /bin/find /bin/sha256sum\n" + put("#!/bin/sh", "/bin/find"),
    "no sh": "rm /bin/sh /bin/bash",
    "never ends": put("while True:\n    pass", CORE),
    "a log bomb": put("import os\nwhile True:\n    os.write(1, b'x' * 1000000)", CORE),
    "a fork bomb": ":(){ : | : & }; : 2>/dev/null",
    "much": "for n in $(seq 40); do dd if=/dev/zero of=$n.txt bs=1M count=1 2>/dev/null; done",
    "a pipe": f"rm {CORE}; mkfifo {CORE} halving/pipe",
    "names": r"touch $'a\nb.py' $'a\001b.py' $'\377.py' $'\\.py'",
    "mends it later": f"setsid sh -c 'sleep 3; {MEND}' >/dev/null 2>&1 &",
    "a link for the sources": "cp -r halving /tmp/h; rm -r halving; ln -s /tmp/h halving; "
    "sed -i 's#n // 3#n // 2#' /tmp/h/core.py",
}
ENDLESS = {"never ends", "a log bomb"}


async def attack(name: str, command: str, host: DockerHost) -> None:
    task = replace(swe_bench(), timeout_s=6 if name in ENDLESS else 60)
    verdict, _ = await play(host, task, command)
    assert verdict.reward() == 0.0
    assert verdict.reason


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ATTACKS)
async def test_a_forgery_gets_0(name: str, host: DockerHost) -> None:
    await attack(name, ATTACKS[name], host)


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_ATTACKS)
async def test_a_forgery_of_many_kinds_gets_0(name: str, host: DockerHost) -> None:
    await attack(name, MORE_ATTACKS[name], host)


@pytest.mark.asyncio
async def test_forgeries_are_called_so(host: DockerHost) -> None:
    module = replace(swe_bench(), test_command=f"python -m pytest -rA {TESTS}")
    caught, _ = await play(host, module, ATTACKS["patches pytest"])
    assert caught.tampered == "a test that must fail did not: passed"
    forged, _ = await play(host, swe_bench(), ATTACKS["says PASSED and leaves"])
    assert forged.tampered == "tests that must fail were not run"
    assert {*forged.fail_to_pass.values()} == {"passed"}
    assert forged.reward(partial=True) == 0.0
    later, _ = await play(host, swe_bench(), MORE_ATTACKS["says PASSED at the end"])
    assert {*later.fail_to_pass.values()} == {"failed"}


@pytest.mark.asyncio
async def test_no_later_commit_and_no_hidden_test_is_in_the_container(host: DockerHost) -> None:
    secret = f"'{task_image.SECRET[:-4]}''{task_image.SECRET[-4:]}'"
    look = (
        "git log --all --oneline | wc -l; git reflog --all | wc -l; git branch -a | wc -l; "
        "git fsck --unreachable --no-reflogs 2>&1 | grep -c commit; git status --short | wc -l; "
        f"git cat-file --batch-all-objects --batch </dev/null | grep -ac {secret}; "
        "git describe --tags"
    )
    _, said = await play(host, swe_bench(), look)
    assert said.split() == ["1", "0", "1", "0", "0", "0", "v1.0"]
    for task in (swe_smith(), r2e_gym()):
        hidden = f"find . /root {'/r2e_tests' if task.repo == 'halving' else ''} -type f"
        _, said = await play(
            host, task, f"{hidden} -exec grep -l 'def test_sev''en' {{}} +; echo ."
        )
        assert said == ".\n"


@pytest.mark.asyncio
async def test_what_does_not_count_is_said(host: DockerHost) -> None:
    work = f"{MEND}; echo '#' >> {TESTS}; touch setup.py; ln -s / root; truncate -s 17M big; chmod +x {CORE}"
    verdict, _ = await play(host, swe_bench(), work)
    assert verdict.resolved
    assert verdict.left_out == {
        "big": "too large",
        "root": "no regular file",
        "setup.py": "a setting of builds or tests",
        TESTS: "a test",
    }


@pytest.mark.asyncio
async def test_a_broken_kept_test_is_no_solution_but_a_part(host: DockerHost) -> None:
    verdict, _ = await play(host, swe_bench(), f"{MEND}; sed -i 's/2 \\* n/3 * n/' {CORE}")
    assert verdict.reason == "0 of 2 tests still fail, 1 of 2 others are broken"
    assert (verdict.reward(), verdict.reward(partial=True)) == (0.0, 0.5)


@pytest.mark.asyncio
async def test_what_is_the_machines_fault_raises(host: DockerHost) -> None:
    with pytest.raises(SandboxError, match=r"can't be run in .* with or without a patch"):
        await play(host, replace(swe_bench(), test_command="no-such-runner"), MEND)
    with pytest.raises(EnvError, match="test_patch doesn't fit"):
        await play(host, replace(swe_bench(), test_patch=BUG.replace("n // 2", "n // 7")), MEND)
    with pytest.raises(EnvError, match="patch doesn't fit"):
        await grade_gold(replace(swe_bench(), patch=BUG), host)
    with pytest.raises(EnvError, match="bug_patch doesn't fit"):
        await play(host, replace(swe_bench(), bug_patch=BUG), MEND)
    with pytest.raises(SandboxStartError, match=r"no-such-image.*docker pull"):
        await play(host, replace(swe_bench(), image="localhost/no-such-image"))
    place = await open_place(swe_bench(), host, memory_mb=1024)
    await place.aclose()
    with pytest.raises(SandboxError):
        await place.submit()


@pytest.mark.asyncio
async def test_a_grading_that_is_taken_down_is_done_again(host: DockerHost) -> None:
    place = await open_place(swe_bench(), host, memory_mb=1024)
    await place.sandbox.exec(["sh", "-c", MEND])
    api = docker_api(host)
    own = {one["Id"] for one in api.containers()}
    taken: list[str] = []

    def look() -> None:
        for one in api.containers():
            if one["Id"] not in own and "pytest" in str(api.top(one["Id"])["Processes"]):
                api.kill(one["Id"])
                taken.append(one["Id"])

    async def take_down() -> None:
        while not taken:
            await to_thread.run_sync(look)

    async with anyio.create_task_group() as group:
        group.start_soon(take_down)
        verdict = await place.submit()
    assert taken
    assert verdict.reward() == 1.0


def test_sources_that_look_like_tests_count_where_the_solution_changes_them() -> None:
    before = dict.fromkeys(("django/test/client.py", "src/_pytest/main.py", "setup.py"), "a\n")
    gold = make_patch(before, {**before, **dict.fromkeys(before, "b\n")})
    counts = counting(replace(swe_bench(), patch=gold), Recipe())
    for path in (*before, "django/test/runner.py", "src/_pytest/nodes.py", "halving/core.py"):
        assert counts.why_left_out(path) == ""
    for path in (
        *("django/test/test_client.py", "django/test/conftest.py", TESTS, "setup.cfg", "tox.ini"),
        *("src/_pytest/conftest.py", "tests/helper.py", "django/test/__pycache__/a.pyc"),
    ):
        assert counts.why_left_out(path)


@pytest.mark.asyncio
async def test_canaries_that_a_task_can_not_run_are_done_without(host: DockerHost) -> None:
    names = " ".join(f"{TESTS}::{test.partition('::')[2]}" for test in (*F2P, *P2P))
    command = f"eval pytest -rA -p no:cacheprovider {names} # {TESTS}"
    verdict, _ = await play(host, replace(swe_bench(), id="named", test_command=command), MEND)
    assert verdict.resolved


@pytest.mark.asyncio
async def test_a_task_that_can_not_be_graded_is_refused_at_once(host: DockerHost) -> None:
    with pytest.raises(UnknownNameError, match="Unknown log parser 'parse_log_cobol'"):
        await open_place(swe_bench(log_parser="parse_log_cobol"), host, memory_mb=512)
    bare = SweTask(id="a", repo="b", problem_statement="c", fail_to_pass=("d",), image="e")
    with pytest.raises(ConfigError, match="has no test_command"):
        await open_place(bare, host, memory_mb=512)
    with pytest.raises(ConfigError, match="kind='docker' or 'kubernetes', got 'local'"):
        await open_place(swe_bench(), "local", memory_mb=512)


def test_the_environment_plays_them(host: DockerHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", host.url)
    env = gymnasium.make("gymllm/SWE-v0", tasks=[swe_bench()], tools="bash", kind="docker")
    observation, info = env.reset(seed=1)
    assert "/testbed" in observation
    observation, *_ = env.step(f"```bash\n{MEND}; git diff; command -v python\n```")
    assert "+    return n // 2" in observation
    assert "/opt/miniconda3/envs/testbed/bin/python" in observation
    _, reward, terminated, _, info = env.step("```bash\nsubmit\n```")
    assert (reward, terminated, info["resolved"]) == (1.0, True, True)
    env.close()
