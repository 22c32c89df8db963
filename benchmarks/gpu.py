"""Engine and trainer on one accelerator, against its memory's bandwidth and its matrix products' peak.

A Qwen3 of random weights in bfloat16 (the trainer keeps float32 beside). `gpu.sh` installs what it needs and
runs this; `--device cpu --size tiny` tries the script itself.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from engine_publication import publish_to
from engine_serving import Compilations, Prompts, copy_counts, counts_since, generate_all, serving
from machine_limits import (
    Limits,
    decode_s,
    device_read_rate,
    matmul_rate,
    prefill_s,
    training_s,
)
from table import Table

from gymllm_trainers.engine import EngineConfig
from gymllm_trainers.learner import Learner, LearnerConfig
from gymllm_trainers.models import DecoderConfig, random_decoder
from gymllm_trainers.models.decoder import Decoder
from gymllm_trainers.packing import TrainingSequence

DTYPE = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is run."""

    model: DecoderConfig
    batches: Sequence[int]
    prompt: int
    new: int
    prefill_tokens: tuple[int, ...]
    cache_mb: int
    row: int
    rows: int
    """Tokens of a row that is trained on, and rows at once."""
    matrix: int
    read_bytes: int


def qwen3(
    *, hidden: int, inner: int, layers: int, heads: int, groups: int, vocabulary: int
) -> DecoderConfig:
    """A shape of Qwen3's family."""
    return DecoderConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=128,
        max_position_embeddings=4096,
        rope_theta=1_000_000.0,
        qk_norm=True,
    )


SIZES = {
    # Qwen3-0.6B's own numbers.
    "0.6b": Size(
        model=qwen3(hidden=1024, inner=3072, layers=28, heads=16, groups=8, vocabulary=151_936),
        batches=(1, 8, 32, 128),
        prompt=512,
        new=128,
        prefill_tokens=(512, 4096),
        cache_mb=12_288,
        row=2048,
        rows=8,
        matrix=8192,
        read_bytes=2**33,
    ),
    "tiny": Size(
        model=qwen3(hidden=256, inner=512, layers=2, heads=2, groups=1, vocabulary=2048),
        batches=(1, 8),
        prompt=64,
        new=16,
        prefill_tokens=(64, 256),
        cache_mb=64,
        row=128,
        rows=2,
        matrix=512,
        read_bytes=2**26,
    ),
}


def main() -> None:
    """Prints the table and its JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("gpu", "tpu", "cpu"), default="gpu")
    parser.add_argument("--size", choices=sorted(SIZES), default="0.6b")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", {"gpu": "cuda"}.get(arguments.device, arguments.device))
    size, table = SIZES[arguments.size], Table()
    device = jax.devices()[0]
    table.add("device", device.device_kind)
    table.add("parameters", size.model.parameters / 1e6, "million")
    limits = limit_rows(table, size)
    asyncio.run(engine_rows(table, size, limits))
    trainer_rows(table, size, limits)
    for adapters in (False, True):
        asyncio.run(
            publish_to(
                table,
                _decoder(size),
                adapters=adapters,
                new=128,
                publications=4,
                cache_dtype=DTYPE,
            )
        )
    table.print_json()


def limit_rows(table: Table, size: Size) -> Limits:
    """What the device can do, measured now."""
    read, rate = device_read_rate(size.read_bytes), matmul_rate(DTYPE, size.matrix, tries=10)
    table.add("memory read", read / 1e9, "GB/s")
    table.add(f"matrix product {size.matrix}^3, {DTYPE}", rate / 1e12, "TFLOP/s")
    return Limits(bytes_a_s=read, operations_a_s={DTYPE: rate})


async def engine_rows(table: Table, size: Size, limits: Limits) -> None:
    """Prefill and decode at each batch, and requests of many lengths at once."""
    config = EngineConfig(
        slots=max(size.batches),
        context_length=2 * (size.prompt + size.new),
        prefill_tokens=size.prefill_tokens,
        cache_mb=size.cache_mb,
        cache_dtype=DTYPE,
    )
    prompts = Prompts(size.model.vocab_size)
    started = time.perf_counter()
    async with serving(_decoder(size), config) as engine:
        table.add("engine: until it is ready", time.perf_counter() - started, "s")
        await generate_all(engine, prompts.take(2, size.prompt), new=2)
        compilations = Compilations()
        for batch in size.batches:
            first, whole = [], []
            for _ in range(3):
                for new, times in ((1, first), (1 + size.new, whole)):
                    asked = prompts.take(batch, size.prompt)
                    times.append((await generate_all(engine, asked, new=new))[0])
            prefill, decode = min(first), (min(whole) - min(first)) / size.new
            context = size.prompt + size.new / 2
            least = decode_s(limits, size.model, batch=batch, context=context, dtype=DTYPE)
            table.add(f"engine, batch {batch}: decode", batch / decode, "tokens/s")
            what = f"engine, batch {batch}: decode against memory or products, what binds"
            table.add(what, least / decode, "", ">= 0.5")
            least = prefill_s(limits, size.model, batch=batch, prompt=size.prompt, dtype=DTYPE)
            table.add(f"engine, batch {batch}: prefill", batch * size.prompt / prefill, "tokens/s")
            what = f"engine, batch {batch}: prefill against products"
            table.add(what, least / prefill, "", ">= 0.5" if batch > 1 else "")
        before, started = copy_counts(engine), time.perf_counter()
        lengths = np.random.default_rng(0).integers(8, size.prompt, 4 * max(size.batches))
        await asyncio.gather(
            *(
                generate_all(engine, prompts.take(1, int(length)), new=1 + int(length) % size.new)
                for length in lengths
            )
        )
        seconds, counts = time.perf_counter() - started, counts_since(engine, before)
        what = f"engine, {len(lengths)} requests of many lengths"
        table.add(f"{what}: generated", counts["generated_tokens"] / seconds, "tokens/s")
        table.add(f"{what}: prefilled", counts["prefill_tokens"] / seconds, "tokens/s")
        table.add("engine: compiled after its start", compilations.count, "programs", "0")


def trainer_rows(table: Table, size: Size, limits: Limits) -> None:
    """Gradient and optimizer step of one micro-batch, full weights, all of it recomputed but the inputs."""
    decoder = random_decoder(size.model, seed=0, dtype="float32", compute_dtype=DTYPE)
    decoder.remat = "full"
    learner = Learner(
        decoder,
        LearnerConfig(rows=size.rows, head_chunk=min(2048, size.row)),
        row_tokens=size.row,
        temperature=1.0,
        max_lag=1,
    )
    started = time.perf_counter()
    learner.compile()
    table.add("trainer: compilation", time.perf_counter() - started, "s")
    generator = np.random.default_rng(0)
    times: list[float] = []
    for _ in range(5):
        sequences = [_sequence(generator, size) for _ in range(size.rows)]
        started = time.perf_counter()
        learner.add_sequences(sequences)
        learner.step()
        times.append(time.perf_counter() - started)
    tokens, seconds = size.rows * size.row, statistics.median(times[1:])
    least = training_s(limits, size.model, tokens=tokens, row=size.row)
    table.add(f"trainer, {size.rows} rows of {size.row}", tokens / seconds, "tokens/s")
    table.add("trainer: operations of the model against products", least / seconds, "", ">= 0.4")


def _sequence(generator: np.random.Generator, size: Size) -> TrainingSequence:
    ids = generator.integers(0, size.model.vocab_size, size.row).astype(np.int32)
    mask = np.ones(size.row, np.float32)
    mask[0] = 0
    behaviour = np.full(size.row, -np.log(size.model.vocab_size), np.float32)
    advantage = np.full(size.row, generator.choice([-1.0, 1.0]), np.float32)
    return TrainingSequence(ids=ids, mask=mask, behaviour=behaviour, advantage=advantage)


def _decoder(size: Size) -> Decoder:
    return random_decoder(size.model, seed=0, dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)


if __name__ == "__main__":
    main()
