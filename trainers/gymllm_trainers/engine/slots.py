"""Which conversation is in which slot, and what the next step computes. No arrays, no clock, no threads.

A slot keeps its ids after a request ends, so the conversation's next turn, or another one with the same
beginning, goes on from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gymllm.engine import FinishReason, SamplingParams
from gymllm_trainers.engine.config import EngineConfig

STEP_COST = 16
"""What a step costs beside its tokens, in tokens: the launch, the sampling and the host's work."""

PATIENCE = 8
"""Decode steps between two prefill steps that are less than half full: time for prompts to gather.

On 2 cores with 32 slots and turns of 20 tokens, 8 halves the prefill steps of 1."""


@dataclass(eq=False)
class Request:
    """One request on its way."""

    sampling: SamplingParams
    ids: list[int]
    """Prompt, and what has been generated since."""
    prompt_length: int
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    slot: int = -1
    cancelled: bool = False
    finish: FinishReason | None = None

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.ids) - self.prompt_length


@dataclass(eq=False)
class Slot:
    """One row of the cache."""

    index: int
    ids: list[int] = field(default_factory=list[int])
    """Tokens whose keys and values are in the cache."""
    oldest_version: int = 0
    """Oldest weights that any of them was computed with."""
    used: int = 0
    """When it was last given out, to find the one unused for longest."""
    request: Request | None = None


@dataclass(frozen=True)
class Copy:
    """Keys and values to copy from one slot to another before the next step."""

    source: int
    target: int


@dataclass(frozen=True)
class Row:
    """One row of a step."""

    request: Request
    slot: int
    tokens: Sequence[int]
    start: int
    """Tokens that the slot holds already."""
    last: bool
    """Whether the sampled token counts: these are the last tokens known."""


@dataclass(frozen=True)
class Step:
    """What one call of a compiled program does."""

    rows: tuple[Row, ...]
    batch_rows: int
    chunk: int

    @property
    def used(self) -> int:
        """Tokens that are not padding."""
        return sum(len(row.tokens) for row in self.rows)


class SlotScheduler:
    """Gives requests slots and steps. First come, first served."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._slots = [Slot(index) for index in range(config.slots)]
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._clock = 0
        self._decoded = PATIENCE
        """Decode steps since the last prefill."""
        self.reused_tokens = 0
        """Prompt tokens that were found in the cache."""
        self.prefilled_tokens = 0
        """Prompt tokens that were computed."""

    def add(self, request: Request) -> None:
        """Queues a request."""
        self._waiting.append(request)

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests with a slot."""
        return len(self._running)

    def everything(self) -> list[Request]:
        """Every request that has not ended."""
        return [*self._waiting, *self._running]

    def drop_cancelled(self) -> list[Request]:
        """Frees what cancelled requests hold; returns them."""
        gone = [s for s in self.everything() if s.cancelled]
        if gone:
            self._waiting = deque(s for s in self._waiting if not s.cancelled)
            for request in [s for s in self._running if s.cancelled]:
                self._release(request)
        return gone

    def admit(self, version: int) -> list[Copy]:
        """Gives free slots to waiting requests; returns the copies that this asks for, in order."""
        copies: list[Copy] = []
        later: deque[Request] = deque()
        while self._waiting:
            free = [slot for slot in self._slots if slot.request is None]
            if not free:
                break
            request = self._waiting.popleft()
            if self._worth_waiting(request, version):
                later.append(request)
                continue
            copies.extend(self._place(request, free, version))
        later.extend(self._waiting)
        self._waiting = later
        return copies

    def _place(self, request: Request, free: list[Slot], version: int) -> list[Copy]:
        best, held = max(
            ((slot, self._usable(slot, request, version)) for slot in free),
            key=lambda pair: (pair[1], -pair[0].used),
        )
        source, shared = max(
            ((slot, self._usable(slot, request, version)) for slot in self._slots),
            key=lambda pair: pair[1],
        )
        copies: list[Copy] = []
        if shared - held >= self._config.share_prefix:
            # The slot is lost to its old conversation, so take the one unused for longest.
            best, held = min(free, key=lambda slot: slot.used), shared
            if best is not source:
                copies.append(Copy(source.index, best.index))
                best.oldest_version = source.oldest_version
                best.ids = source.ids[:shared]
        best.oldest_version = best.oldest_version if held else version
        best.ids = best.ids[:held]
        self._clock += 1
        best.used, best.request = self._clock, request
        request.slot = best.index
        self._running.append(request)
        self.reused_tokens += held
        self.prefilled_tokens += request.prompt_length - held
        return copies

    def _usable(self, slot: Slot, request: Request, version: int) -> int:
        """How many of a slot's tokens a request can go on from."""
        if self._too_old(slot, version):
            return 0
        # The last prompt token is always computed: its hidden state gives the first new token.
        return min(_common(slot.ids, request.ids), request.prompt_length - 1)

    def _too_old(self, slot: Slot, version: int) -> bool:
        return version - slot.oldest_version > self._config.reuse_lag

    def _worth_waiting(self, request: Request, version: int) -> bool:
        """Whether another request is computing a beginning that this one shares."""
        for other in self._running:
            slot = self._slots[other.slot]
            held = len(slot.ids)
            if held < other.prompt_length and not self._too_old(slot, version):
                coming = _common(other.ids, request.ids)
                if coming - held >= self._config.share_prefix:
                    mine = max(self._usable(slot, request, version) for slot in self._slots)
                    if coming - mine >= self._config.share_prefix:
                        return True
        return False

    def next_step(self) -> Step | None:
        """The next step, or None if no request has a slot.

        Prompts that fill half of a step take turns with decoding; fewer of them wait, while others decode,
        until `PATIENCE` decode steps have passed since the last prefill.
        """
        prefill, decode = self._pending()
        if prefill:
            step = self._step(prefill)
            wait = 1 if 2 * step.used >= step.batch_rows * step.chunk else PATIENCE
            if not decode or self._decoded >= wait:
                self._decoded = 0
                return step
        self._decoded += 1
        return self._step(decode) if decode else None

    def _pending(self) -> tuple[list[Request], list[Request]]:
        prefill: list[Request] = []
        decode: list[Request] = []
        for request in self._running:
            left = len(request.ids) - len(self._slots[request.slot].ids)
            (prefill if left > 1 else decode).append(request)
        return prefill, decode

    def _step(self, requests: list[Request]) -> Step:
        """The shape that wastes least, filled with the requests that came first."""
        lefts = [len(r.ids) - len(self._slots[r.slot].ids) for r in requests]
        decode = max(lefts) == 1

        def efficiency(shape: tuple[int, int]) -> float:
            rows, chunk = shape
            used = sum(min(left, chunk) for left in lefts[:rows])
            return used / (rows * chunk + STEP_COST)

        shapes = [shape for shape in self._config.shapes if (shape[1] == 1) == decode]
        batch_rows, chunk = max(shapes, key=efficiency)
        rows: list[Row] = []
        for request, left in zip(requests[:batch_rows], lefts, strict=False):
            start = len(request.ids) - left
            tokens = request.ids[start : start + chunk]
            rows.append(Row(request, request.slot, tokens, start, left <= chunk))
        return Step(tuple(rows), batch_rows, chunk)

    def advance(
        self, step: Step, tokens: Iterable[int], logprobs: Iterable[float], version: int
    ) -> list[Request]:
        """Takes a step's results; returns the requests that this ends."""
        ended: list[Request] = []
        for row, token, logprob in zip(step.rows, tokens, logprobs, strict=False):
            slot, request = self._slots[row.slot], row.request
            slot.ids.extend(row.tokens)
            if not row.last:
                continue
            request.ids.append(token)
            request.logprobs.append(logprob)
            request.versions.append(version)
            if token in request.sampling.stop_token_ids:
                request.finish = FinishReason.STOP
            elif (
                request.generated >= request.sampling.max_new_tokens
                or len(request.ids) >= self._config.context_length
            ):
                request.finish = FinishReason.LENGTH
            if request.finish is not None:
                self._release(request)
                ended.append(request)
        return ended

    def _release(self, request: Request) -> None:
        self._running.remove(request)
        self._slots[request.slot].request = None


def _common(left: list[int], right: list[int]) -> int:
    """Length of the common beginning."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size
    low, high = 0, size  # left[:low] agrees, left[:high] does not
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
