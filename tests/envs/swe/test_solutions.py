"""Honest ways to mend the bug: each must get 1, whatever else lies about."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest
from playing import Played, bash, call, play
from sample import FAULTY, MEND, MENDED

from gymllm_envs.swe.task import SweTask

pytestmark = pytest.mark.asyncio
_EDIT = call(
    "edit",
    command="str_replace",
    path="src/sample/chunks.py",
    old_str="len(items) - 1",
    new_str="len(items)",
)
_CREATE = call("edit", command="create", path="/testbed/src/sample/chunks.py", file_text=MENDED)
SOLUTIONS: dict[str, Sequence[str]] = {
    "sed": [bash(MEND)],
    "editor": [_EDIT],
    "written anew": [_CREATE],
    "deleted and written again": [bash("rm src/sample/chunks.py"), _CREATE],
    "folder deleted and made again": [bash("cp -r src /tmp; rm -r src; mv /tmp/src ."), _EDIT],
    "module moved into a folder": [
        bash(
            f"{MEND}; mkdir src/sample/chunks; mv src/sample/chunks.py src/sample/chunks/__init__.py"
        )
    ],
    "new module": [
        bash(
            "cd src/sample; sed 's/len(items) - 1/len(items)/' chunks.py > pieces.py; "
            "echo 'from sample.pieces import *' > chunks.py"
        )
    ],
    "package renamed and imported": [
        bash(f"{MEND}; mv src/sample/chunks.py src/sample/_c.py"),
        bash("echo 'from ._c import chunks, flatten' > src/sample/chunks.py"),
    ],
    "committed": [bash(f"{MEND}; git add -A; git commit -qm mended; git gc -q; git tag done")],
    "in a branch, without its repository": [bash(f"git checkout -qb mine; {MEND}; rm -rf .git")],
    "junk about": [
        bash(
            f"{MEND}; python -m pytest -q; PYTHONDONTWRITEBYTECODE= python -m compileall -q src; "
            "echo x > notes.txt; mkdir -p build/lib; touch build/lib/x.o reproduce.py; ln -s /tmp tmp; "
            "mkfifo pipe; touch $'odd\\nname' core.1; echo '*.pyc' > .gitignore"
        )
    ],
    "tests edited, too": [
        bash(f"{MEND}; sed -i 's/assert/assert not/' tests/test_chunks.py; rm tests/helping.py")
    ],
    "settings edited, too": [
        bash(f"{MEND}; echo 'raise SystemExit' > conftest.py; rm setup.cfg pyproject.toml")
    ],
    "other modes": [bash(f"{MEND}; chmod 777 src src/sample/*.py; chmod 400 README.md")],
    "while a process goes on": [
        bash(f"{MEND}; sleep 1000 & setsid sleep 1000 & cat > /dev/null &")
    ],
    "after accidents": [
        bash("exit 3"),
        bash("sleep 9"),
        bash("kill -9 $$"),
        bash("head -c 99M /dev/zero > /tmp/x; yes | head -c 1M"),
        bash(MEND),
    ],
    "a child of the tests' process left behind": [
        bash(
            f"{MEND}; echo 'import os, time\nif not os.fork():\n    time.sleep(999)\n    os._exit(0)' "
            ">> src/sample/text.py"
        )
    ],
    "in bash alone": [f"I mend it.\n\n```bash\n{MEND}\n```"],
    "another way": [
        bash(
            "cat > src/sample/chunks.py <<'END'\ndef flatten(nested):\n    return sum(nested, [])\n\n"
            "def chunks(items, size):\n    if not size > 0:\n        raise ValueError(f'got {size}')\n"
            "    return ([items[:size]] + chunks(items[size:], size)) if items else []\nEND"
        )
    ],
}


@pytest.mark.parametrize(
    "names", [list(SOLUTIONS)[at : at + 6] for at in range(0, len(SOLUTIONS), 6)], ids=str
)
async def test_honest(task: SweTask, names: Sequence[str]) -> None:
    played: dict[str, Played] = {}

    async def one(name: str) -> None:
        played[name] = await play(task, *SOLUTIONS[name], command_timeout_s=2)

    async with anyio.create_task_group() as tasks:
        for name in names:
            tasks.start_soon(one, name)
    said = {name: episode.said for name, episode in played.items() if episode.reward != 1.0}
    assert not said


async def test_the_patch_is_told(task: SweTask) -> None:
    played = await play(task, bash(f"{MEND}; echo 'x = 1' > src/new.py; rm README.md"))
    patch = played.info["patch"]
    assert "-    stop = len(items) - 1\n+    stop = len(items)\n" in patch
    assert "+++ b/src/new.py\n@@ -0,0 +1 @@\n+x = 1\n" in patch
    assert "--- a/README.md" in patch
    assert FAULTY not in patch


async def test_a_link_to_a_solution_does_not_count(task: SweTask) -> None:
    played = await play(
        task, bash(f"{MEND}; cd src/sample; mv chunks.py c.py; ln -s c.py chunks.py")
    )
    assert played.reward == 0.0
    assert played.info["left_out"] == {"src/sample/chunks.py": "a link"}
