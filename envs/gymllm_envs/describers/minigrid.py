"""MiniGrid and BabyAI: the mission, what the agent sees and where it is seen from.

Only what the observation holds is told: the mission, the direction and the square ahead of the agent, so a
hidden room stays hidden. Under a wrapper that changes the observation the adapter shows the whole grid.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gymllm.adapters import AnyEnv, register_describer

DIRECTIONS = ("east", "south", "west", "north")
"""In the order of MiniGrid's numbers."""
DOOR_STATES = ("open", "closed", "locked")
LETTERS: Mapping[str, str] = {
    "unseen": "?",
    "empty": ".",
    "floor": ".",
    "wall": "#",
    "door": "D",
    "key": "K",
    "ball": "O",
    "box": "B",
    "goal": "G",
    "lava": "L",
}
BACKGROUND = ("unseen", "empty", "floor", "wall")
RULES = (
    "You are in a grid world and carry out a mission, in as few steps as you can. You see some of "
    "the cells ahead of you and beside you.\n"
    "left and right turn you on the spot. forward moves one cell ahead, not into a wall, a closed door or "
    "an object. pickup takes the key, ball or box in the cell ahead; you can carry one. drop puts it into "
    "the empty cell ahead. toggle opens or closes the door ahead, a locked one only while you carry the "
    "key of its colour, and opens a box. {done}\n"
    "In the picture you are ^ and look up. # is a wall, . free ground, ? out of sight, K a key, D a door, "
    "O a ball, B a box, G the goal, and L lava, which ends the episode when you step into it."
)
DONE = "done is for missions that ask for it."
BABYAI = (
    "To go to something is to stand next to it and face it; to put something next to another, drop it in "
    "a cell beside it. done does nothing."
)


@dataclass(frozen=True)
class Cell:
    """One cell of the agent's view."""

    kind: str
    colour: str
    state: int

    @property
    def name(self) -> str:
        """What it is, with its colour and a door's state."""
        if self.kind in ("empty", "unseen", "wall", "floor", "lava", "goal"):
            return {"empty": "free ground", "floor": "free ground", "goal": "the goal"}.get(
                self.kind, self.kind
            )
        state = f"{DOOR_STATES[self.state]} " if self.kind == "door" else ""
        article = "an" if (state or self.colour)[0] in "aeiou" else "a"
        return f"{article} {state}{self.colour} {self.kind}"


def register() -> None:
    """Registers every MiniGrid environment; those of BabyAI have rules of their own."""
    register_describer(
        env_class="minigrid.minigrid_env:MiniGridEnv",
        describe=describe,
        instructions=RULES.format(done=DONE),
    )
    register_describer(
        env_class="minigrid.envs.babyai.core.roomgrid_level:RoomGridLevel",
        describe=describe,
        instructions=RULES.format(done=BABYAI),
    )


def describe(env: AnyEnv, observation: Any) -> str:
    """The mission, the direction, what is carried, seen and ahead, and a picture of the view."""
    grid: Any = env
    view = _view(observation["image"])
    bottom, middle = len(view) - 1, len(view[0]) // 2
    carried: Any = grid.carrying
    held = "nothing" if carried is None else Cell(carried.type, carried.color, 0).name
    seen = [
        (bottom - row, column - middle, cell)
        for row, cells in enumerate(view)
        for column, cell in enumerate(cells)
        if cell.kind not in BACKGROUND and (row, column) != (bottom, middle)
    ]
    seen.sort(key=lambda found: (found[0] + abs(found[1]), found[:2]))
    listed = [f"- {cell.name}: {_where(ahead, right)}" for ahead, right, cell in seen]
    return "\n".join(
        [
            f"Mission: {observation['mission']}",
            f"You face {DIRECTIONS[int(observation['direction'])]} and carry {held}.",
            f"The cell ahead of you: {view[bottom - 1][middle].name}.",
            *(["You see:", *listed] if listed else ["You see no objects."]),
            _picture(view),
        ]
    )


def _view(image: Any) -> list[list[Cell]]:
    """The cells, from the farthest row to the agent's own, each from left to right."""
    constants: Any = importlib.import_module("minigrid.core.constants")  # the environment's own
    return [
        [
            Cell(constants.IDX_TO_OBJECT[kind], constants.IDX_TO_COLOR[colour], state)
            for kind, colour, state in row
        ]
        for row in image.transpose(1, 0, 2).tolist()
    ]


def _where(ahead: int, right: int) -> str:
    side = f"{abs(right)} {'right' if right > 0 else 'left'}"
    front = f"{ahead} ahead"
    return f"{front}, {side}" if ahead and right else front if ahead else f"{side}, beside you"


def _picture(view: list[list[Cell]]) -> str:
    """The view as letters, without the outer rows and columns of which nothing is seen."""
    rows = [[LETTERS.get(cell.kind, "?") for cell in cells] for cells in view]
    rows[-1][len(view[0]) // 2] = "^"
    columns = [c for c in range(len(rows[0])) if any(row[c] != "?" for row in rows)]
    first = next(r for r, row in enumerate(rows) if any(letter != "?" for letter in row))
    return "\n".join(" ".join(row[columns[0] : columns[-1] + 1]) for row in rows[first:])
