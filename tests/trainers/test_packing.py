"""Packing: nothing lost, nothing mixed, little padding, and shared beginnings there once."""

from __future__ import annotations

import numpy as np
import pytest

from gymllm.errors import ConfigError
from gymllm_trainers.packing import (
    PackedBatch,
    Packer,
    TrainingSequence,
    balance,
    pack_rows,
    smaller_shapes,
)


def sequence(size: int, *, first: int = 1, prompt: int = 0) -> TrainingSequence:
    """`prompt` tokens that are the same everywhere, then ids that count up from `first`; the last is
    trained on, and others. Every field is told from the others by its numbers."""
    ids = np.arange(first - prompt, first - prompt + size, dtype=np.int32)
    ids[:prompt] = 100_000 + np.arange(prompt)
    mask = (ids % 3 == 0).astype(np.float32)
    mask[0], mask[-1] = 0, 1
    return TrainingSequence(
        ids=ids,
        mask=mask,
        behaviour=-ids.astype(np.float32) / 8,
        advantage=np.full(size, float(first), np.float32),
        weight=ids / np.float32(4),
        age=np.full(size, float(size), np.float32),
    )


def spelled(one: TrainingSequence) -> list[tuple[float, ...]]:
    """What a sequence consists of: each token with what is asked of it."""
    rows = zip(one.ids, one.mask, one.behaviour, one.advantage, one.weight, one.age, strict=True)
    return [tuple(map(float, row)) if row[1] else (float(row[0]), *[0.0] * 5) for row in rows]


def unpack(batches: list[PackedBatch]) -> list[list[tuple[float, ...]]]:
    """Every sequence as `spelled` has it, sorted; checks on the way that padding is 0."""
    found: list[list[tuple[float, ...]]] = []
    for batch in batches:
        for row in range(batch.ids.shape[0]):
            one = PackedBatch._make(field[row] for field in batch)
            targets = int(one.mask.sum())
            assert not any(field[targets:].any() for field in one[5:]), "targets come first"
            for number in range(one.sequence.max() + 1 if targets else 0):
                at = np.flatnonzero((one.sequence == number) & (one.mask == 1))
                path = [int(one.node[at[-1]])]
                while one.positions[path[0]]:
                    path.insert(0, int(one.parent[path[0]]))
                whole = {node: (float(one.ids[node]), *[0.0] * 5) for node in path}
                for target in at:
                    node = int(one.node[target])
                    fields = (one.mask, one.behaviour, one.advantage, one.weight, one.age)
                    whole[node] = (float(one.ids[node]), *(float(f[target]) for f in fields))
                    assert one.wanted[node] == 1
                found.append([whole[node] for node in path])
            padding = one.ends == 0
            assert not any(field[padding].any() for field in one[:5])
            assert not one.ids[len(one.ids) - int(padding.sum()) :].any(), "padding comes last"
    return sorted(found)


def test_two_sequences_in_a_row_by_hand() -> None:
    batch = pack_rows([[sequence(3, first=1), sequence(2, first=6)], []], length=6)
    np.testing.assert_array_equal(batch.ids[0], [1, 2, 3, 6, 7, 0])
    np.testing.assert_array_equal(batch.positions[0], [0, 1, 2, 0, 1, 0])
    np.testing.assert_array_equal(batch.ends[0], [3, 3, 3, 5, 5, 0])
    np.testing.assert_array_equal(batch.parent[0], [0, 0, 1, 3, 3, 0])
    np.testing.assert_array_equal(batch.wanted[0], [0, 0, 1, 0, 1, 0])
    np.testing.assert_array_equal(batch.node[0], [2, 4, 0, 0, 0, 0])
    np.testing.assert_array_equal(batch.mask[0], [1, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(batch.advantage[0], [1, 6, 0, 0, 0, 0])
    np.testing.assert_array_equal(batch.sequence[0], [0, 1, 0, 0, 0, 0])
    assert (batch.tokens, batch.trained, batch.unshared) == (5, 2, 5)
    assert (batch.padding_share, batch.shared_share) == (pytest.approx(7 / 12), 0)
    assert not batch.ends[1].any()


def test_shares_by_hand() -> None:
    """Two sequences of 5 and 4 tokens that share 3, in a row of 8."""
    rows = [[sequence(5, first=10, prompt=3), sequence(4, first=20, prompt=3)]]
    batch = pack_rows(rows, length=8)
    assert (batch.tokens, batch.unshared) == (6, 9)
    assert (batch.padding_share, batch.shared_share) == (pytest.approx(2 / 8), pytest.approx(1 / 3))
    apart = pack_rows(rows, length=9, share=False)
    assert (apart.tokens, apart.unshared, apart.shared_share) == (9, 9, 0)


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_lost_or_mixed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, parts = int(rng.integers(1, 5)), 1
    if seed % 2:
        rows, parts = 4, 2
    shapes = smaller_shapes(rows, 20, row_multiple=parts)
    packer = Packer(rows=rows, length=20, share=seed != 0, smaller=shapes, parts=parts)
    given: list[TrainingSequence] = []
    batches: list[PackedBatch] = []
    first = 1
    for _ in range(6):
        sequences: list[TrainingSequence] = []
        prompt = int(rng.integers(0, 9))
        for size in rng.integers(2, 21, size=int(rng.integers(0, 8))).tolist():
            sequences.append(sequence(size, first=first, prompt=min(prompt, size - 1)))
            first += size
        # One twice, as when two members say the same.
        given += sequences + sequences[:1]
        batches += packer.add(sequences + sequences[:1])
    batches += packer.flush()
    assert unpack(batches) == sorted(map(spelled, given))
    assert list(packer.flush()) == []
    assert {batch.ids.shape for batch in batches} <= set(packer.shapes)
    if seed == 0:
        assert all(batch.shared_share == 0 for batch in batches)


def test_a_full_micro_batch_is_given_out_at_once() -> None:
    packer = Packer(rows=2, length=10)
    assert list(packer.add([sequence(10), sequence(10, first=20)])) == []
    (batch,) = packer.add([sequence(5, first=40)])
    assert batch.tokens == 20
    assert [b.tokens for b in packer.flush()] == [5]


def test_one_that_is_not_full_waits_until_two_do() -> None:
    sequences = [sequence(size, first=20 * i) for i, size in enumerate((6, 7, 8, 9, 7), 1)]
    packer = Packer(rows=2, length=10)
    assert list(packer.add(sequences[:4])) == []
    (batch,) = packer.add(sequences[4:])
    assert batch.tokens == 6 + 7
    packer = Packer(rows=2, length=10)
    assert list(packer.add(sequences[:4])) == []
    (batch,) = packer.add([sequence(4, first=200), sequence(3, first=300)])
    assert batch.tokens == 20, "these fill the rows of 6 and 7"


def test_short_ones_fill_the_gaps() -> None:
    packer = Packer(rows=2, length=10)
    sizes = (3, 7, 4, 6)
    sequences = [sequence(size, first=20 * number) for number, size in enumerate(sizes, 1)]
    assert list(packer.add(sequences)) == []
    (batch,) = packer.flush()
    assert batch.tokens == 20


def test_a_group_that_shares_more_fits_in_a_row() -> None:
    """Each has 8 tokens of its own; 2 x 60 tokens would not fit in a row of 80 without sharing."""
    group = [sequence(60, first=100 * member, prompt=52) for member in range(1, 4)]
    packer = Packer(rows=1, length=80)
    assert list(packer.add(group)) == []
    (batch,) = packer.flush()
    assert (batch.tokens, batch.unshared) == (52 + 3 * 8, 180)


def test_targets_of_a_row_are_no_more_than_its_tokens() -> None:
    """Members that say the same are one sequence, but each has its own targets."""
    same = [sequence(9, first=1) for _ in range(5)]
    assert same[0].mask.sum() == 3
    packer = Packer(rows=1, length=10)
    batches = [*packer.add(same), *packer.flush()]
    assert [batch.trained for batch in batches] == [9, 6]
    assert [batch.tokens for batch in batches] == [9, 9]


def test_the_last_micro_batch_takes_the_smallest_shape_that_holds_it() -> None:
    packer = Packer(rows=2, length=16, smaller=[(1, 8), (1, 16)])
    assert packer.shapes == [(2, 16), (1, 16), (1, 8)]
    for sizes, shape in (((8,), (1, 8)), ((9,), (1, 16)), ((8, 8), (1, 16)), ((10, 10), (2, 16))):
        assert (
            list(packer.add(sequence(size, first=50 * i) for i, size in enumerate(sizes, 1))) == []
        )
        assert [batch.ids.shape for batch in packer.flush()] == [shape]


def test_what_is_left_may_take_several_shapes() -> None:
    """13 rows of 16 tokens are 8, 4 and 1."""
    packer = Packer(rows=16, length=16, smaller=smaller_shapes(16, 16, count=4))
    assert list(packer.add(sequence(16, first=50 * i) for i in range(1, 14))) == []
    assert [batch.ids.shape[0] for batch in packer.flush()] == [8, 4, 1]


def test_smaller_shapes_halve_rows_first() -> None:
    assert smaller_shapes(4, 64) == [(2, 64), (1, 64)]
    assert smaller_shapes(2, 64) == [(1, 64), (1, 32)]
    assert smaller_shapes(4, 64, row_multiple=4, count=3) == [(4, 32), (4, 16), (4, 8)]


def test_realistic_groups_leave_little_padding() -> None:
    """Groups of 8 with a common prompt; the last micro-batch is not full and is not counted."""
    rng = np.random.default_rng(0)
    packer = Packer(rows=4, length=2048)
    batches: list[PackedBatch] = []
    for _ in range(12):
        prompt = rng.integers(0, 1000, size=150)
        members = [
            np.append(prompt, rng.integers(0, 1000, size=n)) for n in rng.integers(20, 500, 8)
        ]
        sequences = [
            TrainingSequence(
                ids=ids.astype(np.int32),
                mask=(np.arange(len(ids)) >= 150).astype(np.float32),
                behaviour=ids * 0.5,
                advantage=ids * 1.0,
            )
            for ids in members
        ]
        batches += packer.add(sequences)
    assert len(batches) > 2
    assert np.mean([batch.padding_share for batch in batches]) < 0.05
    assert np.mean([batch.shared_share for batch in batches]) > 0.2


def test_balance_by_hand() -> None:
    # 9 + 2 and 7 + 3 instead of 9 + 7 and 3 + 2.
    assert balance(np.array([9.0, 7.0, 3.0, 2.0]), 2) == [0, 3, 1, 2]
    assert balance(np.array([1.0, 5.0, 3.0]), 1) == [1, 2, 0]


def test_rows_are_balanced_over_parts() -> None:
    """Two full rows and two nearly empty ones, as the packer would leave them at the end."""
    packer = Packer(rows=4, length=32, parts=2)
    sizes = (32, 31, 18, 17)
    list(packer.add(sequence(size, first=100 * i) for i, size in enumerate(sizes, 1)))
    (batch,) = packer.flush()
    tokens = (batch.ends > 0).sum(1)
    assert sorted([int(tokens[:2].sum()), int(tokens[2:].sum())]) == [49, 49]


def test_too_long_a_sequence_names_the_setting() -> None:
    packer = Packer(rows=1, length=10)
    with pytest.raises(ConfigError, match=r"11 tokens .* row of 10: set learner.row_tokens"):
        list(packer.add([sequence(11)]))
    with pytest.raises(ConfigError, match=r"1 sequences of 11 tokens .* row of 10"):
        pack_rows([[sequence(11)]], length=10)


@pytest.mark.parametrize(("rows", "length"), [(0, 8), (1, 1)])
def test_sizes_out_of_range_are_refused(rows: int, length: int) -> None:
    with pytest.raises(ConfigError, match=f"got {rows} x {length}"):
        Packer(rows=rows, length=length)


def test_rows_that_parts_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"multiple of the 2 parts .* got 3"):
        Packer(rows=3, length=8, parts=2)
