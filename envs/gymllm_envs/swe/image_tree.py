"""The tree in a task's container: its history cut, hidden tests away, and what was changed in it.

All is done by a POSIX sh and the usual tools of the image. In the agent's container none of them can be
trusted after it has worked there. They needn't be: what they say is taken for what the agent has written,
files and nothing else, and all of that it could have written anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gymllm.errors import EnvError, SandboxDiedError, SandboxError
from gymllm.sandbox import ExecResult, Sandbox
from gymllm_envs.swe.changes import (
    MAX_CHANGED_BYTES,
    MAX_CHANGED_FILES,
    Changes,
    why_left_out,
)
from gymllm_envs.swe.patching import read_patch
from gymllm_envs.swe.readers import commands
from gymllm_envs.swe.recipe import Recipe
from gymllm_envs.swe.task import SweTask

_TIMEOUT_S = 300.0
_MOST_LISTED_BYTES = 64 << 20

# In it is the tree and nothing else: no later commit, no reflog, no remote, no object that isn't in use.
# Files keep being tracked or not; the nearest tag stays, for builds that take their version from it.
_CUT_HISTORY = """[ -e .git ] || exit 0
command -v git >/dev/null || { rm -rf .git; exit 0; }
git() { command git -c safe.directory='*' -c core.hooksPath=/dev/null -c gc.auto=0 "$@"; }
files=$(mktemp) || exit 1
tag=$(git describe --tags --abbrev=0 2>/dev/null)
git ls-files -z >"$files" 2>/dev/null
find . -name .git -prune -exec rm -rf {} +
set -e
git init -q .
git config user.name user
git config user.email user@localhost
[ -s "$files" ] && git update-index --add --remove -z --stdin <"$files" 2>/dev/null || git add -A .
git commit -q --no-verify --allow-empty -m "The tree as it is"
[ -z "$tag" ] || git tag "$tag" 2>/dev/null || true
rm -rf .git/hooks .git/logs .git/description "$files"
"""
# Wheels and sources of other versions of the package may lie there.
_DROP_CACHES = 'rm -rf "$HOME/.cache/pip" "$HOME/.cache/uv" /root/.cache/pip /root/.cache/uv\n'

# A folder that can't be removed, for want of rights above it, is emptied.
_HIDE = """for path; do
  rm -rf -- "$path" 2>/dev/null || [ -d "$path" ] && find "$path" -mindepth 1 -delete
  if [ -f "$path" ] && ! : >"$path"; then exit 1; fi
  if [ -d "$path" ] && [ -n "$(ls -A "$path")" ]; then exit 1; fi
done
"""

_PATCH = """file=$(mktemp) || exit 1
cat >"$file"
for how in 'git apply -v' 'git apply -v --recount --ignore-space-change' 'patch -tN --fuzz=5 -p1 -i'; do
  if $how "$file"; then rm -f "$file"; exit 0; fi
done
exit 1
"""

_PRUNED = (".git", ".hg", ".svn", "__pycache__", ".pytest_cache", ".tox", ".venv")
_PRUNE = "\\( " + " -o ".join(f"-name {name}" for name in _PRUNED) + " \\) -prune"
# Names of three kinds, each ending in NUL; of files first the sum.
_LIST = f"""find . {_PRUNE} -o -type d ! -perm -500 -exec chmod u+rwx {{}} \\; 2>/dev/null
find . {_PRUNE} -o -type f ! -perm -400 -exec chmod u+r {{}} + 2>/dev/null
find . {_PRUNE} -o -type f -size -{MAX_CHANGED_BYTES + 1}c -exec sha256sum {{}} + || exit 1
printf '\\n'
find . {_PRUNE} -o -type f -size +{MAX_CHANGED_BYTES}c -print0 | tr '\\n\\0' '\\001\\n' || exit 1
printf '\\n'
find . {_PRUNE} -o ! -type f ! -type d -print0 | tr '\\n\\0' '\\001\\n'
printf 'end\\n'
"""
# A copy: somebody may write to the file meanwhile.
_READ = """copy=$(mktemp) || exit 1
while IFS= read -r path; do
  path=./$path
  if [ -f "$path" ] && [ ! -L "$path" ] && cat <"$path" >"$copy" 2>/dev/null; then
    size=$(wc -c <"$copy") && echo "$((size))" && cat <"$copy"
  else
    echo -1
  fi
done
rm -f "$copy"
"""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What was in a tree."""

    sums: Mapping[str, str] = field(default_factory=dict[str, str])
    """SHA-256 by path."""
    large: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    """Links, pipes and so on."""


class UnreadableError(Exception):
    """The tools of the container don't say what they ought to; why, for a verdict."""


async def run_script(
    sandbox: Sandbox, script: str, *arguments: str, input: bytes = b"", most: int = 1 << 16
) -> ExecResult:
    """Runs lines of sh in the tree."""
    argv = ["sh", "-c", script, "sh", *arguments]
    return await sandbox.exec(argv, input=input, timeout_s=_TIMEOUT_S, max_output_bytes=most)


async def _must(
    sandbox: Sandbox, task: SweTask, what: str, script: str, *arguments: str, input: bytes = b""
) -> None:
    done = await run_script(sandbox, script, *arguments, input=input)
    if done.exit_code != 0:
        said = (bytes(done.stderr) + bytes(done.stdout)).decode(errors="replace").strip()[-1500:]
        how = f"no end within {_TIMEOUT_S:g} s" if done.timed_out else f"exit code {done.exit_code}"
        raise EnvError(f"task {task.id}, image {task.image}: {what} ({how}): {said}")


async def give(sandbox: Sandbox, task: SweTask, recipe: Recipe) -> Listing:
    """Makes the tree what the agent is to have, in a fresh container.

    Returns:
        What is in it then.

    Raises:
        EnvError: The task doesn't fit its image.
        SandboxError: The container is gone.
    """
    await put_bug(sandbox, task)
    if recipe.hidden:
        await _must(sandbox, task, "its tests can't be hidden", _HIDE, *recipe.hidden)
    await cut_history(sandbox, task)
    try:
        return await list_tree(sandbox)
    except UnreadableError as problem:
        raise EnvError(f"task {task.id}, image {task.image}: {problem}") from problem


async def put_bug(sandbox: Sandbox, task: SweTask) -> None:
    """Makes the fault, where the image comes without. Raises as `give` does."""
    if task.bug_patch:
        await patch(sandbox, task, "bug_patch", task.bug_patch)


async def patch(sandbox: Sandbox, task: SweTask, name: str, text: str) -> None:
    """Applies a patch, as the data sets' harnesses do. Raises as `give` does."""
    data = text.encode() if text.endswith("\n") else f"{text}\n".encode()
    await _must(sandbox, task, f"its {name} doesn't fit", _PATCH, input=data)


async def cut_history(sandbox: Sandbox, task: SweTask) -> None:
    """Leaves one commit. Raises as `give` does."""
    await _must(sandbox, task, "its history can't be cut", _DROP_CACHES + _CUT_HISTORY)


async def list_tree(sandbox: Sandbox) -> Listing:
    """What is in the tree; version control, caches and virtual environments left out.

    Raises:
        UnreadableError: The container's tools don't say.
        SandboxError: It is gone.
    """
    done = await run_script(sandbox, _LIST, most=_MOST_LISTED_BYTES)
    said = bytes(done.stdout)
    if (
        done.timed_out
        or done.exit_code != 0
        or done.stdout.cut_bytes
        or not said.endswith(b"end\n")
    ):
        why = bytes(done.stderr).decode(errors="replace").strip()[-300:]
        raise UnreadableError(f"the tree can't be listed: {why or 'it holds too much'}")
    sums, large, others = _parts(said.removesuffix(b"end\n"))
    found: dict[str, str] = {}
    for line in sums:
        checksum, _, path = line.partition(b" ")
        # A backslash before the sum: the name holds one, or a newline. No source does.
        if len(checksum) == 64 and path[1:3] == b"./":
            found[_name(path[3:])] = checksum.decode(errors="replace")
    return Listing(
        sums=found,
        large=frozenset(_name(path[2:]) for path in large),
        others=frozenset(_name(path[2:]) for path in others),
    )


def _parts(said: bytes) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """The three lists; an empty line is after the first two, and no line of theirs is empty."""
    lists: list[list[bytes]] = [[], [], []]
    at = 0
    for line in said.split(b"\n"):
        if line:
            lists[at].append(line)
        elif at < 2:
            at += 1
    return lists[0], lists[1], lists[2]


def _name(path: bytes) -> str:
    return path.decode(errors="surrogateescape")


@dataclass(frozen=True, kw_only=True)
class Counting:
    """Which changed files count."""

    hidden: frozenset[str]
    """Files of the hidden tests: never."""
    gold: frozenset[str]
    """Files that the gold patch changes. Repositories of others have sources in folders called test (Django),
    are what tests run with (pytest, coverage), or are mended in setup.py."""

    def why_left_out(self, path: str) -> str:
        """Why a changed path can't count; empty if it can."""
        why = why_left_out(path, self.hidden)
        if not why or path in self.hidden or path.endswith("conftest.py"):
            return why
        if path in self.gold:
            return ""
        # Then what is beside them may be mended as well, but for tests.
        folder, _, name = path.rpartition("/")
        beside = any(folder and folder == other.rpartition("/")[0] for other in self.gold)
        return "" if beside and not why_left_out(f"sources/{name}") else why


def counting(task: SweTask, recipe: Recipe) -> Counting:
    """What counts in a task.

    Raises:
        PatchError: A patch of the task can't be read.
    """
    hidden = {test.partition("::")[0] for test in (*task.fail_to_pass, *task.pass_to_pass)}
    hidden |= {*recipe.hidden}
    if task.test_patch:
        hidden |= {*commands.test_files_of(task.test_patch, f"task {task.id}")}
    gold = {path for one in read_patch(task.patch) for path in (one.old, one.new) if path}
    return Counting(hidden=frozenset(hidden), gold=frozenset(gold))


async def read_changes(sandbox: Sandbox, before: Listing, counts: Counting) -> Changes:
    """What was changed in the tree, and which of it counts.

    Args:
        sandbox: The agent's; still open.
        before: What was in the tree when the agent got it.
        counts: Which files do.

    Raises:
        SandboxDiedError: The container is gone.
    """
    try:
        return await _changes(sandbox, before, counts)
    except UnreadableError as problem:
        return Changes(refused=str(problem))
    except SandboxDiedError:
        raise
    except (
        SandboxError
    ) as problem:  # no process can be started: it has taken them all, or its sh away
        return Changes(refused=f"nothing can be run in its sandbox any more: {problem}")


async def _changes(sandbox: Sandbox, before: Listing, counts: Counting) -> Changes:
    after = await list_tree(sandbox)
    there = {*after.sums, *after.large, *after.others}
    changed = [path for path, checksum in after.sums.items() if before.sums.get(path) != checksum]
    gone = [path for path in (*before.sums, *before.large) if path not in there]
    left_out = dict.fromkeys(sorted(after.large - before.large), "too large")
    left_out |= dict.fromkeys(sorted(after.others - before.others), "no regular file")
    files: dict[str, bytes | None] = {}
    wanted: list[str] = []
    for path in (*sorted(changed), *sorted(gone)):
        why = counts.why_left_out(path) or _unusable(path)
        if why:
            left_out[path] = why
        elif path in after.sums:
            wanted.append(path)
        else:
            files[path] = None
    left_out = dict(list(left_out.items())[:MAX_CHANGED_FILES])
    much = f"more than {MAX_CHANGED_FILES} files or {MAX_CHANGED_BYTES >> 20} MB were changed"
    if len(wanted) + len(files) > MAX_CHANGED_FILES:
        return Changes(left_out=left_out, refused=much)
    contents = await read_files(sandbox, wanted)
    if contents is None:
        return Changes(left_out=left_out, refused=much)
    for path, content in zip(wanted, contents, strict=True):
        if content is None:
            raise UnreadableError(f"{path} went away while it was read")
        files[path] = content
    return Changes(files=files, left_out=left_out)


def _unusable(path: str) -> str:
    parts = path.split("/")
    if not path or {"", ".", ".."} & {*parts} or any(part in _PRUNED for part in parts):
        return "no path of a source"
    return "" if path.isprintable() else "its name is no text"


async def read_files(sandbox: Sandbox, paths: Sequence[str]) -> list[bytes | None] | None:
    """Contents of regular files of the tree, None for what is none; None if that is too much.

    Raises:
        UnreadableError: The container's tools don't say.
        SandboxError: It is gone.
    """
    if not paths:
        return []
    names = "".join(f"{path}\n" for path in paths).encode(errors="surrogateescape")
    most = 2 * MAX_CHANGED_BYTES  # half is kept from each end
    done = await run_script(sandbox, _READ, input=names, most=most)
    said = bytes(done.stdout)
    if done.stdout.cut_bytes or len(said) > MAX_CHANGED_BYTES + 32 * len(paths):
        return None
    found: list[bytes | None] = []
    at = 0
    for _ in paths:
        size, _, _ = said[at : at + 32].partition(b"\n")
        if not size.removeprefix(b"-").isdigit() or done.timed_out:
            raise UnreadableError("changed files can't be read")
        at += len(size) + 1
        found.append(None if int(size) < 0 else said[at : at + int(size)])
        at += max(0, int(size))
    return found
