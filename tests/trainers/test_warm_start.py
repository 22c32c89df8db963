"""The warm start: what it imitates, what it leaves, and that it leaves nothing half-done."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import jax
import numpy as np
import pytest

from gymllm.engines import ScriptedEngine
from gymllm.episode import EpisodeLimits
from gymllm.errors import ConfigError, RunError
from gymllm.pool import EnvPool
from gymllm.team import Player
from gymllm.trajectory import Ending, Trajectory
from gymllm_agents import ConversationConfig, ModelAgent, Tokenizer, train_tokenizer
from gymllm_envs.scripted import scripted_player
from gymllm_trainers import starting_model
from gymllm_trainers import warm_start as module
from gymllm_trainers.config import load_config
from gymllm_trainers.models import DecoderConfig, load_model
from gymllm_trainers.supervised import imitation
from gymllm_trainers.warm_start import (
    WarmStartConfig,
    cache_folder,
    learn_tokenizer,
    random_start,
    scripted_episodes,
    warm_start,
)

LAKE = "gymllm/FrozenLake-v0"
PLAYER = scripted_player(LAKE)
CONFIG = WarmStartConfig(episodes=2, vocab_size=300)
LENGTH = 384


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model at a size that compiles in a moment."""

    def small(vocab_size: int) -> DecoderConfig:
        return DecoderConfig(
            vocab_size=vocab_size,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=LENGTH,
            qk_norm=True,
        )

    monkeypatch.setattr(module, "tiny_config", small)


@asynccontextmanager
async def lakes(env: Any = LAKE) -> AsyncGenerator[EnvPool]:
    pool = EnvPool(env, 2)
    try:
        with anyio.fail_after(30):
            yield pool
    finally:
        await pool.aclose()


def agents(tokenizer: Tokenizer) -> Any:
    return {"": Player(ModelAgent.factory(tokenizer, ConversationConfig(max_new_tokens=16)))}


async def make(folder: Path, *, config: WarmStartConfig = CONFIG, seed: int = 0) -> list[str]:
    said: list[str] = []
    async with lakes() as pool:
        await warm_start(
            folder,
            config,
            pool=pool,
            player=PLAYER,
            agents=agents,
            limits=EpisodeLimits(),
            context_length=LENGTH,
            row_tokens=LENGTH,
            seed=seed,
            progress=said.append,
        )
    return said


async def play(skill: float, *, seed: int = 0, episodes: int = 20) -> list[Trajectory]:
    tokenizer = train_tokenizer([], vocab_size=259)
    engine = ScriptedEngine(lambda prompt, rng: PLAYER(prompt, rng, skill), tokenizer)
    async with lakes() as pool:
        return await scripted_episodes(
            pool, agents(tokenizer), engine, episodes=episodes, seed=seed, limits=EpisodeLimits()
        )


@pytest.mark.asyncio
async def test_leaves_a_whole_model_that_learned_even_from_a_handful(tmp_path: Path) -> None:
    """Fewer tokens than a micro-batch holds are trained on all the same."""
    folder = tmp_path / "cache" / "model"
    said = await make(folder)
    model = load_model(str(folder))
    assert model.tokenizer.vocab_size == model.config.vocab_size == 300
    start = module.random_decoder(model.config, seed=0)
    before = jax.tree.leaves(module.decoder_params(start))
    after = jax.tree.leaves(model.params)
    assert all((a != b).any() for a, b in zip(before, after, strict=True))
    assert os.listdir(folder.parent) == ["model"], "nothing beside it"
    assert any("scripted episodes" in line for line in said)


@pytest.mark.asyncio
async def test_cancelled_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, ended = threading.Event(), threading.Event()
    imitate = module._imitate

    def watched(*arguments: Any) -> None:
        training.set()
        stop: threading.Event = arguments[-1]
        assert stop.wait(10), "cancellation does not wait for the thread, but tells it"
        imitate(*arguments)
        ended.set()

    monkeypatch.setattr(module, "_imitate", watched)
    monkeypatch.setattr(module.Learner, "compile", lambda self: None)
    async with anyio.create_task_group() as group:
        group.start_soon(make, tmp_path / "model")
        await anyio.to_thread.run_sync(training.wait, 10)
        group.cancel_scope.cancel()
    assert ended.wait(10), "the thread ends by itself"
    assert os.listdir(tmp_path) == []


@pytest.mark.asyncio
async def test_skill_decides_the_reward_and_the_seed_everything() -> None:
    perfect = await play(1.0)
    assert [t.reward for t in perfect] == [1.0] * 20
    clumsy = await play(0.3)
    assert sum(t.reward for t in clumsy) < 10
    again, other = await play(0.3), await play(0.3, seed=1)
    assert [t.messages for t in again] == [t.messages for t in clumsy]
    assert [t.messages for t in other] != [t.messages for t in clumsy]
    assert len({t.task.seed for t in clumsy}) == 20


@pytest.mark.asyncio
async def test_the_tokenizer_knows_the_templates_words() -> None:
    async with lakes() as pool:
        tokenizer = await learn_tokenizer(pool, PLAYER, config=WarmStartConfig(), seed=0)
        again = await learn_tokenizer(pool, PLAYER, config=WarmStartConfig(), seed=0)
    for word in ("assistant", "user", "left", "down", "right", "up"):
        assert len(tokenizer.encode(word, allow_special=False)) == 1, word
    text = "row 1 column 2: left F"
    assert tokenizer.encode(text, allow_special=False) == again.encode(text, allow_special=False)


@pytest.mark.asyncio
async def test_without_a_player_the_tokenizer_learns_what_the_environment_says() -> None:
    async with lakes() as pool:
        tokenizer = await learn_tokenizer(pool, None, config=WarmStartConfig(), seed=0)
    assert len(tokenizer.encode("assistant", allow_special=False)) == 1
    text = "left, down, right or up"
    assert len(tokenizer.encode(text, allow_special=False)) < len(text) / 2


@pytest.mark.asyncio
async def test_random_start_leaves_a_whole_model(tmp_path: Path) -> None:
    async with lakes() as pool:
        await random_start(tmp_path / "m" / "model", CONFIG, pool=pool, player=None, seed=3)
    model = load_model(str(tmp_path / "m" / "model"))
    assert model.tokenizer.vocab_size == model.config.vocab_size == 300
    expected = module.decoder_params(module.random_decoder(model.config, seed=3))
    for one, other in zip(jax.tree.leaves(model.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.asyncio
@pytest.mark.parametrize("enabled", [True, False])
async def test_environment_without_a_player_needs_none_for_random_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(starting_model, "SCRIPTED_PLAYERS", {"other": PLAYER})
    flags = [] if enabled else ["--warm-start.no-enabled"]
    config = load_config(["--warm-start.vocab-size", "300", *flags])
    async with lakes() as pool:
        if enabled:
            with pytest.raises(ConfigError, match=r"smollm2 .*--warm-start\.no-enabled"):
                await starting_model.starting_model(config, pool, {}, lambda phase: None)
        else:
            model = await starting_model.starting_model(config, pool, {}, lambda phase: None)
            assert model.tokenizer.vocab_size == 300
            assert starting_model.warm_start_folder(config).is_dir(), (
                "gymllm-eval starts from it too"
            )


@pytest.mark.asyncio
async def test_what_is_imitated_is_what_the_player_said() -> None:
    (trajectory,) = await play(0.5, episodes=1)
    (sequence,) = imitation(trajectory.segments)
    segment = trajectory.segments[0]
    np.testing.assert_array_equal(sequence.ids, segment.ids)
    np.testing.assert_array_equal(sequence.mask, segment.mask)
    assert (sequence.advantage == 1).all()
    silent = replace(segment, mask=np.zeros_like(segment.mask))
    assert imitation((silent,)) == []


@pytest.mark.asyncio
async def test_a_player_whose_episodes_keep_failing_is_an_error() -> None:
    class Broken:
        def __init__(self) -> None:
            raise OSError("no lake")

    tokenizer = train_tokenizer([], vocab_size=259)
    engine = ScriptedEngine(lambda prompt, rng: "up", tokenizer)
    async with lakes(Broken) as pool:
        with pytest.raises(RunError, match=r"keep failing: .*no lake"):
            await scripted_episodes(
                pool, agents(tokenizer), engine, episodes=3, seed=0, limits=EpisodeLimits()
            )


@pytest.mark.asyncio
async def test_failed_episodes_are_not_imitated() -> None:
    def sometimes(prompt: str, rng: np.random.Generator) -> str:
        if rng.random() < 0.05:
            raise ValueError("stumbled")
        return PLAYER(prompt, rng, 1.0)

    tokenizer = train_tokenizer([], vocab_size=259)
    async with lakes() as pool:
        played = await scripted_episodes(
            pool,
            agents(tokenizer),
            ScriptedEngine(sometimes, tokenizer),
            episodes=20,
            seed=0,
            limits=EpisodeLimits(),
        )
    assert len(played) == 20
    assert all(t.ending is Ending.TERMINATED for t in played)
    assert max(t.task.index for t in played) > 19, "others were played in their place"


def test_the_cache_is_named_by_everything_it_depends_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = [
        cache_folder(config, seed=seed, depends_on=depends_on)
        for config in (CONFIG, replace(CONFIG, skill=0.1))
        for seed in (0, 1)
        for depends_on in ({"env": "a"}, {"env": "b"}, {"env": "a", "agent": 1})
    ]
    assert len(set(folders)) == len(folders)
    assert folders[0] == cache_folder(replace(CONFIG), seed=0, depends_on={"env": "a"})
    assert all(folder.is_relative_to(tmp_path) for folder in folders)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"episodes": 0}, r"warm_start.episodes must be >= 1, got 0"),
        ({"rows": 0}, r"warm_start.rows must be >= 1, got 0"),
        ({"skill": 1.5}, r"warm_start.skill must be from 0 to 1, got 1.5"),
        ({"skill": float("nan")}, r"warm_start.skill must be from 0 to 1, got nan"),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WarmStartConfig(**setting)


def test_a_cache_that_cannot_be_written_is_replaced_by_a_folder_of_the_users_own(
    tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("where the cache should be")
    monkeypatch.setattr(module.platformdirs, "user_cache_dir", lambda name: str(tmp_path / "file"))
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    own = tmp_path / f"gymllm-{os.getuid()}"
    folder = module.cache_folder(module.WarmStartConfig(), seed=0, depends_on={})
    assert folder.parent == own
    assert own.stat().st_mode & 0o077 == 0
    folder.mkdir()  # it can be written
    monkeypatch.setattr(module.os, "getuid", lambda: -1)
    (tmp_path / "gymllm--1").mkdir()
    with pytest.raises(ConfigError, match=r"another user's\. Set XDG_CACHE_HOME"):
        module.cache_folder(module.WarmStartConfig(), seed=0, depends_on={})
