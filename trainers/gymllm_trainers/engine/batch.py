"""A step as the device gets it: one array of int32, and its layout.

Axes: R decode rows, Q prefill blocks of C tokens, F = R + Q, T = R + Q * C tokens, M pages of a row's table,
S slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array

from gymllm_trainers.engine.config import EngineConfig
from gymllm_trainers.engine.requests import Request, Step


class StepArrays(NamedTuple):
    """What a forward program works on; all int32, on the device."""

    token_T: Array
    source_R: Array
    """Where a decode row's token is in the step before; -1 if `token_T` has it."""
    table_FM: Array
    start_F: Array
    """Position of each row's first token."""
    count_F: Array
    """Tokens of each row that are valid; 0 for padding."""
    active_E: Array
    """[T + 1]: how many of the T tokens are valid, then their indices."""
    pick_S: Array
    """Which of the T tokens' hidden states are wanted."""


@dataclass(frozen=True)
class StepLayout:
    """Where each part of a step's array is, for one compiled shape."""

    rows: int
    blocks: int
    block: int
    table: int
    slots: int

    @classmethod
    def of(cls, config: EngineConfig, rows: int, blocks: int) -> StepLayout:
        """The layout of one of `config.shapes`."""
        return cls(rows, blocks, config.page_size, config.table_pages, config.slots)

    @property
    def tokens(self) -> int:
        """T."""
        return self.rows + self.blocks * self.block

    @cached_property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        lanes = self.rows + self.blocks
        return (
            (self.tokens,),
            (self.rows,),
            (lanes, self.table),
            (lanes,),
            (lanes,),
            (self.tokens + 1,),
            (self.slots,),
        )

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        """Where each part begins, and where the last ends."""
        return (0, *accumulate(prod(shape) for shape in self._shapes))

    @property
    def size(self) -> int:
        """Numbers in all."""
        return self._bounds[-1]

    def views(self, packed: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int32]]:
        """The parts of a host array, in the order of `StepArrays`; writing to them writes to it."""
        return [
            packed[start:end].reshape(shape)
            for (start, end), shape in zip(pairwise(self._bounds), self._shapes, strict=True)
        ]

    def unpack(self, packed: Array) -> StepArrays:
        """The same on the device."""
        return StepArrays(
            *(
                packed[start:end].reshape(shape)
                for (start, end), shape in zip(pairwise(self._bounds), self._shapes, strict=True)
            )
        )

    def following(self, packed: Array) -> Array:
        """The next step's array, where it goes on with what this one samples; there are no blocks."""
        step = self.unpack(packed)
        step = step._replace(
            source_R=jnp.arange(self.rows, dtype=jnp.int32), start_F=step.start_F + step.count_F
        )
        return jnp.concatenate([part.reshape(-1) for part in step])

    def positions(self, step: StepArrays) -> Array:
        """Position of each token, [T]."""
        inner_QC = step.start_F[self.rows :, None] + jnp.arange(self.block)
        return jnp.concatenate([step.start_F[: self.rows], inner_QC.reshape(-1)])

    def write_slots(self, step: StepArrays) -> Array:
        """Where each token's key and value go: page * page size + offset, [T]; padding goes to page 0."""
        position_T = self.positions(step)
        lane_T = np.concatenate(
            [np.arange(self.rows), self.rows + np.repeat(np.arange(self.blocks), self.block)]
        )
        offset_T = np.concatenate(
            [np.zeros(self.rows, int), np.tile(np.arange(self.block), self.blocks)]
        )
        page_T = step.table_FM.at[lane_T, position_T // self.block].get(mode="clip")
        valid_T = jnp.asarray(offset_T) < step.count_F[lane_T]
        return jnp.where(valid_T, page_T * self.block + position_T % self.block, 0)


def pack_step(
    step: Step, layout: StepLayout, sources: dict[int, int]
) -> tuple[npt.NDArray[np.int32], list[int]]:
    """Fills a step's array.

    Args:
        step: What the scheduler wants.
        layout: Of the step's shape.
        sources: Where each sample of the step before is among its results.

    Returns:
        The array, and the scheduler's numbers of the samples, in the order of the results.
    """
    packed = np.zeros(layout.size, np.int32)
    token, source, table, start, count, active, pick = layout.views(packed)
    rows = step.decode
    used = len(rows)
    # A few assignments of lists, not a few for each row: of 64 rows these take most of the host's time.
    token[:used] = [row.token for row in rows]
    source.fill(-1)
    source[:used] = [-1 if row.source < 0 else sources[row.source] for row in rows]
    start[:used] = [row.position for row in rows]
    count[:used] = 1
    for index, row in enumerate(rows):
        table[index] = _table_row(row.request, layout.table)
    indices, samples, picked = list(range(used)), list(range(used)), list(range(used))
    for number, block in enumerate(step.prefill):
        index, size = layout.rows + number, len(block.tokens)
        first = layout.rows + number * layout.block
        table[index] = _table_row(block.request, layout.table)
        start[index] = block.start
        count[index] = size
        token[first : first + size] = block.tokens
        indices.extend(range(first, first + size))
        if block.samples:
            samples.append(index)
            picked.append(first + size - 1)
    active[0] = len(indices)
    active[1 : 1 + len(indices)] = indices
    pick[: len(picked)] = picked
    return packed, samples


@dataclass(slots=True)
class _TableRow:
    """A request's page table as the device gets it, kept with the request."""

    pages: list[int]
    """What it is of."""
    count: int
    """How many of them are in it."""
    row_M: npt.NDArray[np.int32]


def _table_row(request: Request, width: int) -> npt.NDArray[np.int32]:
    """A request's page table, [M]. Most steps change nothing in it, and many pages take long to convert."""
    pages, kept = request.pages, request.tag
    if not isinstance(kept, _TableRow) or kept.pages is not pages:
        kept = request.tag = _TableRow(pages, 0, np.zeros(width, np.int32))
    if kept.count < len(pages):
        kept.row_M[kept.count : len(pages)] = pages[kept.count :]
        kept.count = len(pages)
    return kept.row_M
