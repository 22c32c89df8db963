"""How Gymnasium's own environments, MiniGrid, BabyAI and Atari look in text.

One module for each family; none imports the environments that it describes. Loaded with the plug-in.
"""

from __future__ import annotations

from gymllm_envs.describers import atari, classic_control, minigrid, toy_text


def register_describers() -> None:
    """Registers them all; again is the same."""
    for family in (toy_text, classic_control, minigrid, atari):
        family.register()
