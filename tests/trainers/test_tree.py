"""Trees of sequences, against parents followed one by one."""

from __future__ import annotations

import numpy as np
import pytest

from gymllm_trainers.tree import Leaf, TrainingSequence, Trees, grow, leaf, shared


def sequence(ids: list[int], trained: list[int] | None = None) -> TrainingSequence:
    """Fields that can be told from each other; all tokens but the first are trained on, if not told
    otherwise."""
    rng = np.random.default_rng(len(ids))
    mask = np.zeros(len(ids), np.float32)
    mask[list(range(1, len(ids))) if trained is None else trained] = 1
    behaviour, advantage, weight, age = rng.normal(size=(4, len(ids))).astype(np.float32)
    return TrainingSequence(
        ids=np.array(ids, np.int32),
        mask=mask,
        behaviour=behaviour,
        advantage=advantage,
        weight=weight,
        age=age,
    )


def leaves(sequences: list[TrainingSequence]) -> list[Leaf]:
    found = [leaf(each) for each in sequences]
    assert all(each is not None for each in found)
    return [each for each in found if each is not None]


def ancestors(trees: Trees, node: int) -> list[int]:
    """From the root to the node itself."""
    path = [node]
    while trees.parent[path[0]] != path[0]:
        path.insert(0, int(trees.parent[path[0]]))
    return path


def check(trees: Trees, sequences: list[TrainingSequence], *, nodes: int) -> None:
    """Every target of every sequence is there, on a path that spells the sequence; nothing else is."""
    assert len(trees.ids) == nodes
    paths = [ancestors(trees, node) for node in range(nodes)]
    for node, path in enumerate(paths):
        assert trees.positions[node] == len(path) - 1
        inside = [a for a in range(nodes) if a <= node < trees.ends[a]]
        assert inside == path, "an interval holds the node's descendants and no others"
    wanted = np.zeros(nodes)
    for number, each in enumerate(sequences):
        at = trees.sequence == number
        trained = np.flatnonzero(each.mask)
        assert len(trained) == at.sum()
        for node, index in zip(trees.node[at], trained, strict=True):
            np.testing.assert_array_equal(trees.ids[paths[node]], each.ids[: index + 1])
            wanted[node] = 1
        for name in ("behaviour", "advantage", "weight", "age"):
            values = np.broadcast_to(getattr(each, name), len(each))
            np.testing.assert_array_equal(getattr(trees, name)[at], values[trained])
    np.testing.assert_array_equal(trees.wanted, wanted)
    dtypes = {name: values.dtype for name, values in trees._asdict().items()}
    floats = {"wanted", "behaviour", "advantage", "weight", "age"}
    assert {name for name, dtype in dtypes.items() if dtype == np.float32} == floats
    assert {name for name, dtype in dtypes.items() if dtype == np.int32} == set(dtypes) - floats


def test_a_tree_by_hand() -> None:
    sequences = [
        sequence([1, 2, 4, 5]),
        sequence([1, 2, 3], [2]),
        sequence([1, 2]),
        sequence([9, 8]),
    ]
    trees = grow(leaves(sequences))
    np.testing.assert_array_equal(trees.ids, [1, 2, 3, 4, 5, 9, 8])
    np.testing.assert_array_equal(trees.positions, [0, 1, 2, 2, 3, 0, 1])
    np.testing.assert_array_equal(trees.ends, [5, 5, 3, 5, 5, 7, 7])
    np.testing.assert_array_equal(trees.parent, [0, 0, 1, 1, 3, 5, 5])
    np.testing.assert_array_equal(trees.wanted, [0, 1, 1, 1, 1, 0, 1])
    np.testing.assert_array_equal(trees.node, [1, 3, 4, 2, 1, 6])
    np.testing.assert_array_equal(trees.sequence, [0, 0, 0, 1, 2, 3])
    check(trees, sequences, nodes=7)


@pytest.mark.parametrize("seed", range(5))
def test_random_sequences_that_share_much(seed: int) -> None:
    """Few different ids: prefixes of each other, equal ones and some that share nothing are among them."""
    rng = np.random.default_rng(seed)
    sequences = [
        sequence(rng.integers(0, 3, size=rng.integers(2, 9)).tolist())
        for _ in range(rng.integers(20))
    ]
    prefixes = {tuple(s.ids[:size].tolist()) for s in sequences for size in range(1, len(s) + 1)}
    check(grow(leaves(sequences)), sequences, nodes=len(prefixes))
    alone = grow(leaves(sequences), share=False)
    check(alone, sequences, nodes=sum(map(len, sequences)))


def test_what_follows_the_last_trained_token_is_left_out() -> None:
    sequences = [sequence([1, 2, 3, 4, 5], [1, 3]), sequence([1, 2, 3, 7], [2])]
    check(grow(leaves(sequences)), sequences, nodes=4)


def test_a_sequence_without_a_trained_token_has_no_leaf() -> None:
    assert leaf(sequence([1, 2, 3], [])) is None
    assert leaf(sequence([1, 2, 3], [0])) is None, "nothing predicts the first token"


def test_large_ids_are_ordered_as_numbers() -> None:
    sequences = [sequence([1, 70_000]), sequence([1, 255, 3]), sequence([1, 256])]
    np.testing.assert_array_equal(grow(leaves(sequences)).ids, [1, 255, 3, 256, 70_000])


def test_numbers_instead_of_arrays() -> None:
    ids = np.array([1, 2, 3], np.int32)
    one = TrainingSequence(
        ids=ids, mask=np.ones(3, np.float32), behaviour=ids * 0.5, advantage=ids * 1.0, weight=0.25
    )
    trees = grow(leaves([one]))
    np.testing.assert_array_equal(trees.weight, [0.25, 0.25])
    np.testing.assert_array_equal(trees.age, [0, 0])


def test_shared_by_hand() -> None:
    one, two, three = leaves([sequence([1, 2, 3]), sequence([1, 2]), sequence([4, 2, 3])])
    assert [shared(one, two), shared(two, one), shared(one, one), shared(one, three)] == [
        2,
        2,
        3,
        0,
    ]
