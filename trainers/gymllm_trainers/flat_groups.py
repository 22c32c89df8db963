"""Groups whose rewards are all equal: said once, and the end of a run that meets nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from gymllm.errors import RunError
from gymllm.trajectory import Group
from gymllm_trainers.run_folder import warn

SAID_AFTER = 25
"""Flat groups in a row after which a run says so."""


class FlatGroups:
    """Counts the groups in a row that were replaced because their rewards were all equal.

    Without it a task that the policy always fails, or always solves, would be a run without an end.
    """

    def __init__(self, *, most: int, say: Callable[[str], None] = warn) -> None:
        """Starts at none.

        Args:
            most: How many in a row end the run.
            say: Told once, after `SAID_AFTER` in a row.
        """
        self._most, self._say = most, say
        self._rewards: Counter[float] = Counter()
        self._unworthy = 0
        self._said = False

    def add(self, group: Group) -> None:
        """Counts a group whose rewards are all equal, or of which nothing is worth imitating.

        Raises:
            RunError: It is one too many in a row.
        """
        self._rewards[group.rewards[0]] += 1
        self._unworthy += len(set(group.rewards)) > 1
        count = self._rewards.total()
        if count >= self._most:
            raise RunError(f"{self._seen()}: {self._lesson()}. {self._advice()}")
        if count >= SAID_AFTER and not self._said:
            self._said = True
            self._say(
                f"{self._seen()}: {self._lesson()}; the run stops after {self._most} of them in a row."
            )

    def end(self) -> None:
        """Says that a group came whose rewards differ."""
        self._rewards.clear()
        self._unworthy = 0

    def _seen(self) -> str:
        count = self._rewards.total()
        if self._unworthy:
            return f"no episode of the last {count} groups had a reward above algorithm.keep_above"
        if len(self._rewards) == 1:
            (reward,) = self._rewards
            return f"the last {count} groups all had reward {reward:.2f} in every episode"
        shown = ", ".join(f"{reward:.2f} in {n}" for reward, n in self._rewards.most_common(3))
        return f"each of the last {count} groups had the same reward in all its episodes ({shown})"

    def _lesson(self) -> str:
        return "nothing left to learn from" if self._solved() else "nothing to learn from"

    def _solved(self) -> bool:
        return not self._unworthy and min(self._rewards) >= 1

    def _advice(self) -> str:
        most = "learner.max_flat_groups says how many in a row are too many"
        if self._unworthy:
            return (
                "Try easier tasks (env.id, env.kwargs), a larger rollout.group_size, or a lower "
                f"algorithm.keep_above; {most}."
            )
        if self._solved():
            return (
                "The policy seems to solve every task: play harder ones (env.id, env.kwargs), or leave "
                f"it at that. What was learnt is saved; {most}."
            )
        return (
            "Try easier tasks (env.id, env.kwargs), a higher agent.temperature, a larger "
            f"rollout.group_size, or algorithm.zero_variance keep; {most}."
        )
