"""Sequences of any length into rows of few lengths: none is padded to a maximum, and what rows share they
share.

Axes: B rows, T tokens of a row, and as many targets. Sequences of one row that begin alike are a tree in it
    (`tree.py`), whoever made them: members of a group, turns of a conversation, or tasks with the same
    system prompt. So packing is a choice of the sequences of each row, and what a sequence costs depends on
    who is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gymllm.errors import ConfigError
from gymllm_trainers.tree import Leaf as Leaf
from gymllm_trainers.tree import TrainingSequence as TrainingSequence
from gymllm_trainers.tree import grow, leaf, shared_with_last

_Ints = npt.NDArray[np.int32]
_Floats = npt.NDArray[np.float32]
_FULL = 0.97
"""Share of tokens from which on a micro-batch doesn't wait for others to fill it."""
_CUTS = 4
"""At how many places the run of sequences that a row begins with is tried to end."""


class PackedBatch(NamedTuple):
    """Rows of trees; all arrays have shape [B, T]. A target is a token that some sequence trains on: there
    may be several of one token, and they stand at the front of their row, in no relation to where tokens
    are."""

    ids: _Ints
    positions: _Ints
    """Of a token: its depth in its tree."""
    ends: _Ints
    """Of a token: index in the row after its last descendant; 0 is padding."""
    parent: _Ints
    """Of a token: index in the row of the token before; a root's own."""
    wanted: _Floats
    """1 where some sequence trains on the token, never a root."""
    node: _Ints
    """Of a target: index in the row of the token that is trained on."""
    mask: _Floats
    """1 where there is a target."""
    behaviour: _Floats
    """Of a target, as are all that follow: the engine's log-probability, nats."""
    advantage: _Floats
    weight: _Floats
    age: _Floats
    sequence: _Ints
    """Number of the target's sequence in its row, from 0."""

    @property
    def tokens(self) -> int:
        """Tokens that are computed and not padding."""
        return int((self.ends > 0).sum())

    @property
    def trained(self) -> int:
        """Targets."""
        return int(self.mask.sum())

    @property
    def unshared(self) -> int:
        """Tokens that the sequences would have if each were on its own."""
        rows, targets = np.nonzero(self.mask)
        # A sequence ends with its last target.
        lengths = np.zeros(self.ids.shape, np.int64)
        depths = self.positions[rows, self.node[rows, targets]] + 1
        np.maximum.at(lengths, (rows, self.sequence[rows, targets]), depths)
        return int(lengths.sum())

    @property
    def padding_share(self) -> float:
        """Share of what is computed that is padding."""
        return 1 - self.tokens / self.ids.size

    @property
    def shared_share(self) -> float:
        """Share of the sequences' tokens that are not computed, as others have computed them."""
        return 1 - self.tokens / max(self.unshared, 1)


class Packer:
    """Collects sequences as they come; gives a micro-batch when one is full.

    Everything that waits is packed anew with each arrival; when that takes more rows than a micro-batch
    has, they are given out and the rest waits; if they are not full yet, only when it takes twice as many.
    A row begins with the oldest and those that share most with it, and is filled up with what then leaves
    least to be computed. What is computed never depends on the packing, only how often it is.
    """

    def __init__(
        self,
        *,
        rows: int,
        length: int,
        share: bool = True,
        smaller: Sequence[tuple[int, int]] = (),
        parts: int = 1,
    ) -> None:
        """Makes an empty one.

        Args:
            rows: Rows of a micro-batch.
            length: Tokens of a row.
            share: Whether sequences of a row that begin alike are a tree; else they lie side by side.
            smaller: Other (rows, tokens) that a micro-batch may have when what is left doesn't fill one;
                see `smaller_shapes`.
            parts: Parts of rows, one after another, that are computed at the same time, and so should have as
                much to do: devices that divide rows.

        Raises:
            ConfigError: A size below 1, or rows that parts don't divide.
        """
        for shape in ((rows, length), *smaller):
            if shape[0] < 1 or shape[1] < 2:
                raise ConfigError(
                    f"a micro-batch needs rows >= 1 and length >= 2, got {shape[0]} x {shape[1]}."
                )
            if parts < 1 or shape[0] % parts:
                raise ConfigError(
                    f"rows of a micro-batch must be a multiple of the {parts} parts that they are "
                    f"divided into, got {shape[0]}."
                )
        self._share, self._parts = share, parts
        self._shapes = [(rows, length), *sorted(set(smaller), key=np.prod, reverse=True)]
        self._waiting: list[Leaf] = []

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(rows, tokens) that micro-batches have, the usual one first: what to compile for."""
        return list(self._shapes)

    def add(self, sequences: Iterable[TrainingSequence]) -> Iterator[PackedBatch]:
        """Takes sequences; yields every micro-batch that this fills. One without a trained token is left out.

        Raises:
            ConfigError: A sequence is longer than a row.
        """
        length = self._shapes[0][1]
        for sequence in sequences:
            one = leaf(sequence)
            if one is None:
                continue
            if len(one.ids) > length:
                raise ConfigError(
                    f"a sequence of {len(one.ids)} tokens does not fit in a row of {length}: set "
                    f"learner.row_tokens >= engine.context_length."
                )
            self._waiting.append(one)
        while (plan := self._plan(self._waiting, self._shapes[0])).rest:
            # What comes may fill it better; but no more than two wait.
            if plan.filled < _FULL and not self._plan(plan.rest, plan.shape).rest:
                return
            yield self._take(plan)

    def flush(self) -> Iterator[PackedBatch]:
        """Yields what is left, if anything is, in the shapes that compute least."""
        for plan in self._least(self._waiting).plans:
            yield self._take(plan)

    def _least(self, waiting: list[Leaf]) -> _Plans:
        """Micro-batches that hold all that waits, of the smallest size together.

        Either one that holds all, or one that is filled and what is least for the rest.
        """
        if not waiting:
            return _Plans(0, [])
        best: _Plans | None = None
        longest = max(len(one.ids) for one in waiting)
        for shape in self._shapes:  # the largest first: of equals, the fewest are taken
            size = shape[0] * shape[1]
            if longest > shape[1] or (best is not None and size >= best.size):
                continue
            plan = self._plan(waiting, shape)
            rest = self._least(plan.rest)
            if best is None or size + rest.size < best.size:
                best = _Plans(size + rest.size, [plan, *rest.plans])
        assert best is not None  # the largest shape takes any sequence
        return best

    def _plan(self, waiting: list[Leaf], shape: tuple[int, int]) -> _Plan:
        rest = _Waiting(waiting, share=self._share)
        rows: list[list[Leaf]] = []
        tokens = 0
        while rest.leaves and len(rows) < shape[0]:
            chosen, size, rest = rest.fill(shape[1])
            rows.append(chosen)
            tokens += size
        empty: list[list[Leaf]] = [[] for _ in range(shape[0] - len(rows))]
        return _Plan(shape, rows + empty, rest.arrived, tokens / (shape[0] * shape[1]))

    def _take(self, plan: _Plan) -> PackedBatch:
        gone = {id(one) for row in plan.rows for one in row}
        self._waiting = [one for one in self._waiting if id(one) not in gone]
        batch = _lay_out(plan.rows, length=plan.shape[1], share=self._share)
        order = balance(_work(batch), self._parts)
        return PackedBatch._make(field[order] for field in batch)


class _Plan(NamedTuple):
    """A micro-batch."""

    shape: tuple[int, int]
    rows: list[list[Leaf]]
    rest: list[Leaf]
    """What then still waits, as it arrived."""
    filled: float
    """Share of its tokens that are not padding."""


class _Plans(NamedTuple):
    size: int
    """Tokens of all, padding included."""
    plans: list[_Plan]


class _Waiting:
    """Sequences in the order of their ids, where those that share most are neighbours."""

    def __init__(self, leaves: Sequence[Leaf], *, share: bool) -> None:
        """Sorts leaves, which come in the order of their arrival."""
        order = sorted(range(len(leaves)), key=lambda number: leaves[number].key)
        self.leaves = [leaves[number] for number in order]
        self._age = order
        self._share = share
        self._length = [len(one.ids) for one in self.leaves]
        self._targets = [len(one.trained) for one in self.leaves]
        same = shared_with_last(self.leaves) if share else [0] * len(self.leaves)
        self._same = [*same, 0]
        """Tokens shared with the sequence before; a 0 for what would come after the last."""

    def fill(self, length: int) -> tuple[list[Leaf], int, _Waiting]:
        """A row's sequences, how many tokens they take, and those that are left."""
        run = self._run(length)
        # What a row holds besides its run depends on where that ends: a cut between those that share little,
        # or one that leaves a gap which others fill.
        tries = [
            self._topped_up(run[: len(run) - cut], length) for cut in range(min(_CUTS, len(run)))
        ]
        chosen = min(tries, key=lambda each: self._size(set(range(len(self.leaves))) - set(each)))
        taken = set(chosen)
        left = [one for number, one in enumerate(self.leaves) if number not in taken]
        ages = [age for number, age in enumerate(self._age) if number not in taken]
        left = [left[number] for number in np.argsort(ages).tolist()]
        rest = _Waiting(left, share=self._share)
        return [self.leaves[number] for number in sorted(chosen)], self._size(taken), rest

    @property
    def arrived(self) -> list[Leaf]:
        """In the order of their arrival."""
        return [self.leaves[number] for number in np.argsort(self._age).tolist()]

    def _run(self, length: int) -> list[int]:
        """The oldest, and those after it while they fit."""
        run: list[int] = []
        size = targets = 0
        for number in range(self._age.index(0), len(self.leaves)):
            size += self._length[number] - (self._same[number] if run else 0)
            targets += self._targets[number]
            if size > length or targets > length:
                break
            run.append(number)
        return run

    def _topped_up(self, run: list[int], length: int) -> list[int]:
        """A row with this run and what fits in best besides."""
        row = set(run)
        targets = sum(self._targets[number] for number in row)
        while len(row) < len(self.leaves):
            room = length - self._size(row)
            inside, outside = self._nearest(row), self._nearest(set(range(len(self.leaves))) - row)
            free = [number for number in range(len(self.leaves)) if number not in row]
            costs = [self._length[number] - inside[number] for number in free]
            # What is no more to be computed when it is gone from those that wait.
            gains = [self._length[number] - outside[number] for number in free]
            added = 0
            for index in _knapsack(costs, gains, room):
                number = free[index]
                if targets + self._targets[number] <= length:
                    targets += self._targets[number]
                    row.add(number)
                    added += 1
            if not added:
                break
        return list(row)

    def _size(self, numbers: set[int]) -> int:
        """Tokens of the trees of some of them."""
        size = same = 0
        for number, length in enumerate(self._length):
            same = min(same, self._same[number])
            if number in numbers:
                size += length - same
                same = length
        return size

    def _nearest(self, numbers: set[int]) -> list[int]:
        """Of each, how many tokens it shares with those that it shares most with among others."""
        count = len(self.leaves)
        found = [0] * count
        same = 0
        for number in range(count):
            same = min(same, self._same[number])
            found[number] = same
            if number in numbers:
                same = self._length[number]
        same = 0
        for number in range(count - 1, -1, -1):
            same = min(same, self._same[number + 1])
            found[number] = max(found[number], same)
            if number in numbers:
                same = self._length[number]
        return found


def _knapsack(costs: list[int], gains: list[int], room: int) -> list[int]:
    """Indices of those that gain most and cost no more than the room, by dynamic programming.

    What costs nothing is always among them.
    """
    free = [index for index, cost in enumerate(costs) if cost == 0]
    fitting = [index for index, cost in enumerate(costs) if 0 < cost <= room]
    if sum(costs[index] for index in fitting) <= room:
        return free + fitting
    best = np.zeros(room + 1, np.int64)
    better: list[npt.NDArray[np.bool_]] = []
    for index in fitting:
        cost = costs[index]
        with_it = best[:-cost] + gains[index]
        better.append(with_it > best[cost:])
        best[cost:] = np.maximum(best[cost:], with_it)
    chosen: list[int] = []
    for index, taken in zip(reversed(fitting), reversed(better), strict=True):
        cost = costs[index]
        if room >= cost and taken[room - cost]:
            chosen.append(index)
            room -= cost
    return free + chosen


def pack_rows(
    rows: Sequence[Sequence[TrainingSequence]], *, length: int, share: bool = True
) -> PackedBatch:
    """Lays out each list of sequences in one row of `length` tokens; those without a target are left out.

    Raises:
        ConfigError: They don't fit.
    """
    leaves = [[one for each in row if (one := leaf(each)) is not None] for row in rows]
    return _lay_out(leaves, length=length, share=share)


def smaller_shapes(
    rows: int, length: int, *, row_multiple: int = 1, count: int = 2
) -> list[tuple[int, int]]:
    """Shapes of a half, a quarter and so on of a micro-batch: fewer rows, or shorter ones where rows can't be
    halved.

    Args:
        rows: Rows of a whole one.
        length: Tokens of a row.
        row_multiple: What rows must be a multiple of: devices that divide them.
        count: How many shapes.
    """
    found: list[tuple[int, int]] = []
    for _ in range(count):
        if rows % (2 * row_multiple) == 0:
            rows //= 2
        else:
            length //= 2
        if length >= 2:
            found.append((rows, length))
    return found


def balance(work_B: npt.NDArray[np.float64], parts: int) -> list[int]:
    """An order of rows in which parts of equal numbers of rows, one after another, have about as much work.

    The heaviest row goes first, each to the part with the least work so far that has a place left (Graham
    1969, "Bounds on multiprocessing timing anomalies").
    """
    places = len(work_B) // parts
    chosen: list[list[int]] = [[] for _ in range(parts)]
    sums = [0.0] * parts
    for row in np.argsort(-work_B, kind="stable").tolist():
        part = min(
            (part for part in range(parts) if len(chosen[part]) < places),
            key=lambda part: sums[part],
        )
        chosen[part].append(row)
        sums[part] += float(work_B[row])
    return [row for part in chosen for row in part]


def _work(batch: PackedBatch) -> npt.NDArray[np.float64]:
    """Of each row, tokens and pairs of a query and a key, each as a share of what a row can have."""
    length = batch.ids.shape[1]
    tokens_B = (batch.ends > 0).sum(1) / length
    pairs_B = np.maximum(batch.ends - np.arange(length), 0).sum(1) / (length * (length + 1) / 2)
    return tokens_B + pairs_B


def _lay_out(rows: Sequence[Sequence[Leaf]], *, length: int, share: bool) -> PackedBatch:
    shape = (len(rows), length)
    batch = PackedBatch(
        ids=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        ends=np.zeros(shape, np.int32),
        parent=np.zeros(shape, np.int32),
        wanted=np.zeros(shape, np.float32),
        node=np.zeros(shape, np.int32),
        mask=np.zeros(shape, np.float32),
        behaviour=np.zeros(shape, np.float32),
        advantage=np.zeros(shape, np.float32),
        weight=np.zeros(shape, np.float32),
        age=np.zeros(shape, np.float32),
        sequence=np.zeros(shape, np.int32),
    )
    for row, leaves in enumerate(rows):
        trees = grow(leaves, share=share)
        if max(len(trees.ids), len(trees.node)) > length:
            raise ConfigError(
                f"{len(leaves)} sequences of {len(trees.ids)} tokens and {len(trees.node)} targets do not "
                f"fit in a row of {length}."
            )
        for name, values in trees._asdict().items():
            getattr(batch, name)[row, : len(values)] = values
        batch.mask[row, : len(trees.node)] = 1
    return batch
