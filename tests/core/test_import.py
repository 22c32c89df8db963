"""`import gymllm`: quick, light, and it says what it exports."""

import subprocess
import sys

import pytest

import gymllm
import gymllm.testing
import gymllm.workers

HEAVY = ("jax", "torch", "transformers", "tyro", "rich", "flax", "matplotlib", "wandb", "yaml")


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_import_registers_and_brings_nothing_heavy() -> None:
    output = run(
        "import gymllm, gymnasium, sys;"
        "print('gymllm/FrozenLake-v0' in gymnasium.registry);"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    assert output.split("\n")[:2] == ["True", "[]"]


def test_either_package_can_be_imported_first() -> None:
    made = "print(gymnasium.make('gymllm/FrozenLake-v0').reset(seed=0)[0])"
    shown = [run(f"import {first}, gymnasium; {made}") for first in ("gymllm", "gymllm_envs")]
    assert shown[0] == shown[1]
    assert "S F" in shown[0] or "S H" in shown[0]


@pytest.mark.parametrize("module", [gymllm, gymllm.workers, gymllm.testing])
def test_all_is_sorted_and_complete(module: object) -> None:
    exported = module.__all__  # type: ignore[attr-defined]  # a module
    assert exported == sorted(exported)
    assert all(hasattr(module, name) for name in exported)
