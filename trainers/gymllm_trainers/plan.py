"""`gymllm-train --plan`: what a run would take, without its model and before anything is started.

Sizes come from the model's shape: of a folder, a GGUF file, or one of the well-known models below. They are
what has to be held whatever the device; what activations take beside depends on it and is not in them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
from rich.console import Console
from rich.table import Table

from gymllm.errors import ConfigError
from gymllm_trainers.build import open_pool, task_source
from gymllm_trainers.config import ModelSettings, TrainConfig
from gymllm_trainers.mesh import rows_for
from gymllm_trainers.models import DecoderConfig, choose_linears, gguf, tiny_config
from gymllm_trainers.models.config import RopeScaling
from gymllm_trainers.models.decoder import linear_shapes
from gymllm_trainers.models.hub import config_from_hub
from gymllm_trainers.models.load import SMOLLM2
from gymllm_trainers.players import check_players
from gymllm_trainers.starting_model import TINY

BYTES = {"float32": 4, "bfloat16": 2}
"""Of an element."""
_ADAM = 8  # two moments in float32


def _qwen2(layers: int, hidden: int, ff: int, heads: int, keys: int) -> DecoderConfig:
    large = hidden > 3000
    return DecoderConfig(
        vocab_size=152_064 if large else 151_936,
        hidden_size=hidden,
        intermediate_size=ff,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        head_dim=hidden // heads,
        max_position_embeddings=32_768,
        rope_theta=1_000_000.0,
        tie_word_embeddings=not large,
        qkv_bias=True,
    )


def _qwen3(layers: int, hidden: int, ff: int, heads: int, *, tied: bool) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=ff,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_theta=1_000_000.0,
        tie_word_embeddings=tied,
        qk_norm=True,
    )


def _llama3(
    layers: int, hidden: int, ff: int, heads: int, *, tied: bool, factor: float
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=ff,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=hidden // heads,
        max_position_embeddings=131_072,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(kind="llama3", factor=factor),
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
    )


def _gemma2(layers: int, hidden: int, ff: int, heads: int, keys: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=256_000,
        hidden_size=hidden,
        intermediate_size=ff,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        head_dim=256,
        max_position_embeddings=8192,
        hidden_act="gelu_pytorch_tanh",
        norm_offset=True,
        post_norms=True,
        scale_embeddings=True,
        query_pre_attn_scalar=256.0,
        attention_softcap=50.0,
        final_softcap=30.0,
        sliding_window=4096,
        sliding_layers=tuple(layer % 2 == 0 for layer in range(layers)),
    )


def _gemma3(layers: int, hidden: int, ff: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=262_144,
        hidden_size=hidden,
        intermediate_size=ff,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32_768,
        rope_theta=1_000_000.0,
        rope_local_theta=10_000.0,
        qk_norm=True,
        hidden_act="gelu_pytorch_tanh",
        norm_offset=True,
        post_norms=True,
        scale_embeddings=True,
        query_pre_attn_scalar=256.0,
        sliding_window=512,
        sliding_layers=tuple((layer + 1) % 6 != 0 for layer in range(layers)),
    )


SHAPES = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": DecoderConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rope_theta=100_000.0,
        rms_norm_eps=1e-5,
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": _qwen2(24, 896, 4864, 14, 2),
    "Qwen/Qwen2.5-1.5B-Instruct": _qwen2(28, 1536, 8960, 12, 2),
    "Qwen/Qwen2.5-3B-Instruct": _qwen2(36, 2048, 11_008, 16, 2),
    "Qwen/Qwen2.5-7B-Instruct": _qwen2(28, 3584, 18_944, 28, 4),
    "Qwen/Qwen3-0.6B": _qwen3(28, 1024, 3072, 16, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(28, 2048, 6144, 16, tied=True),
    "Qwen/Qwen3-4B": _qwen3(36, 2560, 9728, 32, tied=True),
    "Qwen/Qwen3-8B": _qwen3(36, 4096, 12_288, 32, tied=False),
    "Qwen/Qwen3-14B": _qwen3(40, 5120, 17_408, 40, tied=False),
    "Qwen/Qwen3-32B": _qwen3(64, 5120, 25_600, 64, tied=False),
    "Qwen/Qwen3-30B-A3B": replace(
        _qwen3(48, 2048, 6144, 32, tied=False),
        num_key_value_heads=4,
        num_experts=128,
        experts_per_token=8,
        expert_size=768,
        norm_topk_prob=True,
    ),
    "meta-llama/Llama-3.2-1B-Instruct": _llama3(16, 2048, 8192, 32, tied=True, factor=32.0),
    "meta-llama/Llama-3.2-3B-Instruct": _llama3(28, 3072, 8192, 24, tied=True, factor=32.0),
    "meta-llama/Llama-3.1-8B-Instruct": _llama3(32, 4096, 14_336, 32, tied=False, factor=8.0),
    "google/gemma-2-2b-it": _gemma2(26, 2304, 9216, 8, 4),
    "google/gemma-2-9b-it": _gemma2(42, 3584, 14_336, 16, 8),
    "google/gemma-3-270m-it": _gemma3(18, 640, 2048),
    "google/gemma-3-1b-it": _gemma3(26, 1152, 6912),
}
"""Shapes of hub models, as their config.json has them: planning needs no download."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run would take."""

    rows: tuple[tuple[str, str, str], ...]
    """Part, what of it, and how much, for reading."""
    warnings: tuple[str, ...]
    """What would probably go wrong, or waste something."""
    parameters: int | None
    """Of the model; None if its shape isn't known here."""
    device_bytes: int | None
    """Weights, optimizer, gradients and the engine's keys and values."""


def show(config: TrainConfig) -> None:
    """Prints the plan.

    Raises:
        GymLLMError: A setting can't be used, or the environment can't be made or listed.
    """
    found = plan(config)
    table = Table(title=f"Plan of {config.env.id} with {config.model.name}", title_style="bold")
    for column in ("part", "what", "how much"):
        table.add_column(column)
    last = ""
    for part, what, much in found.rows:
        if part != last and last:
            table.add_section()
        table.add_row(part if part != last else "", what, much)
        last = part
    console = Console(highlight=False)
    console.print(table)
    for warning in found.warnings:
        console.print(f"! {warning}")


def plan(config: TrainConfig) -> Plan:
    """Works out what a run would take; makes one environment and closes it.

    Raises:
        GymLLMError: As for `show`.
    """
    check_players(config.players, temperature=config.agent.temperature)
    tools, listed = anyio.run(_environment, config)
    shape = shape_of(config)
    rows = [("environment", "id", config.env.id)]
    by_seed = f"{config.env.tasks}, by seed" if config.env.tasks else "endless, by seed"
    rows.append(("environment", "tasks", str(listed) if listed else by_seed))
    if tools:
        rows.append(("environment", "tools", ", ".join(tools)))
    rows += _episodes(config)
    parameters = device_bytes = None
    if shape is None:
        rows.append(("model", "parameters", "not known here: neither its folder nor its shape"))
    else:
        parameters = shape.parameters
        sized = dict(_memory(config, shape))
        device_bytes = sum(sized.values())
        rows.append(("model", "parameters", f"{parameters / 1e6:,.1f} M"))
        rows += [("memory", what, _size(size)) for what, size in sized.items()]
        rows.append(("memory", "together, without activations", _size(device_bytes)))
    return Plan(
        rows=tuple(rows),
        warnings=tuple(_warnings(config, shape)),
        parameters=parameters,
        device_bytes=device_bytes,
    )


async def _environment(config: TrainConfig) -> tuple[list[str], int]:
    """The names of the environment's tools, and how many tasks it lists."""
    async with open_pool(config.env, 1) as pool:
        tools = [str(_function(tool)["name"]) for tool in await pool.tools()]
    tasks = await task_source(config.env, run_seed=config.seed, split="train", shuffle=True)
    return tools, len(getattr(tasks, "ids", ()))


def _function(tool: object) -> dict[str, object]:
    return tool["function"]  # type: ignore[index]  # a ToolSchema


def _episodes(config: TrainConfig) -> list[tuple[str, str, str]]:
    rollout, groups = config.rollout, config.learner.groups_per_step
    a_step = groups * rollout.group_size
    admitted = a_step * (1 + rollout.max_lag)
    tokens = a_step * config.engine.context_length
    # Environments with limits of these names end first, where theirs are lower.
    turns = _least(rollout.max_turns, config.env.kwargs.get("max_turns"))
    seconds = _least(rollout.episode_timeout_s, config.env.kwargs.get("wall_clock_s"))
    row = config.learner.row_tokens or 2 * config.engine.context_length
    rows = rows_for(None, config.learner.rows)
    micro = -(-tokens // (row * rows))
    return [
        ("episodes", "a step", f"{a_step:,}: {groups} groups of {rollout.group_size}"),
        (
            "episodes",
            "in all",
            f"{a_step * config.steps:,} in {config.steps:,} steps, refills apart",
        ),
        ("episodes", "at once", f"{min(rollout.concurrency, admitted)} of {admitted} admitted"),
        ("episodes", "limits", f"{turns:g} turns, {seconds:g} s"),
        ("tokens", "an episode", f"at most {config.engine.context_length:,}"),
        ("tokens", "a step", f"at most {tokens:,}: {micro} micro-batches"),
        ("tokens", "a micro-batch", f"{rows} rows of {row:,}"),
    ]


def _least(ours: float, theirs: object) -> float:
    return min(ours, theirs) if isinstance(theirs, int | float) and theirs > 0 else ours


def _memory(config: TrainConfig, shape: DecoderConfig) -> Iterator[tuple[str, int]]:
    model, engine = config.model, config.engine
    weights = BYTES[model.dtype]
    yield f"weights, {model.dtype}", shape.parameters * weights
    trained = shape.parameters
    if model.lora_rank:
        trained = adapter_parameters(shape, model)
        yield f"adapters of rank {model.lora_rank}", trained * 4
    yield "AdamW's moments, float32", trained * _ADAM
    yield "gradients, float32", trained * 4
    a_token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
    pages = engine.resolved(shape).total_pages
    kept = pages * engine.page_size * a_token * BYTES[engine.cache_dtype]
    yield f"keys and values, {pages:,} pages of {engine.page_size}", kept
    yield "logits of one chunk, float32", config.learner.head_chunk * shape.vocab_size * 4


def adapter_parameters(shape: DecoderConfig, model: ModelSettings) -> int:
    """How many parameters a run's adapters have."""
    chosen = choose_linears(model.lora_linears or "all-linear", shape)
    ends = sum(sum(linear_shapes(shape)[name]) for name in chosen)
    return model.lora_rank * ends * shape.num_hidden_layers


def shape_of(config: TrainConfig) -> DecoderConfig | None:
    """The shape of a run's model: of a folder, a file, or one that is known here; None if it isn't."""
    name = config.model.name
    if name == TINY:
        return tiny_config(config.warm_start.vocab_size)
    if name in SHAPES:
        return SHAPES[name]
    if name == SMOLLM2:
        with gguf.open_gguf(gguf.smollm2_path()) as file:
            return file.config
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        with gguf.open_gguf(path) as file:
            return file.config
    if (path / "config.json").is_file():
        try:
            settings = json.loads((path / "config.json").read_text())
        except ValueError as problem:
            raise ConfigError(f"{path / 'config.json'} is no JSON: {problem}.") from problem
        return config_from_hub(settings, where=str(path / "config.json"))
    return None


def _warnings(config: TrainConfig, shape: DecoderConfig | None) -> Iterator[str]:
    rollout, engine = config.rollout, config.engine
    admitted = config.learner.groups_per_step * rollout.group_size * (1 + rollout.max_lag)
    if rollout.concurrency > admitted:
        yield (
            f"rollout.concurrency is {rollout.concurrency}, but (1 + max_lag) x groups_per_step x group_size "
            f"admits {admitted} episodes: the others never start."
        )
    if rollout.concurrency < rollout.group_size:
        yield (
            f"rollout.concurrency {rollout.concurrency} is less than a group of {rollout.group_size}: its "
            "members can't play together."
        )
    if engine.slots < min(rollout.concurrency, admitted):
        yield (
            f"engine.slots {engine.slots} is less than the {min(rollout.concurrency, admitted)} episodes at "
            "once: conversations lose their keys and values between turns."
        )
    if shape is not None and engine.context_length > shape.max_position_embeddings:
        yield (
            f"engine.context_length {engine.context_length} is more than the {shape.max_position_embeddings} "
            "positions that the model was made for."
        )
    if config.agent.max_new_tokens >= engine.context_length:
        yield (
            f"agent.max_new_tokens {config.agent.max_new_tokens} leaves no room for a prompt in "
            f"engine.context_length {engine.context_length}."
        )


def _size(size_bytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:,.1f} {unit}"
    return f"{size_bytes} B"
