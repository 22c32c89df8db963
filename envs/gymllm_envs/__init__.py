"""Environments of gymllm, one module or folder each.

Importing this package, or `gymllm`, registers them with Gymnasium; a module is imported only when one of
its environments is made. Every id's module has the environment class and `make_vector`, which is what
`gymnasium.make_vec` calls.
"""

from __future__ import annotations

import importlib

import gymnasium

ENVIRONMENTS: dict[str, str] = {
    "gymllm/Arithmetic-v0": "gymllm_envs.arithmetic:Arithmetic",
    "gymllm/FrozenLake-v0": "gymllm_envs.frozen_lake:FrozenLake",
    "gymllm/PettingZoo-v0": "gymllm_envs.petting_zoo:PettingZoo",
    "gymllm/SWE-v0": "gymllm_envs.swe.env:SWE",
    "gymllm/Terminal-v0": "gymllm_envs.terminal.env:TerminalEnv",
    "gymllm/TextArena-v0": "gymllm_envs.text_arena:TextArena",
}
"""Id to the class that is made for it."""


def register() -> None:
    """Registers every environment that is not registered yet, and how those of others look in text."""
    # gymllm is imported first and whole, because its import comes back here to load this plug-in.
    importlib.import_module("gymllm")
    from gymllm_envs.describers import register_describers

    register_describers()
    for env_id, entry_point in ENVIRONMENTS.items():
        if env_id not in gymnasium.registry:
            module, _, _ = entry_point.partition(":")
            gymnasium.register(  # pyright: ignore[reportUnknownMemberType]  # its kwargs are a bare dict
                id=env_id,
                entry_point=entry_point,
                vector_entry_point=f"{module}:make_vector",
            )


register()
