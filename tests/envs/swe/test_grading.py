"""Verdicts on the sample package."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from playing import bash, play
from sample import FAULTY, FILES, MEND

from gymllm.errors import SandboxError
from gymllm_envs.swe.canaries import add_canaries
from gymllm_envs.swe.changes import Changes
from gymllm_envs.swe.grading import gold_changes, grade, working_canaries
from gymllm_envs.swe.task import SweTask
from gymllm_envs.swe.trees import prepare

pytestmark = pytest.mark.asyncio


async def test_gold(task: SweTask) -> None:
    assert len(task.canaries) == 4
    verdict = await grade(task, gold_changes(task, await prepare(task)))
    assert verdict.resolved, verdict.reason


async def test_mended_by_hand(task: SweTask) -> None:
    played = await play(task, bash(MEND))
    assert played.reward == 1.0, played


async def test_canaries_of_some_parameters_rename_the_others_too(task: SweTask) -> None:
    some, other = task.fail_to_pass[1:3]
    parts = replace(
        task,
        fail_to_pass=(some,),
        pass_to_pass=(*task.pass_to_pass, other),
        canaries=(some,),
    )
    verdict = await grade(parts, gold_changes(task, await prepare(task)))
    assert verdict.resolved, verdict.reason


async def test_what_can_have_no_canaries_is_found(task: SweTask) -> None:
    names = (*task.fail_to_pass, "tests/test_chunks.py::test_flatten_nothing", "tests/test_gone.py")
    assert await working_canaries(replace(task, fail_to_pass=names[:-1])) == task.fail_to_pass
    with pytest.raises(SandboxError, match=r"which sample==1\.0 hasn't"):
        await working_canaries(replace(task, fail_to_pass=names))


async def test_tests_that_were_always_there_and_fail(task: SweTask) -> None:
    verdict = await grade(task, Changes())
    assert verdict.reason == "4 of 4 tests still fail, 0 of 7 others are broken"
    assert not verdict.resolved
    assert verdict.messages["tests/test_chunks.py::test_chunks"].startswith("assert [[1, 2]] == ")
    assert verdict.unproven is False


async def test_refused_changes_are_not_run(task: SweTask) -> None:
    verdict = await grade(task, Changes(refused="too much"))
    assert (verdict.reason, verdict.reward(partial=True)) == ("too much", 0.0)
    assert set(verdict.fail_to_pass.values()) == {"missing"}


async def test_a_wrong_result_that_a_canary_expects_is_no_forgery(task: SweTask) -> None:
    """Copies may pass where their test fails; both passing is another matter."""
    file = "tests/test_chunks.py"
    copied = [test for test in task.canaries if test.startswith(file)]
    for seed in range(50):  # until a copy expects another last number
        drawn = add_canaries(file, FILES[file], copied, random.Random(seed)).source
        others = set(re.findall(r"\[\[1, 2\], \[(\d+)\]\]", drawn)) - {"3"}
        if others:
            break
    text = FAULTY.replace(
        "    stop", f"    if len(items) == 3:\n        return [[1, 2], [{min(others)}]]\n    stop"
    )
    text = text.replace("len(items) - 1", "len(items)")
    changes = Changes(files={"src/sample/chunks.py": text.encode()})
    verdict = await grade(task, changes, rng=random.Random(seed))
    assert not verdict.resolved
    assert (verdict.tampered, verdict.unproven) == ("", False)
    assert verdict.reward(partial=True) > 0
