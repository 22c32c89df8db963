"""What publishing weights costs the requests that are running: the pause, and what is lost (nothing).

A step's end is seen by looking at the engine's counts each half millisecond, so a pause is exact to about
a millisecond.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np
from engine_serving import Prompts, named_model, serving
from flax import nnx
from table import Table

from gymllm.engine import GenerateRequest, Generation, SamplingParams
from gymllm_trainers.engine import EngineConfig, JaxEngine
from gymllm_trainers.models import Decoder
from gymllm_trainers.models.decoder import LoRAParam

REQUESTS, PROMPT, LOOK_S = 8, 32, 0.0005


@dataclass
class Steps:
    """When each step ended."""

    at_s: list[float] = field(default_factory=list)

    @property
    def gaps_s(self) -> list[float]:
        """From each step's end to the next one's."""
        return [after - before for before, after in zip(self.at_s, self.at_s[1:], strict=False)]

    def longest_gap(self, start_s: float, taken_s: float) -> float:
        """The longest of those that any part of a span lies in, and of the one after: what is published is
        taken between two steps, so after the one that runs."""
        end_s = start_s + taken_s
        last = len(self.at_s) - 1
        first = next((i for i, at in enumerate(self.at_s) if at > start_s), last)
        final = next((i for i, at in enumerate(self.at_s) if at > end_s), last)
        return max(self.gaps_s[max(first - 1, 0) : final + 1])


@contextmanager
def watched(engine: JaxEngine) -> Iterator[Steps]:
    """Notes when the engine's steps end, in a thread of its own."""
    steps, ended = Steps(), threading.Event()

    def look() -> None:
        seen = engine.counts.steps
        while not ended.wait(LOOK_S):
            now = engine.counts.steps
            if now != seen:
                seen = now
                steps.at_s.append(time.perf_counter())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield steps
    finally:
        ended.set()
        thread.join()


def publication_rows(table: Table, model: str, *, quick: bool) -> None:
    """Rows of the pause and of what is lost: full weights, and LoRA."""
    loaded, name = named_model(model, quick=quick)
    table.add("publication to", name)
    new, publications = (48, 4) if quick else (192, 12)
    for adapters in (False, True):
        decoder = loaded.decoder()
        asyncio.run(
            publish_to(table, decoder, adapters=adapters, new=new, publications=publications)
        )


async def publish_to(
    table: Table,
    decoder: Decoder,
    *,
    adapters: bool,
    new: int,
    publications: int,
    cache_dtype: Literal["float32", "bfloat16"] = "float32",
) -> None:
    """Rows of one decoder's publications: all its weights, or adapters that are added to it."""
    what = "LoRA of rank 16" if adapters else "full weights"
    if adapters:
        decoder.add_adapters(rank=16, alpha=32.0, rngs=nnx.Rngs(0))
    state = nnx.state(decoder, LoRAParam if adapters else nnx.Param)
    # Other arrays, as a trainer's are.
    other = jax.block_until_ready(jax.tree.map(lambda leaf: leaf * 1.001, state))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    table.add(f"publication, {what}: size", size / 1e6, "MB")
    config = EngineConfig(slots=REQUESTS, context_length=256, cache_dtype=cache_dtype)
    async with serving(decoder, config) as engine:
        await _measure(table, what, engine, [state, other], new, publications)


async def _measure(
    table: Table,
    what: str,
    engine: JaxEngine,
    weights: list[Any],
    new: int,
    publications: int,
) -> None:
    """Generates once in peace and once with publications, evenly spread."""
    prompts = Prompts(1000)
    await _run(engine, prompts, new)
    engine.publish(weights[1], 0)  # what the first one costs is paid once
    with watched(engine) as calm:
        await _run(engine, prompts, new)
    moments: list[float] = []
    taken_s: list[float] = []

    async def publish() -> None:
        every = new // (publications + 1)
        first = engine.counts.steps
        for number in range(1, publications + 1):
            while engine.counts.steps - first < number * every:  # noqa: ASYNC110 - a count has no event
                await asyncio.sleep(LOOK_S)
            moments.append(time.perf_counter())
            # In a thread, as it blocks while it looks for NaN.
            await asyncio.to_thread(engine.publish, weights[(number - 1) % len(weights)], number)
            taken_s.append(time.perf_counter() - moments[-1])

    with watched(engine) as steps:
        generations, _ = await asyncio.gather(_run(engine, prompts, new), publish())
    step_s = statistics.median(calm.gaps_s)
    name = f"publication, {what}"
    table.add(f"{name}: a decode step without", step_s * 1e3, "ms")
    table.add(f"{name}: publish() returns after, median", statistics.median(taken_s) * 1e3, "ms")
    at = statistics.median(map(steps.longest_gap, moments, taken_s))
    # As many spans of the same lengths, evenly spread: what chance alone makes of the longest gap.
    peaceful = calm.at_s[:: len(calm.at_s) // (publications + 1)][1 : publications + 1]
    chance = statistics.median(map(calm.longest_gap, peaceful, taken_s))
    table.add(f"{name}: longest gap at each, median", at * 1e3, "ms")
    table.add(f"{name}: longest gap of such spans without, median", chance * 1e3, "ms")
    goal = f"<= {step_s * 1e3:.3g}, a step"
    table.add(f"{name}: pause, the one less the other", (at - chance) * 1e3, "ms", goal)
    table.add(f"{name}: longest gap of all with", max(steps.gaps_s) * 1e3, "ms")
    table.add(f"{name}: longest gap of all without", max(calm.gaps_s) * 1e3, "ms")
    lost = sum(new - len(generation.token_ids) for generation in generations)
    table.add(f"{name}: tokens lost", lost, "tokens", "0")
    versions = np.concatenate([generation.versions for generation in generations])
    seen = len(set(versions.tolist()) - {0})
    table.add(f"{name}: versions seen in the tokens", seen, "", str(publications))


async def _run(engine: JaxEngine, prompts: Prompts, new: int) -> list[Generation]:
    requests = [
        GenerateRequest(prompt_ids=prompt, sampling=SamplingParams(max_new_tokens=new, seed=seed))
        for seed, prompt in enumerate(prompts.take(REQUESTS, PROMPT))
    ]
    return list(await asyncio.gather(*(engine.generate(request) for request in requests)))
