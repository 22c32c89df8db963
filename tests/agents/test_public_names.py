"""What the package exports is what it says it exports."""

from __future__ import annotations

import types

import gymllm_agents


def test_all_lists_the_exports_in_order():
    exported = {
        name
        for name, value in vars(gymllm_agents).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert exported == set(gymllm_agents.__all__)
    assert gymllm_agents.__all__ == sorted(gymllm_agents.__all__)
