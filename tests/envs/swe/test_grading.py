"""Verdicts on the sample package."""

from __future__ import annotations

import pytest
from playing import bash, play
from sample import MEND

from gymllm_envs.swe.grading import gold_changes, grade
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
