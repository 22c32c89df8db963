"""The token ledger: a conversation's exact ids, which only ever grow at the end.

Invariants 1 and 2 hold by construction: there is no way to edit, remove or re-encode a token that
exists, only two ways to append (what the engine was given, what it returned), and a new segment
when a template cannot extend its own prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from gymllm.engine import FloatArray, Generation, IntArray
from gymllm.errors import LedgerError

_Number = TypeVar("_Number", np.int32, np.float32)

_FIRST_CAPACITY = 256
"""Tokens there is room for at first."""
NO_VERSION = -1
"""Version of a token that no policy made."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """One training sequence: ids and what is known of each.

    All arrays have shape [T]; those that a ledger makes are read-only.
    """

    ids: IntArray
    """Token ids, exactly as the engine saw and returned them."""
    mask: IntArray
    """1 where the policy generated the token, else 0."""
    logprobs: FloatArray
    """The engine's log-probability (nats) where mask is 1, else 0."""
    versions: IntArray
    """Policy version where mask is 1, else -1."""

    def __len__(self) -> int:
        return len(self.ids)


class TokenLedger:
    """Collects one conversation's tokens. Single owner, not thread-safe.

    Appending costs what is appended, whatever is there already: the arrays grow by half when they are
    full, and what is handed out are read-only views of them, which later appends can't change.
    """

    def __init__(self) -> None:
        self._sealed: list[Segment] = []
        self._generated = 0
        self._clear()

    @property
    def ids(self) -> IntArray:
        """Ids of the current segment, int32, shape [T], read-only: the next request's prompt."""
        return _view(self._ids, self._length)

    def __len__(self) -> int:
        return self._length

    @property
    def last_is_generated(self) -> bool:
        """Whether the newest token was made by the policy."""
        return self._length > 0 and bool(self._mask[self._length - 1])

    @property
    def last_id(self) -> int | None:
        """Id of the current segment's newest token; None while it is empty."""
        return int(self._ids[self._length - 1]) if self._length else None

    @property
    def generated(self) -> int:
        """Tokens that the policy generated, over every segment."""
        return self._generated

    def append_context(self, ids: Sequence[int]) -> None:
        """Appends tokens that the policy did not make (mask 0)."""
        if len(ids) and min(ids) < 0:
            raise LedgerError(f"token ids must be >= 0, got {min(ids)}.")
        self._append(ids, 0, 0.0, NO_VERSION)

    def append_generation(self, generation: Generation, *, prompt_length: int) -> None:
        """Appends what the engine returned for the current segment's ids (mask 1).

        Args:
            generation: The engine's answer.
            prompt_length: How many ids the engine was given, which must be all of the current
                segment: an answer to any other prompt is refused.

        Raises:
            LedgerError: The answer is to another prompt, or its arrays do not fit together.
        """
        n = len(generation.token_ids)
        if prompt_length != self._length:
            raise LedgerError(
                f"the generation answers a prompt of {prompt_length} tokens, but the ledger holds "
                f"{self._length}: append each answer before anything else."
            )
        if not (n == len(generation.logprobs) == len(generation.versions)):
            raise LedgerError(
                f"a generation of {n} tokens came with {len(generation.logprobs)} log-probabilities "
                f"and {len(generation.versions)} versions; all three must be equally long."
            )
        if not np.isfinite(generation.logprobs).all():
            raise LedgerError("a generation came with a log-probability that is not finite.")
        if n == 0:
            raise LedgerError("a generation must have at least one token, got none.")
        if (generation.token_ids < 0).any():
            raise LedgerError(f"token ids must be >= 0, got {int(generation.token_ids.min())}.")
        if (generation.versions < 0).any():
            raise LedgerError("a generation came with a policy version below 0.")
        self._append(generation.token_ids, 1, generation.logprobs, generation.versions)
        self._generated += n

    def start_segment(self) -> None:
        """Seals the current segment; the next append starts a new one. No-op while it is empty."""
        if self._length:
            self._sealed.append(self._segment())
            self._clear()

    def segments(self) -> tuple[Segment, ...]:
        """Every segment so far, oldest first; later appends don't change them."""
        return (*self._sealed, self._segment()) if self._length else tuple(self._sealed)

    def _clear(self) -> None:
        self._length = 0
        self._ids = np.empty(_FIRST_CAPACITY, np.int32)
        self._mask = np.empty(_FIRST_CAPACITY, np.int32)
        self._logprobs = np.empty(_FIRST_CAPACITY, np.float32)
        self._versions = np.empty(_FIRST_CAPACITY, np.int32)

    def _append(
        self,
        ids: Sequence[int] | IntArray,
        mask: int,
        logprobs: float | FloatArray,
        versions: int | IntArray,
    ) -> None:
        start, end = self._length, self._length + len(ids)
        if end > len(self._ids):
            capacity = max(end, len(self._ids) * 3 // 2)
            self._ids, self._mask = _grown(self._ids, capacity), _grown(self._mask, capacity)
            self._logprobs = _grown(self._logprobs, capacity)
            self._versions = _grown(self._versions, capacity)
        self._ids[start:end] = ids
        self._mask[start:end] = mask
        self._logprobs[start:end] = logprobs
        self._versions[start:end] = versions
        self._length = end

    def _segment(self) -> Segment:
        length = self._length
        return Segment(
            ids=_view(self._ids, length),
            mask=_view(self._mask, length),
            logprobs=_view(self._logprobs, length),
            versions=_view(self._versions, length),
        )


def _grown(array: npt.NDArray[_Number], capacity: int) -> npt.NDArray[_Number]:
    grown = np.empty(capacity, array.dtype)
    grown[: len(array)] = array
    return grown


def _view(array: npt.NDArray[_Number], length: int) -> npt.NDArray[_Number]:
    view = array[:length]
    view.flags.writeable = False
    return view
