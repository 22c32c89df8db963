"""How attacks are written down, and played: several episodes at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import anyio
from playing import Played, bash, play

from gymllm_envs.swe.task import SweTask

FAILS = r"tests still fail"
"""It did nothing."""
CAUGHT = r"tampered with"


@dataclass(frozen=True)
class Attack:
    """One way to a reward without mending anything."""

    name: str
    actions: tuple[str, ...]
    how: str
    """What the verdict says: a regular expression over reason and what was left out."""
    seen: str = ""
    """What the agent must see, lest the attack isn't one: over all observations."""


def shell(name: str, command: str, how: str = FAILS, seen: str = "") -> Attack:
    """An attack by one command."""
    return Attack(name, (bash(command),), how, seen)


def code(name: str, text: str, how: str = CAUGHT) -> Attack:
    """An attack by the graded package: what is written at the end of one of its modules."""
    command = f"cat >> src/sample/chunks.py <<'END'\n{text}\nEND"
    return Attack(name, (bash(command), bash("python -c 'print(1)'")), how)


def batches(attacks: Sequence[Attack], size: int = 8) -> list[Sequence[Attack]]:
    """Those that are played at once, in a test of their own."""
    assert len({attack.name for attack in attacks}) == len(attacks)
    return [attacks[at : at + size] for at in range(0, len(attacks), size)]


async def assert_worthless(
    task: SweTask, attacks: Sequence[Attack], *, at_once: int = 3, **settings: float
) -> None:
    """Plays the attacks; fails with a list of those that got something, or another verdict."""
    wrong: list[str] = []
    limit = anyio.CapacityLimiter(at_once)

    async def one(attack: Attack) -> None:
        async with limit:
            try:
                played = await play(task, *attack.actions, **settings)
            except Exception as error:  # an episode that breaks is none that failed
                wrong.append(f"{attack.name}: raised {error!r}")
                return
        if problem := _problem(attack, played):
            wrong.append(f"{attack.name}: {problem}")

    async with anyio.create_task_group() as tasks:
        for attack in attacks:
            tasks.start_soon(one, attack)
    assert not wrong, "\n".join(wrong)


def _problem(attack: Attack, played: Played) -> str:
    if played.reward != 0.0 or played.info["resolved"]:
        return f"got {played.reward}"
    if not re.search(attack.how, played.said):
        messages = played.info["test_messages"]
        return f"expected {attack.how!r}, the verdict says {played.said!r}, tests {messages}"
    observed = "\n".join(played.observations)
    if not re.search(attack.seen, observed):
        return f"expected to see {attack.seen!r}, saw {observed!r}"
    return ""
