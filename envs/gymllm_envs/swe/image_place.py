"""A task in a container image: a sandbox of kind "docker" or "kubernetes" with its tree.

The agent's container has the fault, one commit, and no hidden test. Once it has submitted, its files are read
(`image_tree`), its container is gone, and they are graded in another one (`image_grading`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

import anyio

from gymllm.sandbox import Sandbox, open_sandbox
from gymllm_envs.swe import image_tree
from gymllm_envs.swe.grading import Verdict
from gymllm_envs.swe.image_grading import Kind, grade_in_image, spec_of
from gymllm_envs.swe.log_parsing import check_parser
from gymllm_envs.swe.place import grading_limit
from gymllm_envs.swe.recipe import Recipe
from gymllm_envs.swe.task import SweTask


@final
class ImagePlace:
    """A `Place` in a container."""

    def __init__(
        self, task: SweTask, kind: Kind, sandbox: Sandbox, given: image_tree.Listing
    ) -> None:
        """Takes an open sandbox, which it closes.

        Args:
            task: What is worked on.
            kind: Of sandbox, for the grading.
            sandbox: The agent's.
            given: What was in its tree when the agent got it.
        """
        self._task, self._kind, self.sandbox, self._given = task, kind, sandbox, given
        self._counts = image_tree.counting(task, Recipe.of(task))

    async def submit(self) -> Verdict:
        """See `Place`."""
        try:
            # What still runs there may write meanwhile: what is read is what the agent hands in.
            changes = await image_tree.read_changes(self.sandbox, self._given, self._counts)
        finally:
            await self.aclose()
        async with grading_limit():
            return await grade_in_image(self._task, changes, self._kind)

    async def aclose(self) -> None:
        """Kills everything in the sandbox."""
        await self.sandbox.aclose()


async def open_image_place(task: SweTask, kind: Kind, *, memory_mb: int) -> ImagePlace:
    """Starts a task's sandbox.

    Args:
        task: From an image.
        kind: "docker", "kubernetes", or a host of those.
        memory_mb: Of the sandbox.

    Raises:
        ConfigError: Nothing says how the task is graded.
        UnknownNameError: There is no parser for its log, or swebench, which has it, isn't installed.
        SandboxError: The sandbox can't be started: the image can't be fetched, no daemon answers.
        EnvError: The task doesn't fit its image.
    """
    recipe = Recipe.of(task)
    check_parser(recipe.log_parser)  # now, not after an hour's work
    spec = spec_of(task, recipe, memory_mb)
    agents = {name: value for name, value in spec.env.items() if name != "PYTEST_ADDOPTS"}
    sandbox = await open_sandbox(replace(spec, env=agents), kind)
    try:
        given = await image_tree.give(sandbox, task, recipe)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await sandbox.aclose()
        raise
    return ImagePlace(task, kind, sandbox, given)


async def grade_gold(task: SweTask, kind: Kind, *, memory_mb: int = 2048) -> Verdict:
    """Hands the task's own patch in, as an agent would: if that isn't worth 1, no 0 says much.

    Args:
        task: From an image.
        kind: As for `open_image_place`.
        memory_mb: Of the sandbox.

    Raises:
        EnvError: The patch doesn't fit, or nothing else does. And as `open_image_place` and `submit` do.
    """
    place = await open_image_place(task, kind, memory_mb=memory_mb)
    try:
        await image_tree.patch(place.sandbox, task, "patch", task.patch)
        return await place.submit()
    finally:
        await place.aclose()
