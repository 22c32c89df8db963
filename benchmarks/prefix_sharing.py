"""What computing shared beginnings once saves: FLOPs, seconds and memory of the gradient, with and without.

    python benchmarks/prefix_sharing.py [--models small smollm2] [--groups 2] [--repeats 3] [--dtype bfloat16]

A group of 8 with a common prompt of 150 tokens and answers of 40; multi-turn episodes of FrozenLake as a run
plays them (`trainer_trace.py`); and the same with a sequence for each turn, as where a chat template can't go
on from what was said and each turn's prompt is a sequence of its own. Both ways compute the same gradient of
the same targets, so the head's products are the same. FLOPs are those of matrix products, padding included:
XLA's own count takes a loop's body once.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from table import Table
from trainer_trace import record, small_tokenizer

from gymllm_agents import Tokenizer
from gymllm_trainers.models import Decoder, load_model, random_decoder, tiny_config
from gymllm_trainers.models.decoder import linear_shapes
from gymllm_trainers.models.logprob_head import token_statistics
from gymllm_trainers.packing import PackedBatch, Packer, TrainingSequence, pack_rows
from gymllm_trainers.supervised import imitation

GROUP, PROMPT, ANSWER = 8, 150, 40
ANSWERS = f"{GROUP} x ({PROMPT} + {ANSWER})"
LENGTHS = (2048, 1536, 1024, 512)
"""Of rows; a micro-batch is one."""
CHUNK = 512
"""Tokens whose logits are held."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of the gradient of all sequences."""

    batches: list[PackedBatch]
    flops: float
    seconds: float
    held_bytes: int
    """Most that a program holds besides parameters, gradient and batch."""
    gradient: list[np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["small", "smollm2"])
    parser.add_argument("--groups", type=int, default=2, help="played groups")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32", help="what is computed in")
    options = parser.parse_args()
    table = Table()
    for name in options.models:
        decoder, tokenizer = model(name, options.dtype)
        vocabulary = decoder.config.vocab_size
        played = record(tokenizer, groups=options.groups, turns=12)
        whole = [
            segment
            for group in played
            for trajectory in group.trajectories
            for segment in trajectory.segments
        ]
        cases = {
            ANSWERS: prompt_and_answers(vocabulary),
            "episodes": imitation(whole),
            "a sequence a turn": [one for each in imitation(whole[:GROUP]) for one in turns(each)],
        }
        for title, sequences in cases.items():
            report(table, f"{name}, {title}", decoder, sequences, options.repeats)
    table.print_json()


def report(
    table: Table, what: str, decoder: Decoder, sequences: list[TrainingSequence], repeats: int
) -> None:
    """Measures both ways and adds what they took and what was saved."""
    shared, alone = measure(decoder, sequences, repeats)
    for name, cost in (("shared", shared), ("alone", alone)):
        shapes = [batch.ids.shape for batch in cost.batches]
        computed = sum(rows * length for rows, length in shapes)
        tokens = sum(batch.tokens for batch in cost.batches)
        table.add(f"{what}, {name}: tokens", tokens)
        table.add(f"{what}, {name}: padding", 100 * (1 - tokens / computed), "%")
        table.add(f"{what}, {name}: FLOPs", cost.flops / 1e9, "GFLOP")
        table.add(f"{what}, {name}: gradient", cost.seconds, "s")
        table.add(f"{what}, {name}: held", cost.held_bytes / 2**20, "MiB")
    goal = "> 3" if ANSWERS in what else ""
    table.add(f"{what}: FLOPs saved", alone.flops / shared.flops, "times", goal)
    table.add(f"{what}: time saved", alone.seconds / shared.seconds, "times", goal)
    table.add(f"{what}: memory saved", alone.held_bytes / shared.held_bytes, "times")
    apart = max(
        float(np.linalg.norm(one - other) / np.linalg.norm(other))
        for one, other in zip(shared.gradient, alone.gradient, strict=True)
    )
    table.add(f"{what}: gradients differ by", apart, "", "< 1e-5 (float32)")


def measure(decoder: Decoder, sequences: list[TrainingSequence], repeats: int) -> tuple[Cost, Cost]:
    """With sharing and without, by turns, so that a slow minute of the machine is neither's."""
    ways = [prepared(decoder, sequences, share=share) for share in (True, False)]
    seconds: list[list[float]] = [[], []]
    gradients: list[Any] = [None, None]
    for _ in range(repeats + 1):  # the first isn't counted
        for number, (_, _, _, run) in enumerate(ways):
            start = time.perf_counter()
            gradients[number] = jax.block_until_ready(run())
            seconds[number].append(time.perf_counter() - start)
    shared, alone = (
        Cost(
            batches=batches,
            flops=flops,
            seconds=min(times[1:]),
            held_bytes=held,
            gradient=[np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(gradient)],
        )
        for (batches, flops, held, _), times, gradient in zip(ways, seconds, gradients, strict=True)
    )
    return shared, alone


def prepared(
    decoder: Decoder, sequences: list[TrainingSequence], *, share: bool
) -> tuple[list[PackedBatch], float, int, Callable[[], Any]]:
    """Micro-batches, FLOPs and bytes held by their programs, and what computes the whole gradient."""
    graph, state = nnx.split(decoder)
    batches = packed(sequences, share=share)
    gradient = jax.jit(functools.partial(add_gradient, graph, branched=share), donate_argnums=(1,))
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), state)
    programs: dict[tuple[int, ...], Any] = {}
    for batch in batches:
        if batch.ids.shape not in programs:
            programs[batch.ids.shape] = gradient.lower(state, empty, batch).compile()
    flops = sum(product_flops(decoder, batch) for batch in batches)
    held = max(programs[batch.ids.shape].memory_analysis().temp_size_in_bytes for batch in batches)

    def run() -> Any:
        total = jax.tree.map(jnp.zeros_like, empty)
        for batch in batches:
            total = programs[batch.ids.shape](state, total, jax.tree.map(jnp.asarray, batch))
        return total

    return batches, flops, held, run


def add_gradient(
    graph: nnx.GraphDef[Decoder], state: Any, total: Any, batch: PackedBatch, *, branched: bool
) -> Any:
    """Adds the gradient of the sum of weight * advantage * log-probability over targets."""

    def loss(state: Any) -> jax.Array:
        decoder = nnx.merge(graph, state)
        tied = decoder.config.tie_word_embeddings
        hidden = decoder.hidden(batch.ids, batch.positions, batch.ends, branched=branched)
        hidden = jnp.take_along_axis(hidden, batch.parent[:, :, None], axis=1)
        logprob = token_statistics(
            hidden.reshape(-1, hidden.shape[-1]),
            (decoder.embedding if tied else decoder.head)[...],
            batch.ids.reshape(-1),
            batch.wanted.reshape(-1),
            tied=tied,
            chunk=CHUNK,
        ).logprob
        target = jnp.take_along_axis(logprob.reshape(batch.ids.shape), batch.node, axis=1)
        return jnp.sum(target * batch.weight * batch.advantage * batch.mask)

    return jax.tree.map(
        lambda old, new: old + new.astype(jnp.float32), total, jax.grad(loss)(state)
    )


def product_flops(decoder: Decoder, batch: PackedBatch) -> float:
    """Of the matrix products of a gradient: forward, and twice that backward.

    Attention's scores are computed again on the way back, and so are the head's logits.
    """
    config = decoder.config
    linears = sum(rows * columns for rows, columns in linear_shapes(config).values())
    order = np.arange(batch.ids.shape[1])
    pairs = int(np.maximum(batch.ends - order, 0).sum())
    attention = 7 * pairs * config.num_attention_heads * config.head_dim
    head = 4 * int(batch.wanted.sum()) * config.hidden_size * config.vocab_size
    return 2.0 * (config.num_hidden_layers * (3 * linears * batch.ids.size + attention) + head)


def packed(sequences: list[TrainingSequence], *, share: bool) -> list[PackedBatch]:
    """Rows of few lengths; a row as long as it must be if one holds all."""
    whole = pack_rows([sequences], length=sum(map(len, sequences)), share=share)
    if whole.tokens <= LENGTHS[0]:
        length = max(-(-max(whole.tokens, whole.trained) // 8) * 8, 8)
        return [pack_rows([sequences], length=length, share=share)]
    smaller = [(1, length) for length in LENGTHS[1:]]
    packer = Packer(rows=1, length=LENGTHS[0], share=share, smaller=smaller)
    return [*packer.add(sequences), *packer.flush()]


def prompt_and_answers(vocabulary: int) -> list[TrainingSequence]:
    """One group: a prompt, and an answer of each member."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(vocabulary, size=PROMPT)
    answers = rng.integers(vocabulary, size=(GROUP, ANSWER))
    advantages = rng.normal(size=GROUP)
    mask = (np.arange(PROMPT + ANSWER) >= PROMPT).astype(np.float32)
    return [
        TrainingSequence(
            ids=np.concatenate([prompt, answer]).astype(np.int32),
            mask=mask,
            behaviour=np.zeros(len(mask), np.float32),
            advantage=np.full(len(mask), advantage, np.float32),
        )
        for answer, advantage in zip(answers, advantages, strict=True)
    ]


def turns(episode: TrainingSequence) -> list[TrainingSequence]:
    """A sequence for each turn: all that was said before it, and it alone is trained on."""
    edges = np.flatnonzero(np.diff(episode.mask, prepend=0, append=0))
    found: list[TrainingSequence] = []
    for start, stop in edges.reshape(-1, 2).tolist():
        mask = np.zeros(stop, np.float32)
        mask[start:] = 1
        found.append(
            TrainingSequence(
                ids=episode.ids[:stop],
                mask=mask,
                behaviour=episode.behaviour[:stop],
                advantage=episode.advantage[:stop],
            )
        )
    return found


def model(name: str, dtype: str) -> tuple[Decoder, Tokenizer]:
    """A small model with random weights, or one by its name."""
    if name != "small":
        loaded = load_model(name)
        return loaded.decoder(compute_dtype=dtype), loaded.tokenizer
    tokenizer = small_tokenizer(512)
    config = tiny_config(tokenizer.vocab_size, max_position_embeddings=4096)
    return random_decoder(config, seed=0, compute_dtype=jnp.dtype(dtype)), tokenizer


if __name__ == "__main__":
    main()
