"""Packing: nothing lost, nothing mixed, nothing predicted across a sequence's end."""

from __future__ import annotations

import numpy as np
import pytest

from gymllm.errors import ConfigError
from gymllm_trainers.packing import PackedBatch, Packer, TrainingSequence, pack_rows


def sequence(size: int, *, first: int = 1) -> TrainingSequence:
    """Ids that count up from `first`; every field is told from the others by its numbers."""
    ids = np.arange(first, first + size, dtype=np.int32)
    return TrainingSequence(
        ids=ids,
        mask=(ids % 2 == 0).astype(np.float32),
        behaviour=-ids.astype(np.float32) / 8,
        advantage=np.full(size, float(first), np.float32),
    )


def unpack(batches: list[PackedBatch]) -> list[list[int]]:
    """Every sequence's ids, sorted; checks everything else on the way."""
    found: list[list[int]] = []
    for batch in batches:
        for row in range(batch.ids.shape[0]):
            segments = batch.segments[row]
            assert (np.diff(segments[segments > 0]) >= 0).all()
            for number in range(1, segments.max(initial=0) + 1):
                at = np.flatnonzero(segments == number)
                assert (np.diff(at) == 1).all(), "a sequence lies in one piece"
                ids = batch.ids[row, at]
                expected = sequence(len(ids), first=int(ids[0]))
                np.testing.assert_array_equal(batch.positions[row, at], np.arange(len(ids)))
                for field in ("mask", "behaviour", "advantage"):
                    shifted = getattr(batch, field)[row, at]
                    np.testing.assert_array_equal(shifted[:-1], getattr(expected, field)[1:])
                    assert shifted[-1] == 0, "nothing is predicted from a last token"
                np.testing.assert_array_equal(batch.target[row, at[:-1]], ids[1:])
                found.append(ids.tolist())
            padding = segments == 0
            for field in batch:
                assert not field[row, padding].any()
    return sorted(found)


def test_two_sequences_in_a_row_by_hand() -> None:
    batch = pack_rows([[sequence(3, first=1), sequence(2, first=6)], []], length=6)
    np.testing.assert_array_equal(batch.ids[0], [1, 2, 3, 6, 7, 0])
    np.testing.assert_array_equal(batch.positions[0], [0, 1, 2, 0, 1, 0])
    np.testing.assert_array_equal(batch.segments[0], [1, 1, 1, 2, 2, 0])
    np.testing.assert_array_equal(batch.target[0], [2, 3, 0, 7, 0, 0])
    np.testing.assert_array_equal(batch.mask[0], [1, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(batch.advantage[0], [1, 1, 0, 6, 0, 0])
    assert (batch.tokens, batch.trained) == (5, 1)
    assert not batch.segments[1].any()


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost_or_mixed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    packer = Packer(rows=int(rng.integers(1, 5)), length=20)
    given: list[list[int]] = []
    batches: list[PackedBatch] = []
    first = 1
    for _ in range(6):
        sequences: list[TrainingSequence] = []
        for size in rng.integers(2, 21, size=int(rng.integers(0, 8))).tolist():
            sequences.append(sequence(size, first=first))
            first += size
        given += [one.ids.tolist() for one in sequences]
        batches += packer.add(sequences)
    batches += packer.flush()
    assert unpack(batches) == sorted(given)
    assert list(packer.flush()) == []
    assert {batch.ids.shape for batch in batches} == {batches[0].ids.shape}


def test_a_full_micro_batch_is_given_out_at_once() -> None:
    packer = Packer(rows=2, length=10)
    assert list(packer.add([sequence(10), sequence(6)])) == []
    (batch,) = packer.add([sequence(5)])
    assert batch.tokens == 16
    assert [b.tokens for b in packer.flush()] == [5]


def test_short_ones_fill_the_gaps() -> None:
    packer = Packer(rows=2, length=10)
    assert list(packer.add([sequence(3), sequence(7), sequence(4), sequence(6)])) == []
    (batch,) = packer.flush()
    assert batch.tokens == 20


def test_too_long_a_sequence_names_the_setting() -> None:
    packer = Packer(rows=1, length=10)
    with pytest.raises(ConfigError, match=r"11 tokens .* row of 10: set learner.row_tokens"):
        list(packer.add([sequence(11)]))


@pytest.mark.parametrize(("rows", "length"), [(0, 8), (1, 1)])
def test_sizes_out_of_range_are_refused(rows: int, length: int) -> None:
    with pytest.raises(ConfigError, match=f"got {rows} x {length}"):
        Packer(rows=rows, length=length)
