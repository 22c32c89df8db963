"""Pools from settings: a mistake shows at once, and everything is passed on."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest

from gymllm.errors import ConfigError, RunError, UnknownNameError
from gymllm_trainers.build import EnvSettings, open_pool

LAKE = "gymllm/FrozenLake-v0"


class Broken(gymnasium.Env[str, str]):
    observation_space = gymnasium.spaces.Text(9)
    action_space = gymnasium.spaces.Text(9)

    def __init__(self, when: str) -> None:
        if when == "made":
            raise OSError("no room")
        self.when = when

    def close(self) -> None:
        if self.when == "closed":
            raise OSError("still in use")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> str:
    spec = gymnasium.envs.registration.EnvSpec("test/Broken-v0", entry_point=Broken)
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    return spec.id


async def opened(**settings: Any) -> str:
    async with open_pool(EnvSettings(**settings), 2) as pool:
        async with pool.lease() as env:
            await env.reset(seed=0)
        worker = pool.worker
    assert pool.closed
    return worker


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("worker", "used"), [("auto", "inline"), ("thread", "thread"), ("process", "process")]
)
async def test_worker_is_as_set_and_by_default_as_the_environment_says(worker, used):
    assert await opened(id=LAKE, kwargs={"size": 2}, worker=worker, spares=1) == used


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("when", "said"),
    [
        ("made", "can't be made: it raised OSError: no room"),
        ("closed", "can't be closed: it raised OSError: still in use"),
    ],
)
async def test_environment_that_breaks_is_named(broken, when, said):
    with pytest.raises(ConfigError, match=f"^{broken} {said}"):
        await opened(id=broken, kwargs={"when": when})


@pytest.mark.asyncio
@pytest.mark.parametrize("worker", ["inline", "process"])
async def test_wrong_argument_of_the_environment_is_named(worker):
    with pytest.raises(ConfigError, match=f"(?s){LAKE}.*sise"):
        await opened(id=LAKE, kwargs={"sise": 2}, worker=worker)


@pytest.mark.asyncio
async def test_unknown_environment_is_no_traceback():
    with pytest.raises(UnknownNameError, match="FrozenLake"):
        await opened(id="gymllm/FrozenLak-v0")


@pytest.mark.asyncio
@pytest.mark.parametrize("setting", [{"memory_limit_mb": 100}, {"envs_per_process": 2}])
async def test_setting_for_processes_is_not_ignored_elsewhere(setting):
    with pytest.raises(ConfigError, match=rf"env\.{next(iter(setting))} is for .* runs inline"):
        await opened(id=LAKE, **setting)


@pytest.mark.asyncio
async def test_error_of_the_block_is_not_hidden_in_a_group():
    with pytest.raises(RunError, match="over"):
        async with open_pool(EnvSettings(id=LAKE), 1) as pool:
            raise RunError("over")
    assert pool.closed


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"tasks": 0}, "env.tasks must be >= 1 or none, got 0"),
        ({"start_timeout_s": 0.0}, "env.start_timeout_s must be > 0, got 0.0"),
        ({"envs_per_process": 0}, "env.envs_per_process must be >= 1, got 0"),
        ({"memory_limit_mb": -1}, "env.memory_limit_mb must be >= 0, got -1"),
        ({"spares": -1}, "env.spares must be >= 0, got -1"),
    ],
)
def test_settings_out_of_range_are_refused(setting, said):
    with pytest.raises(ConfigError, match=said):
        EnvSettings(**setting)
