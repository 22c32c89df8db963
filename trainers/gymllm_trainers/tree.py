"""Sequences that begin alike, as trees: what they share is there once.

Axes: N tokens of a sequence or of a row's trees, M targets, S sequences.

A node is a token; its parent is the token before it; a path from a root is a sequence. Nodes are laid out
depth first, so that a node's descendants follow it without a gap: node a is an ancestor of node n, or n
itself, exactly when a <= n < ends[a]. That is all that attention has to know.

Sequences in the order of their ids are in depth-first order already: each adds the nodes that it does not
share with the one before it, and how many those are is all that the size of a tree depends on. So nothing
here walks along tokens one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_Ints = npt.NDArray[np.int32]
_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingSequence:
    """One segment, ready to be trained on. Arrays have shape [N], N >= 2."""

    ids: _Ints
    """From 0."""
    mask: _Floats
    """1 where the token is trained on. The first token can't be: nothing predicts it."""
    behaviour: _Floats
    """The engine's log-probability (nats)."""
    advantage: _Floats
    weight: _Floats | float = 1.0
    """What the aggregation multiplies a token's loss with."""
    age: _Floats | float = 0.0
    """Policy versions between the one that made a token and the learner's."""
    trajectory: int = 0
    """Number of the trajectory that it is a segment of; packing doesn't look at it."""

    def __len__(self) -> int:
        return len(self.ids)


class Leaf(NamedTuple):
    """A sequence as trees are made of it: without what follows its last trained token, which nothing
    needs."""

    sequence: TrainingSequence
    ids: _Ints
    trained: _Ints
    """Indices of its trained tokens, [M] with M >= 1."""
    key: bytes
    """Ids, so that the order of keys is the order of ids from the front."""


class Trees(NamedTuple):
    """Trees side by side. `node` and what follows have shape [M], a number for each target: a token that a
    sequence trains on. The rest has shape [N]."""

    ids: _Ints
    positions: _Ints
    """Depth: the token's position in its sequences."""
    ends: _Ints
    """Index after the node's last descendant."""
    parent: _Ints
    """Index of the token before; a root's own."""
    wanted: _Floats
    """1 where some sequence trains on the token."""
    node: _Ints
    behaviour: _Floats
    advantage: _Floats
    weight: _Floats
    age: _Floats
    sequence: _Ints
    """Which of the sequences, in the order that they were given in."""


def leaf(sequence: TrainingSequence) -> Leaf | None:
    """What trees are made of; None if the sequence has no token to train on."""
    trained = np.flatnonzero(sequence.mask[1:]).astype(np.int32) + 1
    if not len(trained):
        return None
    ids = sequence.ids[: trained[-1] + 1]
    return Leaf(sequence, ids, trained, ids.astype(">u4").tobytes())


def shared(left: Leaf, right: Leaf) -> int:
    """How many tokens two sequences have in common at their beginnings."""
    size = min(len(left.ids), len(right.ids))
    differ = left.ids[:size] != right.ids[:size]
    first = int(differ.argmax()) if size else 0
    return first if size and differ[first] else size


def shared_with_last(leaves: Sequence[Leaf]) -> list[int]:
    """Tokens that each of some leaves, ordered by key, shares with the one before it; 0 for the first."""
    return [0, *map(shared, leaves[:-1], leaves[1:])][: len(leaves)]


def grow(leaves: Sequence[Leaf], *, share: bool = True) -> Trees:
    """Lays sequences out as trees.

    Args:
        leaves: In any order.
        share: Whether beginnings are shared; else each sequence is a tree of its own.
    """
    order = sorted(range(len(leaves)), key=lambda number: leaves[number].key)
    ordered = [leaves[number] for number in order]
    common = shared_with_last(ordered) if share else [0] * len(leaves)
    size = sum(len(each.ids) - same for each, same in zip(ordered, common, strict=True))
    ids, positions, ends, parent = (np.empty(size, np.int32) for _ in range(4))
    wanted = np.zeros(size, np.float32)
    nodes: list[_Ints] = [np.empty(0, np.int32)] * len(leaves)
    path = np.empty(max((len(each.ids) for each in leaves), default=0), np.int32)
    start, depth = 0, 0
    for number, each, same in zip(order, ordered, common, strict=True):
        length = len(each.ids)
        stop = start + length - same
        ends[path[same:depth]] = start  # nodes that this sequence doesn't go through are finished
        path[same:length] = np.arange(start, stop)
        ids[start:stop] = each.ids[same:]
        positions[start:stop] = np.arange(same, length)
        parent[start:stop] = path[np.maximum(np.arange(same, length) - 1, 0)]
        nodes[number] = path[each.trained]
        wanted[nodes[number]] = 1
        start, depth = stop, length
    ends[path[:depth]] = start

    def of_targets(name: str) -> _Floats:
        parts = [
            np.broadcast_to(getattr(each.sequence, name), len(each.sequence))[each.trained]
            for each in leaves
        ]
        return np.concatenate([*parts, []]).astype(np.float32)

    return Trees(
        ids=ids,
        positions=positions,
        ends=ends,
        parent=parent,
        wanted=wanted,
        node=np.concatenate([*nodes, []]).astype(np.int32),
        behaviour=of_targets("behaviour"),
        advantage=of_targets("advantage"),
        weight=of_targets("weight"),
        age=of_targets("age"),
        sequence=np.repeat(np.arange(len(leaves)), [len(each) for each in nodes]).astype(np.int32),
    )
