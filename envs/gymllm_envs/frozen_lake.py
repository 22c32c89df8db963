"""`gymllm/FrozenLake-v0`: Gymnasium's FrozenLake in text, on a new random map each episode.

The first observation shows the map, one letter a cell and one row a line: `S` the start, `F` ice, `H` a
hole, `G` the goal. Each observation says where the player is and where there is ice, or the goal, around.
`scripted_action` plays from that text with a chosen skill, as a baseline and to warm-start a model.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from gymllm.adapters import TextAdapter
from gymllm.errors import ConfigError
from gymllm.pool import make_pool

ENV_ID = "gymllm/FrozenLake-v0"
ACTIONS = ("left", "down", "right", "up")
"""In the order of Gymnasium's action numbers."""
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""Row and column that each action adds."""
INSTRUCTIONS = (
    "Walk from S to G over ice F. Never enter a hole H.\n"
    "Answer with one word: left, down, right or up."
)
FELL = "You fell into a hole."
REACHED = "You reached the goal."
LARGEST_SIZE = 32

Grid = list[list[str]]
Start = tuple[int, dict[str, Any]]
"""What `reset` of a Gymnasium environment with a number as observation returns."""
Transition = tuple[int, float, bool, bool, dict[str, Any]]
"""What its `step` returns."""


class FrozenLake(TextAdapter):
    """Gymnasium's FrozenLake-v1 through the text adapter.

    The map is a function of the reset's seed alone; a reset without a seed draws the next map from the
    generator. Reward 1 at the goal, -0.1 for an answer that can't be read, else 0.
    """

    def __init__(
        self,
        *,
        size: int = 4,
        is_slippery: bool = False,
        frozen_probability: float = 0.8,
        max_turns: int | None = None,
        invalid_reward: float = -0.1,
        render_mode: str | None = None,
    ) -> None:
        """Makes the lake.

        Args:
            size: Rows and columns, 2 to 32.
            is_slippery: Whether a move may go sideways, each side with probability 1/3.
            frozen_probability: Share of cells that are ice before maps without a path are thrown away,
                0.5 to 1; at least 0.6 where `size` > 8, because paths through less are too rare.
            max_turns: Turns after which the episode is truncated; None is three times `size`, enough to
                come back from a dead end, and ten times that on slippery ice.
            invalid_reward: Reward of a turn whose action could not be read; below 0, because a policy that
                pays nothing for it learns to waste turns.
            render_mode: None or "ansi".

        Raises:
            ConfigError: A setting is out of its range.
        """
        lake = RandomLake(size=size, is_slippery=is_slippery, frozen_probability=frozen_probability)
        super().__init__(
            lake,
            describe=lake.describe,
            action_names=ACTIONS,
            instructions=INSTRUCTIONS,
            answer_rule="last",
            invalid_reward=invalid_reward,
            max_invalid=None,
            max_turns=3 * size * (10 if is_slippery else 1) if max_turns is None else max_turns,
            render_mode=render_mode,
        )


class RandomLake(gymnasium.Env[Any, Any]):
    """Gymnasium's `FrozenLakeEnv`, made anew on a random map at each reset."""

    def __init__(self, *, size: int, is_slippery: bool, frozen_probability: float) -> None:
        if not 2 <= size <= LARGEST_SIZE:
            raise ConfigError(f"size must be from 2 to {LARGEST_SIZE}, got {size}.")
        least = 0.5 if size <= 8 else 0.6
        if not least <= frozen_probability <= 1:
            raise ConfigError(
                f"frozen_probability must be from {least} to 1 for size {size}, "
                f"got {frozen_probability}."
            )
        self.observation_space = spaces.Discrete(size * size)
        self.action_space = spaces.Discrete(len(ACTIONS))
        self._size = size
        self._is_slippery = is_slippery
        self._frozen_probability = frozen_probability
        self._map: list[str] = []
        self._lake: gymnasium.Env[Any, Any] | None = None
        self._at_start = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        super().reset(seed=seed)
        map_seed, lake_seed = self.np_random.integers(2**31, size=2).tolist()
        self._map = generate_random_map(self._size, self._frozen_probability, map_seed)
        self._lake = cast(
            "gymnasium.Env[Any, Any]", FrozenLakeEnv(desc=self._map, is_slippery=self._is_slippery)
        )
        self._at_start = True
        return cast("Start", self._lake.reset(seed=lake_seed))

    def step(self, action: int) -> Transition:
        assert self._lake is not None, "Env.step refuses to step before reset"
        self._at_start = False
        return cast("Transition", self._lake.step(action))

    def describe(self, observation: int) -> str:
        """Where the player is and what is around, below the map at first; at the end, how it ended."""
        row, column = divmod(observation, self._size)
        ending = {"H": FELL, "G": REACHED}.get(self._map[row][column])
        if ending:
            return ending
        beside = {a: self._cell(row + down, column + right) for a, (down, right) in MOVES.items()}
        ice = [action for action, cell in beside.items() if cell == "F"]
        goal = [f"goal {action}" for action, cell in beside.items() if cell == "G"]
        around = ", ".join(["ice " + ", ".join(ice) if ice else "no ice", *goal])
        here = f"row {row} column {column}: {around}"
        if not self._at_start:
            return here
        return "\n".join(" ".join(line) for line in self._map) + "\n" + here

    def _cell(self, row: int, column: int) -> str:
        inside = 0 <= row < self._size and 0 <= column < self._size
        return self._map[row][column].replace("S", "F") if inside else "wall"


make_vector = functools.partial(make_pool, ENV_ID)
"""What `gymnasium.make_vec` calls: lakes in a pool."""

_MAP = re.compile(r"(?:^[SFHG](?: [SFHG])+$\n?)+", re.MULTILINE)
_PLACE = re.compile(r"row (\d+) column (\d+)")


def find_state(text: str) -> tuple[Grid, int, int] | None:
    """The last whole map in a text, and the last row and column; None if either is missing."""
    places = _PLACE.findall(text)
    for match in reversed(list(_MAP.finditer(text))):
        rows = [line.split(" ") for line in match.group().splitlines()]
        # Two maps that touch (no text between them) are told apart by their width.
        rows = rows[-len(rows[-1]) :]
        if len({len(row) for row in rows}) == 1 and sum(row.count("G") for row in rows) == 1:
            row, column = (int(number) for number in places[-1]) if places else (-1, -1)
            inside = 0 <= row < len(rows) and 0 <= column < len(rows[0])
            return (rows, row, column) if inside else None
    return None


def optimal_actions(grid: Grid, row: int, column: int) -> tuple[str, ...]:
    """Every action that starts a shortest path to G without slipping; none if there is no path."""
    goal = next((r, cells.index("G")) for r, cells in enumerate(grid) if "G" in cells)
    distance, queue = {goal: 0}, deque([goal])
    while queue:
        at = queue.popleft()
        for down, right in MOVES.values():
            cell = (at[0] + down, at[1] + right)
            if (
                cell not in distance
                and 0 <= cell[0] < len(grid)
                and 0 <= cell[1] < len(grid[0])
                and grid[cell[0]][cell[1]] != "H"
            ):
                distance[cell] = distance[at] + 1
                queue.append(cell)
    here = distance.get((row, column))
    if here is None:
        return ()
    return tuple(
        action
        for action, (down, right) in MOVES.items()
        if distance.get((row + down, column + right)) == here - 1
    )


def scripted_action(prompt_text: str, *, rng: np.random.Generator, skill: float) -> str:
    """Plays from the last map and the last place in a text.

    Args:
        prompt_text: A whole conversation, or an episode's first observation.
        rng: All the randomness there is; always drawn from in the same way.
        skill: Probability, 0 to 1, of an optimal move; else it wanders: any move onto ice. Of several
            moves each is equally likely.

    Returns:
        One of the four words.
    """
    if not 0 <= skill <= 1:
        raise ConfigError(f"skill must be from 0 to 1, got {skill}.")
    state = find_state(prompt_text)
    if state is None:
        return ACTIONS[int(rng.integers(len(ACTIONS)))]
    aims = rng.random() < skill
    choices = (optimal_actions(*state) if aims else ()) or safe_actions(*state) or ACTIONS
    return choices[int(rng.integers(len(choices)))]


def safe_actions(grid: Grid, row: int, column: int) -> tuple[str, ...]:
    """Every action that leads onto ice or the goal: into no hole and no wall."""
    return tuple(
        action
        for action, (down, right) in MOVES.items()
        if 0 <= row + down < len(grid)
        and 0 <= column + right < len(grid[0])
        and grid[row + down][column + right] != "H"
    )
