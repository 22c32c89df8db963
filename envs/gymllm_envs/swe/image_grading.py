"""What a patch is worth, for tasks in images: the tests' log, from a fresh container.

    image ── the fault ── hidden tests, with canaries ── history cut ── the agent's files ── test command
          ── log ── statuses ── Verdict

The log is what graded code has written, so it isn't believed further than this: tests that must fail are
among the hidden ones, under names drawn for this run; a test that is said to have both passed and failed has
failed; a log that was cut, or a run that was killed, or that ended well with tests that must fail, counts as
nothing. What is left: code that reads the test files while it is run, tells the canaries from the others, and
writes a whole log. Tasks from source distributions don't have this hole: see `grading`.

A verdict of 0 is the patch's fault. Where a run says nothing of any test, the same is tried without the
patch: if that says nothing either, it is the machine's or the image's, and raises.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from anyio import to_thread

from gymllm.errors import SandboxDiedError, SandboxError, SandboxFileError
from gymllm.sandbox import Sandbox, SandboxSpec, open_sandbox
from gymllm.sandbox.docker import DockerHost
from gymllm.sandbox.kubernetes import KubernetesHost
from gymllm_envs.swe import image_tree
from gymllm_envs.swe.canaries import add_canaries
from gymllm_envs.swe.changes import Changes
from gymllm_envs.swe.grading import Verdict
from gymllm_envs.swe.log_parsing import R2E, parse_log, runner_of
from gymllm_envs.swe.patching import make_patch
from gymllm_envs.swe.readers import commands
from gymllm_envs.swe.recipe import Recipe
from gymllm_envs.swe.task import SweTask

Kind = str | DockerHost | KubernetesHost

_MEMORY_MB = 4096
_MOST_LOG_BYTES = 32 << 20
_MOST_PATCH_CHARS = 200_000
_MOST_CANARY_FILES = 8
_OUTCOMES = {"PASSED": "passed", "XFAIL": "passed", "SKIPPED": "skipped"}
"""All else: failed."""
_SELECTS = re.compile(r"\s(-k|-m|-x|--exitfirst|--maxfail|--deselect|--lf)\b")
_TIMES = re.compile(
    r"\s*(\[\s*\d+(\.\d+)?\s*m?s\s*\]|\(\s*\d+(\.\d+)?\s*m?s\s*\)|in\s+\d+(\.\d+)?\s+m?sec)\s*$"
)
"""At the end of names in SWE-rebench-V2: how long it took."""

_WENT_DOWN = "its sandbox went down"
_without_canaries: set[str] = set()
"""Tasks in which canaries are not run even without a patch, as has shown."""


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What one run said."""

    statuses: Mapping[str, str] = field(default_factory=dict[str, str])
    canaries: Sequence[str] = ()
    """Their names in the log."""
    ended: str = ""
    """Not empty: why nothing that it said counts."""
    exit_code: int | None = None
    tail: str = ""
    before: Mapping[str, bytes | None] = field(default_factory=dict[str, bytes | None])
    """The graded files, as they were."""

    @property
    def says_nothing(self) -> bool:
        return not self.statuses


def spec_of(task: SweTask, recipe: Recipe, memory_mb: int) -> SandboxSpec:
    """The container of a task.

    Args:
        task: Which.
        recipe: Its own.
        memory_mb: As in `SandboxSpec`.
    """
    env = {"PAGER": "cat", "GIT_PAGER": "cat", "PIP_NO_INDEX": "1", "PYTEST_ADDOPTS": ""}
    if recipe.path:
        env["PATH"] = recipe.path
    return SandboxSpec(
        image=task.image,
        workdir=task.workdir,
        env=env,
        memory_mb=memory_mb,
        pids=512,
    )


async def grade_in_image(
    task: SweTask, changes: Changes, kind: Kind, *, rng: random.Random | None = None
) -> Verdict:
    """Grades a patch.

    Args:
        task: From an image.
        changes: As `image_tree.read_changes` has them.
        kind: Of sandbox.
        rng: Draws the canaries; by default nobody can know which.

    Raises:
        SandboxError: The tests could not be run, whatever the patch.
        EnvError: The task doesn't fit its image.
    """
    began = time.monotonic()
    recipe = Recipe.of(task)
    rng = rng or random.SystemRandom()
    if changes.refused:
        run = _Run(ended=changes.refused)
    else:
        run = await _tried(task, recipe, changes.files, kind, rng)
        if run.ended == _WENT_DOWN:  # it may have been taken down from outside
            run = await _tried(task, recipe, changes.files, kind, rng)
        if run.says_nothing:
            bare = await _tried(task, recipe, {}, kind, rng)
            if bare.says_nothing:
                raise SandboxError(
                    f"The tests of task {task.id} can't be run in {task.image}, with or without a patch: "
                    f"{bare.ended or 'the log says nothing of any test'}. Its end: {bare.tail}"
                )
    verdict = _verdict(task, recipe, changes, run)
    if verdict.tampered == _NOT_RUN and not changes.refused:
        bare = await _tried(task, recipe, {}, kind, rng)
        if not any(_said(name, bare.statuses) for name in bare.canaries):
            _without_canaries.add(task.id)
            run = await _tried(task, recipe, changes.files, kind, rng)
            verdict = _verdict(task, recipe, changes, run)
    return replace(verdict, wall_s=time.monotonic() - began)


async def _tried(
    task: SweTask,
    recipe: Recipe,
    files: Mapping[str, bytes | None],
    kind: Kind,
    rng: random.Random,
) -> _Run:
    try:
        async with await open_sandbox(spec_of(task, recipe, _MEMORY_MB), kind) as sandbox:
            await image_tree.put_bug(sandbox, task)
            names = await _bring_tests(sandbox, task, recipe, rng)
            await image_tree.cut_history(sandbox, task)
            before = await _before(sandbox, files)
            if problem := await _put(sandbox, files):
                return _Run(ended=problem, before=before)
            try:
                return await _run(sandbox, task, recipe, names, before)
            except SandboxDiedError:
                return _Run(ended=_WENT_DOWN, before=before)
    except image_tree.UnreadableError as problem:
        raise SandboxError(f"task {task.id}, image {task.image}: {problem}") from problem


async def _bring_tests(
    sandbox: Sandbox, task: SweTask, recipe: Recipe, rng: random.Random
) -> list[str]:
    """Puts the hidden tests in place, with canaries among them; the canaries' names in the log."""
    if recipe.bring:
        done = await image_tree.run_script(sandbox, recipe.bring)
        if done.exit_code != 0:
            said = bytes(done.stderr).decode(errors="replace").strip()
            raise SandboxError(
                f"The hidden tests of task {task.id} aren't in {task.image} where they ought to be. {said}"
            )
    if task.test_patch:
        await image_tree.patch(sandbox, task, "test_patch", task.test_patch)
    if task.id in _without_canaries:
        return []
    names: list[str] = []
    for file in await _files_for_canaries(sandbox, task, recipe):
        (content,) = await image_tree.read_files(sandbox, [file]) or [None]
        try:
            text = (content or b"").decode()
        except UnicodeDecodeError:
            continue
        if text:
            made = add_canaries(file, text, (), rng)
            await sandbox.write(file, made.source.encode())
            names += made.names
    return [in_log for name in names if (in_log := _in_log(name, recipe.log_parser))]


def _in_log(name: str, parser: str) -> str:
    """What a canary is called in the log; empty where its kind isn't run."""
    _, *classes, function = name.split("::")
    if parser == R2E:
        return ".".join([*classes, function])
    runner = runner_of(parser)
    if runner == "pytest":
        return name
    return function if bool(classes) == (runner == "unittest") else ""


async def _files_for_canaries(sandbox: Sandbox, task: SweTask, recipe: Recipe) -> list[str]:
    """Test files that the command runs as a whole, as far as can be seen."""
    if recipe.log_parser == R2E:
        listed = await sandbox.list("r2e_tests")
        files = [f"r2e_tests/{one.name}" for one in listed if one.kind == "file"]
        files = [file for file in files if re.search(r"/test[^/]*\.py$", file)]
        return files[:_MOST_CANARY_FILES]
    runner = runner_of(recipe.log_parser)
    last = task.test_command.strip().rpartition("\n")[2]
    if not runner or _SELECTS.search(re.sub(r"\S*python\S* -m ", "", last)):
        return []
    asked = [word.rstrip("/") for word in commands.words(last)]
    if runner != "pytest":
        files = commands.test_files_of(task.test_patch, f"task {task.id}")
        # Named as a file, or as a module from some folder on.
        modules = {file: file.removesuffix(".py").replace("/", ".") for file in files}
        named = [
            f for f in files if any(w == f or f".{modules[f]}".endswith(f".{w}") for w in asked)
        ]
        return [file for file in named if file.endswith(".py")][:_MOST_CANARY_FILES]
    if not any(word in last for word in ("pytest", "tox")):
        return []
    tests = dict.fromkeys(t.partition("::")[0] for t in task.fail_to_pass if "::" in t)
    whole = [f for f in tests if any(f == w or f.startswith(f"{w}/") for w in asked)]
    if not whole and not any(word.endswith(".py") or "::" in word for word in asked):
        whole = list(tests)  # nothing is named, so everything is run
    return [file for file in whole if file.endswith(".py")][:_MOST_CANARY_FILES]


async def _before(
    sandbox: Sandbox, files: Mapping[str, bytes | None]
) -> Mapping[str, bytes | None]:
    found = await image_tree.read_files(sandbox, list(files))
    return dict(zip(files, found, strict=True)) if found is not None else {}


async def _put(sandbox: Sandbox, files: Mapping[str, bytes | None]) -> str:
    """Makes the agent's changes; why they can't be made."""
    gone = [path for path, content in files.items() if content is None]
    if gone:
        names = "".join(f"{path}\n" for path in gone).encode(errors="surrogateescape")
        script = 'while IFS= read -r path; do rm -f -- "./$path"; done'
        await image_tree.run_script(sandbox, script, input=names)
    for path, content in files.items():
        if content is not None:
            try:
                await _write(sandbox, path, content)
            except SandboxFileError as problem:
                return f"the patch can't be put in place: {problem}"
    return ""


async def _write(sandbox: Sandbox, path: str, content: bytes) -> None:
    """Keeps the mode of what is there: scripts of the tree are run as such."""
    script = 'stat -c %a -- "$1" 2>/dev/null || echo 644'
    done = await image_tree.run_script(sandbox, script, f"./{path}")
    mode = bytes(done.stdout).decode(errors="replace").strip()
    await sandbox.write(
        path, content, mode=int(mode, 8) if re.fullmatch("[0-7]{3,4}", mode) else 0o644
    )


async def _run(
    sandbox: Sandbox,
    task: SweTask,
    recipe: Recipe,
    canaries: Sequence[str],
    before: Mapping[str, bytes | None],
) -> _Run:
    lines = [f"{{\n{recipe.test_setup or ':'}\n}} >/tmp/setup.log 2>&1", f"cd {task.workdir}"]
    lines += ["unset PYTEST_ADDOPTS PYTEST_PLUGINS PYTHONSTARTUP", "exec 2>&1", task.test_command]
    done = await sandbox.exec(
        ["bash", "--noprofile", "--norc", "-c", "\n".join(lines)],
        timeout_s=task.timeout_s,
        max_output_bytes=_MOST_LOG_BYTES,
    )
    log = bytes(done.stdout).decode(errors="replace")
    tail = (log + bytes(done.stderr).decode(errors="replace")).strip()[-1500:]
    ended = ""
    if done.timed_out:
        ended = f"the tests took longer than {task.timeout_s:g} s"
    elif done.stdout.cut_bytes:
        ended = f"the tests wrote more than {_MOST_LOG_BYTES >> 20} MB"
    elif done.exit_code is None:
        ended = f"the tests were killed by signal {done.signal}"
    statuses = await to_thread.run_sync(
        lambda: parse_log(
            recipe.log_parser, log, version=str(task.extra.get("version", "")), task=task.id
        )
    )
    return _Run(
        statuses=statuses,
        canaries=canaries,
        ended=ended,
        exit_code=done.exit_code,
        tail=tail,
        before=before,
    )


_NOT_RUN = "tests that must fail were not run"


def _verdict(task: SweTask, recipe: Recipe, changes: Changes, run: _Run) -> Verdict:
    name_of = _without_time if recipe.format == "swe-rebench-v2" else str
    statuses = {name_of(name): said for name, said in run.statuses.items()}
    f2p = {test: _outcome(name_of(test), statuses) for test in task.fail_to_pass}
    p2p = {test: _outcome(name_of(test), statuses) for test in task.pass_to_pass}
    kept = {"passed", "skipped"} if recipe.skipped_is_kept else {"passed"}
    still = [test for test, outcome in f2p.items() if outcome != "passed"]
    broken = [test for test, outcome in p2p.items() if outcome not in kept]
    if recipe.expected:
        seen = {name: said for name, said in statuses.items() if name not in run.canaries}
        differ = {*seen.items()} ^ {*recipe.expected.items()}
        broken += sorted({name for name, _ in differ} - {*still})
    tampered = _tampered(task, run, statuses, all_passed=not still and not broken)
    reason = run.ended
    if tampered:
        reason = f"tampered with: {tampered}"
    elif not reason and (still or broken):
        others = len(p2p) or len(recipe.expected)
        reason = f"{len(still)} of {len(f2p)} tests still fail, {len(broken)} of {others} others are broken"
        if run.says_nothing:
            reason += f" (the log says nothing of any test; its end: {run.tail[-300:]})"
    elif not reason and not run.canaries and run.exit_code != 0 and not _failed(statuses):
        # As swebench does: an end in failure that the log knows nothing of.
        reason = f"all tests are said to pass, but their run ended with {run.exit_code}"
    return Verdict(
        resolved=not reason,
        fail_to_pass=f2p,
        pass_to_pass=p2p,
        tampered=tampered,
        reason=reason,
        patch=_patch(changes, run.before),
        left_out=changes.left_out,
        unproven=any(_said(name, statuses) not in {"FAILED", "ERROR"} for name in run.canaries),
    )


def _failed(statuses: Mapping[str, str]) -> bool:
    return any(said in {"FAILED", "ERROR"} for said in statuses.values())


def _said(canary: str, statuses: Mapping[str, str]) -> str:
    """A canary's status; empty: none. unittest adds the class to its name, which nobody else has."""
    if canary in statuses:
        return statuses[canary]
    found = [said for name, said in statuses.items() if name.startswith(f"{canary} (")]
    return found[0] if found else ""


def _tampered(task: SweTask, run: _Run, statuses: Mapping[str, str], *, all_passed: bool) -> str:
    if not run.canaries:
        return ""
    said = [_said(name, statuses) for name in run.canaries]
    if good := [one for one in said if one and one not in {"FAILED", "ERROR"}]:
        return f"a test that must fail did not: {good[0].lower()}"
    if all_passed and not all(said):
        return _NOT_RUN
    if all_passed and run.exit_code == 0 and not re.search(r"[|;&\n]", task.test_command):
        return "tests that must fail have failed, but their run ended well"
    return ""


def _without_time(name: str) -> str:
    return _TIMES.sub("", name).strip()


def _outcome(test: str, statuses: Mapping[str, str]) -> str:
    said = statuses.get(test)
    if said is None and test.count("[") > test.count("]"):
        # Names in SWE-bench that were cut in their parameters: those that begin so, if they agree.
        found = {
            _OUTCOMES.get(s, "failed") for name, s in statuses.items() if name.startswith(test)
        }
        return found.pop() if len(found) == 1 else "missing"
    return "missing" if said is None else _OUTCOMES.get(said, "failed")


def _patch(changes: Changes, before: Mapping[str, bytes | None]) -> str:
    """The changes as a unified diff, for reading; files that are no text are named only."""
    old: dict[str, str] = {}
    new: dict[str, str | None] = {}
    notes: list[str] = []
    for path, content in changes.files.items():
        was = before.get(path)
        try:
            texts = tuple(None if side is None else side.decode() for side in (was, content))
        except UnicodeDecodeError:
            notes.append(f"(binary file {path})\n")
            continue
        if texts[0] is not None:
            old[path] = texts[0]
        new[path] = texts[1]
    text = make_patch(old, new) + "".join(notes)
    over = len(text) - _MOST_PATCH_CHARS
    return f"{text[:_MOST_PATCH_CHARS]}\n(... {over} more characters)\n" if over > 0 else text
