"""Sequences of any length into rows of one length: no sequence is padded to a maximum.

Axes: B rows, T tokens of a row. Target-side arrays are shifted here, once: position j holds what is
predicted *from* token j, so the loss never looks across a row's end or from one sequence into another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gymllm.errors import ConfigError


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingSequence:
    """One segment, ready to be trained on. All arrays have shape [N], N >= 2."""

    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.float32]
    """1 where the token is trained on. The first token can't be: nothing predicts it."""
    behaviour: npt.NDArray[np.float32]
    """The engine's log-probability (nats)."""
    advantage: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.ids)


class PackedBatch(NamedTuple):
    """Rows of packed sequences; all arrays have shape [B, T]."""

    ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    """Position in the token's own sequence."""
    segments: npt.NDArray[np.int32]
    """From 1 in each row; 0 is padding."""
    target: npt.NDArray[np.int32]
    """The token that follows in the same sequence."""
    mask: npt.NDArray[np.float32]
    """1 where the target is trained on."""
    behaviour: npt.NDArray[np.float32]
    advantage: npt.NDArray[np.float32]

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.segments > 0).sum())

    @property
    def trained(self) -> int:
        """Tokens that are trained on."""
        return int(self.mask.sum())


class Packer:
    """Collects sequences as they come; gives a micro-batch when one is full.

    Everything that waits is packed anew with each arrival (first fit, longest first); when that takes more
    rows than a micro-batch has, the fullest rows are given out and the rest waits. What is computed never
    depends on the packing, only the padding does.
    """

    def __init__(self, *, rows: int, length: int) -> None:
        if rows < 1 or length < 2:
            raise ConfigError(
                f"a micro-batch needs rows >= 1 and length >= 2, got {rows} x {length}."
            )
        self._rows, self._length = rows, length
        self._waiting: list[TrainingSequence] = []

    def add(self, sequences: Iterable[TrainingSequence]) -> Iterator[PackedBatch]:
        """Takes sequences; yields every micro-batch that this fills.

        Raises:
            ConfigError: A sequence is longer than a row.
        """
        for sequence in sequences:
            if len(sequence) > self._length:
                raise ConfigError(
                    f"a sequence of {len(sequence)} tokens does not fit in a row of {self._length}: set "
                    f"learner.row_tokens >= engine.context_length."
                )
            self._waiting.append(sequence)
        while len(bins := self._bins()) > self._rows:
            yield self._take(bins)

    def flush(self) -> Iterator[PackedBatch]:
        """Yields what is left, if anything is."""
        if self._waiting:
            yield self._take(self._bins())

    def _bins(self) -> list[list[TrainingSequence]]:
        """What waits, in as few rows as first fit finds; the fullest first."""
        bins: list[list[TrainingSequence]] = []
        room: list[int] = []
        for sequence in sorted(self._waiting, key=len, reverse=True):
            fit = next((row for row, left in enumerate(room) if left >= len(sequence)), None)
            if fit is None:
                fit = len(bins)
                bins.append([])
                room.append(self._length)
            bins[fit].append(sequence)
            room[fit] -= len(sequence)
        return [bins[row] for row in sorted(range(len(bins)), key=lambda row: room[row])]

    def _take(self, bins: list[list[TrainingSequence]]) -> PackedBatch:
        rows, rest = bins[: self._rows], bins[self._rows :]
        self._waiting = [sequence for row in rest for sequence in row]
        empty: list[list[TrainingSequence]] = [[] for _ in range(self._rows - len(rows))]
        return pack_rows(rows + empty, length=self._length)


def pack_rows(rows: list[list[TrainingSequence]], *, length: int) -> PackedBatch:
    """Lays each list of sequences side by side in one row of `length` tokens."""
    shape = (len(rows), length)
    batch = PackedBatch(
        ids=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        segments=np.zeros(shape, np.int32),
        target=np.zeros(shape, np.int32),
        mask=np.zeros(shape, np.float32),
        behaviour=np.zeros(shape, np.float32),
        advantage=np.zeros(shape, np.float32),
    )
    for row, sequences in enumerate(rows):
        start = 0
        for number, sequence in enumerate(sequences, 1):
            size = len(sequence)
            here, before = np.s_[row, start : start + size], np.s_[row, start : start + size - 1]
            batch.ids[here] = sequence.ids
            batch.positions[here] = np.arange(size)
            batch.segments[here] = number
            batch.target[before] = sequence.ids[1:]
            batch.mask[before] = sequence.mask[1:]
            batch.behaviour[before] = sequence.behaviour[1:]
            batch.advantage[before] = sequence.advantage[1:]
            start += size
    return batch
