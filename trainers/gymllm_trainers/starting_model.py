"""The model that a run starts from, and the decoder that is trained: loaded, or made for the name "tiny"."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from gymllm.errors import ConfigError, UnknownNameError
from gymllm.pool import EnvPool
from gymllm_envs.scripted import SCRIPTED_PLAYERS
from gymllm_trainers.config import TrainConfig
from gymllm_trainers.models import Decoder, LoadedModel, choose_linears, load_model
from gymllm_trainers.players import build_team
from gymllm_trainers.processes import Call, Leader
from gymllm_trainers.threads import in_thread
from gymllm_trainers.toolbox import Toolbox
from gymllm_trainers.warm_start import cache_folder, random_start, warm_start

TINY = "tiny"
"""Name of gymllm's own tiny model."""


async def loaded_model(
    config: TrainConfig, progress: Callable[[str], None], leader: Leader | None = None
) -> LoadedModel:
    """The model of that name or folder, which the other processes, where there are some, load too.

    Raises:
        UnknownNameError: There is none; says which are close.
        ModelError: It can't be loaded.
    """
    progress(f"loading {config.model.name}")
    if leader is not None:
        await in_thread(lambda: leader.tell(Call.MODEL))
    model = await in_thread(lambda: load_named(config))
    if leader is not None:
        await in_thread(leader.agree)
    return model


def load_named(config: TrainConfig) -> LoadedModel:
    """As `loaded_model`, in this process and thread."""
    try:
        return load_model(config.model.name, dtype=config.model.dtype)
    except UnknownNameError as error:
        known = [*error.known, TINY]
        raise UnknownNameError(error.kind, error.name, known, error.hint) from None


async def starting_model(
    config: TrainConfig,
    pool: EnvPool,
    toolbox: Toolbox,
    progress: Callable[[str], None],
    leader: Leader | None = None,
) -> LoadedModel:
    """The model that training starts from: loaded, or for "tiny" warm-started or random.

    Args:
        config: The run's.
        pool: Environments, which the tiny model learns from.
        toolbox: Its tools.
        progress: Told what is going on, in a person's words.
        leader: The line to other processes, where there are some; the tiny model is made here and sent.

    Raises:
        ConfigError: There is no scripted player to imitate; or another process can't load the model.
        UnknownNameError: No model is called that.
        ModelError: It can't be loaded.
    """
    if config.model.name != TINY:
        return await loaded_model(config, progress, leader)
    settings, folder = config.warm_start, warm_start_folder(config)
    player = SCRIPTED_PLAYERS.get(config.env.id)
    if settings.cache and folder.exists():
        pass
    elif not settings.enabled:
        progress("training the tokenizer")
        await random_start(folder, settings, pool=pool, player=player, seed=config.seed)
    elif player is None:
        raise ConfigError(
            "the tiny model's warm start imitates a scripted player, and there is none for "
            f"{config.env.id} (only for {', '.join(SCRIPTED_PLAYERS)}). Start from another model with "
            "--model.name smollm2 or a model's folder, or from random weights with "
            "--warm-start.no-enabled."
        )
    else:
        env_tools = await pool.tools()
        await warm_start(
            folder,
            settings,
            pool=pool,
            player=player,
            agents=lambda tokenizer: build_team(
                tokenizer, config.agent, config.players, toolbox=toolbox, env_tools=env_tools
            ),
            limits=config.rollout.limits,
            context_length=config.engine.context_length,
            row_tokens=2 * config.engine.context_length,
            seed=config.seed,
            progress=progress,
        )
    model = await in_thread(lambda: load_model(str(folder), dtype=config.model.dtype))
    if leader is not None:
        files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        await in_thread(lambda: leader.tell(Call.MODEL, files))
        await in_thread(leader.agree)
    return model


def load_sent(config: TrainConfig, files: Mapping[str, bytes]) -> LoadedModel:
    """The tiny model as another process made it: its folder's files by name."""
    with tempfile.TemporaryDirectory(prefix="gymllm-") as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        return load_model(folder, dtype=config.model.dtype)


def warm_start_folder(config: TrainConfig) -> Path:
    """Where the tiny model that this configuration starts from is kept."""
    depends_on: dict[str, object] = {
        "env": (config.env.id, dict(config.env.kwargs)),
        "agent": asdict(config.agent),
        "max_turns": config.rollout.max_turns,
        "context_length": config.engine.context_length,
    }
    if config.players:
        depends_on["players"] = {name: asdict(player) for name, player in config.players.items()}
    return cache_folder(config.warm_start, seed=config.seed, depends_on=depends_on)


def start_name(config: TrainConfig) -> str:
    """Name or folder of the model that a run starts from."""
    return str(warm_start_folder(config)) if config.model.name == TINY else config.model.name


def policy_decoder(config: TrainConfig, model: LoadedModel) -> Decoder:
    """The decoder to train, with the adapters that the settings ask for."""
    settings = config.model
    decoder = model.decoder(compute_dtype=jnp.dtype(settings.compute_dtype))
    decoder.remat = settings.remat
    if settings.lora_rank:
        decoder.add_adapters(
            rank=settings.lora_rank,
            alpha=settings.lora_alpha,
            linears=choose_linears(settings.lora_linears or "all-linear", model.config),
            rngs=nnx.Rngs(config.seed),
            dtype=jnp.float32,
        )
    return decoder
