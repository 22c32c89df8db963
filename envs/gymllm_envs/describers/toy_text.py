"""FrozenLake, Taxi, CliffWalking and Blackjack, as Gymnasium has them."""

from __future__ import annotations

from typing import Any

from gymllm.adapters import AnyEnv, register_describer

MODULE = "gymnasium.envs.toy_text"
PLACES = "Rows are counted from 0 at the top, columns from 0 at the left."
LAKE_RULES = (
    "Walk over the frozen lake from the start S to the goal G. F is ice that holds, H a hole: entering "
    "it ends the game, and reaching G wins it."
)
SLIPPERY = "It is slippery: a move may go to the left or right of the direction you chose instead."
CLIFF_RULES = (
    "Walk to the goal G along as few cells as you can: each move costs 1. C is a cliff: stepping there "
    "costs 100 and puts you back on the start S."
)
TAXI_RULES = (
    "You drive a taxi. Fetch the passenger and put them down at their destination, in as few moves as "
    "you can. The places are R, G, Y and B. You can drive through ':' and not through '|'; T is the "
    "taxi. pickup works where the passenger waits, dropoff at a place with the passenger in the taxi. "
    "South is down, east is right."
)
BLACKJACK_RULES = (
    "Get closer to 21 than the dealer without going over it. Cards count their number, face cards 10, an "
    "ace 1, or 11 where that doesn't take you over 21. hit takes another card; stick ends your turn, and "
    "the dealer then draws up to 17 or more."
)
TAXI_PLACES = ("R", "G", "Y", "B")
IN_TAXI = 4


def register() -> None:
    """Registers the four."""
    register_describer(
        env_class=f"{MODULE}.frozen_lake:FrozenLakeEnv",
        describe=describe_lake,
        action_names=("left", "down", "right", "up"),
        instructions=lake_rules,
    )
    register_describer(
        env_class=f"{MODULE}.cliffwalking:CliffWalkingEnv",
        describe=describe_cliff,
        action_names=("up", "right", "down", "left"),
        instructions=cliff_rules,
    )
    register_describer(
        env_class=f"{MODULE}.taxi:TaxiEnv",
        describe=describe_taxi,
        action_names=("south", "north", "east", "west", "pickup", "dropoff"),
        instructions=taxi_rules,
    )
    register_describer(
        env_class=f"{MODULE}.blackjack:BlackjackEnv",
        describe=describe_blackjack,
        action_names=("stick", "hit"),
        instructions=BLACKJACK_RULES,
    )


def lake_rules(env: AnyEnv) -> str:
    """The rules, with the ice's if it is slippery."""
    lake: Any = env
    slips = any(len(outcomes) > 1 for moves in lake.P.values() for outcomes in moves.values())
    return "\n".join([LAKE_RULES, *([SLIPPERY] if slips else []), f"You are marked []. {PLACES}"])


def describe_lake(env: AnyEnv, observation: Any) -> str:
    """The map with the player marked, and where that is."""
    lake: Any = env
    cells = [[letter.decode() for letter in row] for row in lake.desc]
    row, column = divmod(int(observation), len(cells[0]))
    here = cells[row][column]
    if here == "H":
        return f"You fell into the hole at row {row}, column {column}."
    if here == "G":
        return f"You reached the goal at row {row}, column {column}."
    return f"{_map(cells, row, column)}\nYou are at row {row}, column {column}."


def cliff_rules(env: AnyEnv) -> str:
    """The rules, with the ground's if it is slippery."""
    cliff: Any = env
    slips = [SLIPPERY] if getattr(cliff, "is_slippery", False) else []
    return "\n".join([CLIFF_RULES, *slips, f"You are marked []. {PLACES}"])


def describe_cliff(env: AnyEnv, observation: Any) -> str:
    """The map with the player marked, and where that is."""
    cliff: Any = env
    rows, columns = cliff.shape
    row, column = divmod(int(observation), columns)
    if (row, column) == (rows - 1, columns - 1):
        return f"You reached the goal at row {row}, column {column}."
    is_cliff: Any = cliff._cliff  # it has no public name
    cells = [["C" if is_cliff[r, c] else "." for c in range(columns)] for r in range(rows)]
    cells[-1][0], cells[-1][-1] = "S", "G"
    return (
        f"{_map(cells, row, column)}\nYou are at row {row}, column {column}. "
        f"The goal is at row {rows - 1}, column {columns - 1}."
    )


def taxi_rules(env: AnyEnv) -> str:
    """The rules, with those of rain and of fickle passengers where there are such."""
    taxi: Any = env
    rainy = any(len(outcomes) > 1 for moves in taxi.P.values() for outcomes in moves.values())
    lines = [TAXI_RULES]
    if rainy:
        lines.append("It rains: a move may go to the left or right of the direction you chose.")
    if getattr(taxi, "fickle_passenger", False):
        lines.append("The passenger may change the destination once, after the first move.")
    return "\n".join([*lines, PLACES])


def describe_taxi(env: AnyEnv, observation: Any) -> str:
    """The map with the taxi, and who is where."""
    taxi: Any = env
    row, column, passenger, destination = taxi.decode(int(observation))
    lines = [[letter.decode() for letter in line] for line in taxi.desc]
    lines[1 + row][1 + 2 * column] = "T"
    end = _place(taxi, destination)
    if passenger == destination:
        return f"The passenger is at the destination, {end}."
    waits = "is in the taxi" if passenger == IN_TAXI else f"waits at {_place(taxi, passenger)}"
    return "\n".join(
        [
            *("".join(line) for line in lines),
            f"The taxi is at row {row}, column {column}.",
            f"The passenger {waits}. The destination is {end}.",
        ]
    )


def describe_blackjack(env: AnyEnv, observation: Any) -> str:
    """The hand, and what the dealer shows."""
    total, shown, usable = (int(part) for part in observation)
    if total > 21:
        return f"Your hand counts {total}: over 21, you lose."
    ace = ", with an ace counted as 11" if usable else ""
    return f"Your hand counts {total}{ace}. The dealer shows {'an ace' if shown == 1 else shown}."


def _place(taxi: Any, index: int) -> str:
    row, column = taxi.locs[index]
    return f"{TAXI_PLACES[index]} (row {row}, column {column})"


def _map(cells: list[list[str]], row: int, column: int) -> str:
    """Cells three wide, the one at row and column between brackets."""
    return "\n".join(
        "".join(
            f"[{cell}]" if (r, c) == (row, column) else f" {cell} " for c, cell in enumerate(line)
        ).rstrip()
        for r, line in enumerate(cells)
    )
