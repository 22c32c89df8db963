"""The token ledger: a conversation's exact ids, which only ever grow at the end.

Invariants 1 and 2 hold by construction: there is no way to edit, remove or re-encode a token that
exists, only two ways to append (what the engine was given, what it returned), and a new segment
when a template cannot extend its own prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gymllm.engine import FloatArray, Generation, IntArray
from gymllm.errors import LedgerError

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
    """Collects one conversation's tokens. Single owner, not thread-safe."""

    def __init__(self) -> None:
        self._sealed: list[Segment] = []
        self._ids: list[int] = []
        self._mask: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._generated = 0

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of the current segment: the next request's prompt."""
        return tuple(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def last_is_generated(self) -> bool:
        """Whether the newest token was made by the policy."""
        return bool(self._mask) and self._mask[-1] == 1

    @property
    def last_id(self) -> int | None:
        """Id of the current segment's newest token; None while it is empty."""
        return self._ids[-1] if self._ids else None

    @property
    def generated(self) -> int:
        """Tokens that the policy generated, over every segment."""
        return self._generated

    def append_context(self, ids: Sequence[int]) -> None:
        """Appends tokens that the policy did not make (mask 0)."""
        if len(ids) and min(ids) < 0:
            raise LedgerError(f"token ids must be >= 0, got {min(ids)}.")
        self._ids.extend(int(i) for i in ids)
        self._mask.extend([0] * len(ids))
        self._logprobs.extend([0.0] * len(ids))
        self._versions.extend([NO_VERSION] * len(ids))

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
        if prompt_length != len(self._ids):
            raise LedgerError(
                f"the generation answers a prompt of {prompt_length} tokens, but the ledger holds "
                f"{len(self._ids)}: append each answer before anything else."
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
        self._ids.extend(generation.token_ids.tolist())
        self._mask.extend([1] * n)
        self._generated += n
        self._logprobs.extend(generation.logprobs.tolist())
        self._versions.extend(generation.versions.tolist())

    def start_segment(self) -> None:
        """Seals the current segment; the next append starts a new one. No-op while it is empty."""
        if self._ids:
            self._sealed.append(self._snapshot())
            self._ids, self._mask, self._logprobs, self._versions = [], [], [], []

    def segments(self) -> tuple[Segment, ...]:
        """Every segment so far, oldest first; copies, so later appends don't change them."""
        return (*self._sealed, self._snapshot()) if self._ids else tuple(self._sealed)

    def _snapshot(self) -> Segment:
        segment = Segment(
            ids=np.array(self._ids, np.int32),
            mask=np.array(self._mask, np.int32),
            logprobs=np.array(self._logprobs, np.float32),
            versions=np.array(self._versions, np.int32),
        )
        for array in (segment.ids, segment.mask, segment.logprobs, segment.versions):
            array.flags.writeable = False
        return segment
