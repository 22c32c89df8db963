"""The tiny model's warm start: supervised learning on scripted, imperfect play.

The scripted player plays through the same pool, agent and ledger as the policy will; what comes out are
ordinary trajectories, and the learner is the ordinary learner with the preset sft. The result is an
ordinary model folder in the user's cache, named by everything that it depends on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
import platformdirs

from gymllm.engine import Engine
from gymllm.engines.scripted import ScriptedEngine
from gymllm.episode import EpisodeLimits, run_team_episode
from gymllm.errors import ConfigError, RunError
from gymllm.pool import EnvPool
from gymllm.task import SeededTasks
from gymllm.team import Team
from gymllm.timeline import Timeline
from gymllm.trajectory import Ending, Trajectory
from gymllm_agents import Tokenizer, train_tokenizer
from gymllm_envs.scripted import ScriptedPlayer
from gymllm_trainers.algorithms.config import AlgorithmConfig
from gymllm_trainers.learner import Learner, LearnerConfig
from gymllm_trainers.models import decoder_params, random_decoder, save_model, tiny_config
from gymllm_trainers.optimizer import OptimizerConfig
from gymllm_trainers.supervised import imitation

FORMAT = 3
"""Raised when the same settings would give another model, so that old caches are left alone."""


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """How the tiny model is warm-started. Other models take no part in it."""

    enabled: bool = True
    """Without it the tiny model starts from random weights."""
    cache: bool = True
    """Whether a warm start is kept in, and taken from, the user's cache folder."""
    episodes: int = 750
    """Scripted episodes that are imitated, each once."""
    skill: float = 0.3
    """Probability of an optimal move; the other moves wander. The reward that reinforcement learning
    starts from follows from it."""
    learning_rate: float = 7e-4
    """Peak learning rate; it falls linearly to a tenth."""
    rows: int = 1
    """Rows of a micro-batch."""
    vocab_size: int = 384
    """Entries of the tokenizer that is trained on the episodes' text, at most."""

    def __post_init__(self) -> None:
        for name in ("episodes", "rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"warm_start.{name} must be >= 1, got {getattr(self, name)}.")
        if not 0 <= self.skill <= 1:
            raise ConfigError(f"warm_start.skill must be from 0 to 1, got {self.skill}.")


def cache_folder(config: WarmStartConfig, *, seed: int, depends_on: dict[str, object]) -> Path:
    """Where the warm start of these settings is kept.

    Args:
        config: How it is made.
        seed: The run's seed.
        depends_on: What else decides it: the environment's and the agent's settings.

    Raises:
        ConfigError: Nowhere may it be kept.
    """
    # The file system is asked for no name that a setting's text could break.
    text = json.dumps([FORMAT, asdict(config), seed, depends_on], sort_keys=True, default=str)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    return _place(Path(platformdirs.user_cache_dir("gymllm")) / "warm_start", name)


def _place(cache: Path, name: str) -> Path:
    """The folder of that name in the cache; where that can't be written, in one of the user's own for
    temporary files.

    Raises:
        ConfigError: That one is somebody else's.
    """
    if (cache / name).exists():
        return cache / name
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK):
            return cache / name
    instead = Path(tempfile.gettempdir()) / f"gymllm-{os.getuid()}"
    instead.mkdir(mode=0o700, parents=True, exist_ok=True)
    if instead.lstat().st_uid != os.getuid():
        raise ConfigError(
            f"the tiny model can't be kept in {cache}, which can't be written, nor in {instead}, which is "
            "another user's. Set XDG_CACHE_HOME to a folder that can be written."
        )
    return instead / name


async def scripted_episodes(
    pool: EnvPool,
    team: Team,
    engine: Engine,
    *,
    episodes: int,
    seed: int,
    limits: EpisodeLimits,
) -> list[Trajectory]:
    """Plays scripted episodes, one after another: nothing waits, so nothing is gained at once.

    Where several agents are trained, an episode's trajectories count as one each.
    """
    tasks = SeededTasks(run_seed=seed, split="warm-start")
    timeline = Timeline(1)
    played: list[Trajectory] = []
    started = failed = 0
    while len(played) < episodes:
        async with pool.lease() as env:
            trajectories = await run_team_episode(
                env=env,
                team=team,
                engine=engine,
                task=tasks.task(started),
                member=0,
                run_seed=seed,
                limits=limits,
                timeline=timeline,
            )
        started += 1
        if trajectories[0].ending is Ending.FAILED:
            failed += 1
            if failed > episodes:
                raise RunError(f"scripted episodes keep failing: {trajectories[0].reason}")
        else:
            played += trajectories
    return played


async def learn_tokenizer(
    pool: EnvPool, player: ScriptedPlayer | None, *, config: WarmStartConfig, seed: int
) -> Tokenizer:
    """A tokenizer trained on what environment and player say, and on the template's own words.

    Without a player it knows the environment's first observations alone.
    """
    rng = np.random.default_rng(seed)
    tasks = SeededTasks(run_seed=seed, split="warm-start")
    # The roles' words stand in every turn: each becomes one token.
    texts = ["system\n", "user\n", "assistant\n"] * 100
    for index in range(50):
        task = tasks.task(index)
        async with pool.lease() as env:
            observation, _ = await env.reset(seed=task.seed, options=task.options)
            if player is None:
                texts.append(observation)
                continue
            for _ in range(100):
                action = player(observation, rng, config.skill)
                texts += [observation, action]
                result = await env.step(action)
                if result.terminated or result.truncated:
                    break
                observation = result.observation
    return await anyio.to_thread.run_sync(
        lambda: train_tokenizer(texts, vocab_size=config.vocab_size), abandon_on_cancel=True
    )


async def random_start(
    folder: Path,
    config: WarmStartConfig,
    *,
    pool: EnvPool,
    player: ScriptedPlayer | None,
    seed: int,
) -> None:
    """Makes a tiny model of random weights, with a tokenizer of its own.

    Args:
        folder: Where the model goes, in the hub's format. Whole or not there at all.
        config: The size of the tokenizer.
        pool: The environments, whose text it learns.
        player: Plays them for that, where there is one.
        seed: The run's seed.
    """
    tokenizer = await learn_tokenizer(pool, player, config=config, seed=seed)

    def save() -> None:
        decoder = random_decoder(tiny_config(tokenizer.vocab_size), seed=seed)
        save_model(folder, decoder.config, decoder_params(decoder), tokenizer, overwrite=True)

    await anyio.to_thread.run_sync(save, abandon_on_cancel=True)


async def warm_start(
    folder: Path,
    config: WarmStartConfig,
    *,
    pool: EnvPool,
    player: ScriptedPlayer,
    agents: Callable[[Tokenizer], Team],
    limits: EpisodeLimits,
    context_length: int,
    row_tokens: int,
    seed: int,
    progress: Callable[[str], None],
) -> None:
    """Makes a warm-started tiny model.

    Args:
        folder: Where the model goes, in the hub's format. Whole or not there at all.
        config: How.
        pool: The environments.
        player: What is imitated.
        agents: Makes who plays for a tokenizer, as the run will; the scripted player acts for all.
        limits: Of the scripted episodes.
        context_length: Longest episode, in tokens.
        row_tokens: Tokens of a training row.
        seed: The run's seed.
        progress: Told what is going on, in a person's words.

    Raises:
        RunError: The player's episodes keep failing, or the folder can't be written.
    """
    progress("warm start: training the tokenizer")
    tokenizer = await learn_tokenizer(pool, player, config=config, seed=seed)
    progress(f"warm start: playing {config.episodes} scripted episodes")
    engine = ScriptedEngine(
        lambda prompt, rng: player(prompt, rng, config.skill),
        tokenizer,
        context_length=context_length,
    )
    played = await scripted_episodes(
        pool, agents(tokenizer), engine, episodes=config.episodes, seed=seed, limits=limits
    )
    stop = threading.Event()
    try:
        await anyio.to_thread.run_sync(
            lambda: _imitate(folder, config, played, tokenizer, row_tokens, seed, progress, stop),
            abandon_on_cancel=True,
        )
    finally:
        stop.set()


def _imitate(
    folder: Path,
    config: WarmStartConfig,
    played: list[Trajectory],
    tokenizer: Tokenizer,
    row_tokens: int,
    seed: int,
    progress: Callable[[str], None],
    stop: threading.Event,
) -> None:
    decoder = random_decoder(tiny_config(tokenizer.vocab_size), seed=seed)
    tokens = sum(trajectory.tokens for trajectory in played)
    steps = max(1, tokens // (config.rows * row_tokens))  # a few more with the padding
    learner = Learner(
        decoder,
        # A step for each full micro-batch: with beginnings shared there would be fewer steps.
        LearnerConfig(rows=config.rows, share_prefixes=False, smaller_shapes=0),
        algorithm=AlgorithmConfig(preset="sft"),
        optimizer=OptimizerConfig(learning_rate=config.learning_rate, warmup_steps=min(20, steps)),
        row_tokens=row_tokens,
        temperature=1.0,
        max_lag=0,
        total_steps=steps,
    )
    learner.compile()
    for done, trajectory in enumerate(played):
        if stop.is_set():
            return
        learner.add_sequences(imitation(trajectory.segments))
        # A step whenever a micro-batch is full: nothing is padded to end a step.
        if learner.micro_batches:
            loss = learner.step(flush=False)["loss"]
            if learner.version % 10 == 0:
                progress(f"warm start: {done}/{len(played)} episodes, loss {loss:.3f}")
    if not learner.version:
        learner.step()  # they are too few to fill one micro-batch
    weights = decoder_params(learner.policy())
    if not stop.is_set():
        folder.parent.mkdir(parents=True, exist_ok=True)
        save_model(folder, decoder.config, weights, tokenizer, overwrite=True)
