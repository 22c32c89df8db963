"""What the engine's benchmarks share: an engine with its counts, batches of requests, what is compiled."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Literal, cast

import jax
import numpy as np

from gymllm.engine import GenerateRequest, Generation, SamplingParams
from gymllm.errors import EngineError
from gymllm.timeline import Timeline
from gymllm_agents import Tokenizer
from gymllm_trainers.engine import EngineConfig, EngineCounts, JaxEngine
from gymllm_trainers.models import Decoder, LoadedModel, load_model

COMPILED = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Counts every program that this process compiles from now on."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        self.count += event == COMPILED


class Prompts:
    """Random prompts, none twice: nothing of one is found in the cache by another."""

    def __init__(self, vocabulary: int, *, seed: int = 0) -> None:
        self._vocabulary = vocabulary
        self._generator = np.random.default_rng(seed)

    def take(self, count: int, length: int) -> list[list[int]]:
        """So many, each of `length` ids; never id 0, which some peers pad with."""
        return self._generator.integers(1, self._vocabulary, (count, length)).tolist()


def named_model(
    model: str, *, quick: bool, dtype: Literal["float32", "bfloat16"] = "float32"
) -> tuple[LoadedModel, str]:
    """A model, and what its rows call it; to be quick, its first two layers alone."""
    loaded = load_model(model, dtype=dtype)
    if not quick:
        return loaded, "SmolLM2-135M"
    stacked = cast("dict[str, jax.Array]", loaded.params["layers"])
    layers = {name: part[:2] for name, part in stacked.items()}
    cut = dataclasses.replace(
        loaded,
        config=dataclasses.replace(loaded.config, num_hidden_layers=2),
        params=loaded.params | {"layers": layers},
    )
    return cut, "SmolLM2-135M's first 2 layers"


def smaller(config: EngineConfig) -> EngineConfig:
    """The same for 8 requests at once, with few programs to compile: to be quick."""
    return dataclasses.replace(config, slots=8, prefill_tokens=(256,))


@asynccontextmanager
async def serving(
    decoder: Decoder, config: EngineConfig, *, tokenizer: Tokenizer | None = None
) -> AsyncGenerator[JaxEngine]:
    """An engine that has compiled everything, closed at the end."""
    engine = JaxEngine(decoder, config, timeline=Timeline(), tokenizer=tokenizer)
    try:
        await asyncio.to_thread(engine.ready.wait)
        yield engine
    finally:
        await engine.aclose()


async def generate_all(
    engine: JaxEngine, prompts: list[list[int]], *, new: int, temperature: float = 1.0
) -> tuple[float, list[Generation]]:
    """Seconds until all have their `new` tokens, and what was generated."""
    requests = [
        GenerateRequest(
            prompt_ids=prompt,
            sampling=SamplingParams(max_new_tokens=new, temperature=temperature, seed=seed),
        )
        for seed, prompt in enumerate(prompts)
    ]
    started = time.perf_counter()
    done = await asyncio.gather(*(engine.generate(request) for request in requests))
    seconds = time.perf_counter() - started
    short = [len(generation.token_ids) for generation in done if len(generation.token_ids) != new]
    if short:
        raise EngineError(f"{len(short)} of {len(done)} requests got {short[0]} tokens, not {new}.")
    return seconds, done


def counts_since(engine: JaxEngine, before: EngineCounts) -> dict[str, Any]:
    """What was counted since `before`, a copy of `engine.counts`."""
    after = dataclasses.asdict(engine.counts)
    return {name: after[name] - value for name, value in dataclasses.asdict(before).items()}


def copy_counts(engine: JaxEngine) -> EngineCounts:
    """The engine's counts as they are now."""
    return dataclasses.replace(engine.counts)
