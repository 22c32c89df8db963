"""Atari games: the screen as an image, and which game it is."""

from __future__ import annotations

from typing import Any

from gymllm.adapters import AnyEnv, register_describer


def register() -> None:
    """Registers every game of the Arcade Learning Environment."""
    register_describer(env_class="ale_py.env:AtariEnv", instructions=rules)


def rules(env: AnyEnv) -> str:
    """Which game it is, and what to aim at."""
    spec: Any = env.spec
    name = str(spec.id).partition("/")[2].partition("-")[0] if spec is not None else ""
    game = f"the Atari game {name}" if name else "an Atari game"
    return f"You play {game} and see its screen. Score as many points as you can."
