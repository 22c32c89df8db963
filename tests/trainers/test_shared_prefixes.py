"""A decoder's gradients over shared trees are those of each sequence on its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gymllm_trainers.models import Decoder
from gymllm_trainers.packing import PackedBatch, Packer, TrainingSequence

LENGTH = 64
MakeDecoder = Callable[..., Decoder]
Gradient = list[np.ndarray]


def sequence(rng: np.random.Generator, *parts: list[int]) -> TrainingSequence:
    """Parts in turn untrained and trained, as a conversation is."""
    ids = np.array([token for part in parts for token in part], np.int32)
    mask = np.concatenate([np.full(len(part), turn % 2) for turn, part in enumerate(parts)])
    return TrainingSequence(
        ids=ids,
        mask=mask.astype(np.float32),
        behaviour=np.zeros(len(ids), np.float32),
        advantage=rng.normal(size=len(ids)).astype(np.float32),
        weight=rng.random(len(ids)).astype(np.float32),
    )


@functools.cache
def groups() -> dict[str, list[TrainingSequence]]:
    rng = np.random.default_rng(0)

    def words(count: int) -> list[int]:
        return rng.integers(64, size=count).tolist()

    prompt = words(9)
    answers = [words(size) for size in (5, 7, 3, 6)]
    members = [sequence(rng, prompt, answer) for answer in answers]
    turns = []
    for first in answers[:2]:
        answered, other = words(3), words(2)
        # A second segment goes on from the first turn with another observation; a third from the prompt.
        turns += [
            sequence(rng, prompt, first, answered, words(4)),
            sequence(rng, [*prompt, *first, *other], words(5)),
            sequence(rng, prompt, words(4)),
        ]
    one = sequence(rng, prompt, answers[1], words(2), words(5))
    return {
        "a common prompt": members,
        "segments that begin alike": turns,
        "members that say the same": [
            sequence(rng, prompt, answers[0]),
            sequence(rng, prompt, answers[0]),
            members[2],
            sequence(rng, prompt, answers[0]),
        ],
        "a member that is the beginning of another": [
            one,
            sequence(rng, prompt, answers[1]),
            sequence(rng, prompt, answers[1][:3]),
        ],
        "more than a row holds": [sequence(rng, prompt, words(25)) for _ in range(5)],
    }


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.grad, argnums=1)
def of_batch(graph: Any, state: nnx.State, batch: PackedBatch) -> jax.Array:
    """Gradient of the sum over targets of weight * advantage * log-probability."""
    model = nnx.merge(graph, state)
    hidden = model.hidden(batch.ids, batch.positions, batch.ends)
    before = jnp.take_along_axis(hidden, batch.parent[:, :, None], axis=1)
    every = jax.nn.log_softmax(model.logits(before))
    logprob = jnp.take_along_axis(every, batch.ids[:, :, None], axis=2)[:, :, 0]
    target = jnp.take_along_axis(logprob * batch.wanted, batch.node, axis=1)
    return jnp.sum(target * batch.weight * batch.advantage * batch.mask)


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.grad, argnums=1)
def of_one(
    graph: Any, state: nnx.State, ids: jax.Array, ends: jax.Array, factor: jax.Array
) -> jax.Array:
    """The same of one sequence in a row of its own."""
    model = nnx.merge(graph, state)
    hidden = model.hidden(ids[None], jnp.arange(LENGTH)[None], ends[None])
    every = jax.nn.log_softmax(model.logits(hidden[0, :-1]))
    return jnp.sum(every[jnp.arange(LENGTH - 1), ids[1:]] * factor[1:])


def gradients(decoder: Decoder, batches: list[PackedBatch]) -> Gradient:
    graph, state = nnx.split(decoder)
    return added(of_batch(graph, state, jax.tree.map(jnp.asarray, batch)) for batch in batches)


def gradients_alone(decoder: Decoder, sequences: list[TrainingSequence]) -> Gradient:
    """From each sequence on its own, by nothing that packing has made."""
    graph, state = nnx.split(decoder)

    def padded(values: np.ndarray) -> np.ndarray:
        return np.pad(values, (0, LENGTH - len(values)))

    return added(
        of_one(
            graph,
            state,
            padded(one.ids),
            padded(np.full(len(one), len(one), np.int32)),
            padded(one.mask * one.weight * one.advantage),
        )
        for one in sequences
    )


def added(parts: Any) -> Gradient:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(functools.reduce(add, parts))]


def add(left: Any, right: Any) -> Any:
    return jax.tree.map(jnp.add, left, right)


def packed(sequences: list[TrainingSequence], *, share: bool) -> list[PackedBatch]:
    packer = Packer(rows=2, length=LENGTH, share=share)
    return [*packer.add(sequences), *packer.flush()]


@pytest.mark.parametrize(
    "changes",
    [{}, {"sliding_window": 6, "sliding_layers": (True, False), "attention_softcap": 2.0}],
    ids=["all tokens", "a window and a soft cap"],
)
def test_gradients_over_shared_trees_are_the_unshared_ones(
    make_decoder: MakeDecoder, changes: dict[str, Any]
) -> None:
    decoder = make_decoder(0, **changes)
    for name, sequences in groups().items():
        expected = gradients_alone(decoder, sequences)
        for share in (True, False):
            batches = packed(sequences, share=share)
            saved = 1 - sum(b.tokens for b in batches) / sum(b.unshared for b in batches)
            assert saved > 0.1 if share else saved == 0
            for found, other in zip(gradients(decoder, batches), expected, strict=True):
                error = np.linalg.norm(found - other) / np.linalg.norm(other)
                assert error < 1e-5, (name, share, error)
                np.testing.assert_allclose(found, other, atol=1e-5 * np.abs(other).max())


def test_a_tree_is_cut_where_a_row_ends() -> None:
    """What the gradients above are of: the largest group lies in several rows, each with the prompt."""
    batches = packed(groups()["more than a row holds"], share=True)
    tokens = [int((row > 0).sum()) for batch in batches for row in batch.ends]
    assert sorted(tokens) == [0, 34, 59, 59]
    prompts = {tuple(row[:9]) for batch in batches for row in batch.ids if row.any()}
    assert len(prompts) == 1
