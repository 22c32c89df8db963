"""Which requests run, where their keys and values are, and what the next step computes.

Steps run on the device in the order in which they were scheduled, and a step writes all its keys and values
before it reads any. So a page counts as computed as soon as the step that writes it is scheduled, and
another request may read it in the very same step: the members of a group compute their common prompt once.
A page that is given back may be given out at once, for the same reason.

One step may be scheduled before the results of the one before are known; its rows then take those tokens
from the device. A burst's results must be known: they may end requests in its midst.

No arrays, no clock, no threads.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gymllm_trainers.engine.config import EngineConfig
from gymllm_trainers.engine.placement import Placement
from gymllm_trainers.engine.requests import DecodeRow, PrefillBlock, Request, Step

_BURSTS_BEFORE = 3
"""A request must have generated so many bursts' tokens before it takes part in one."""


@dataclass(frozen=True)
class SchedulerStats:
    """Totals since the start."""

    reused: int = 0
    """Tokens of prompts that were found computed, of requests that came to their first token."""
    prefilled: int = 0
    """Tokens that were computed before a request could go on: of prompts, and what was computed again."""
    preemptions: int = 0
    evictions: int = 0


@dataclass(slots=True)
class _Draft:
    """A step in the making."""

    decode: list[DecodeRow] = field(default_factory=list)
    prefill: list[PrefillBlock] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    prompts: list[Request] = field(default_factory=list)
    """Requests that have more to compute than one token."""
    active: int = 0
    """Running requests that still have a token to schedule."""
    starved: bool = False
    """Whether a request found no page."""


class Scheduler:
    """Gives requests pages and steps. First come, first served."""

    def __init__(self, config: EngineConfig, *, version: int = 0) -> None:
        """Starts with empty pages.

        Args:
            config: Sizes.
            version: Of the weights that the first step runs with.
        """
        self._slots, self._size = config.slots, config.page_size
        self._context_length, self._burst = config.context_length, max(config.burst, 1)
        self._row_shapes, self._block_shapes = config.row_shapes, config.block_shapes
        self._placement = Placement(config, version=version)
        self._pages = self._placement.pages
        self._waiting: deque[Request] = deque()
        # Both in order of arrival, and whoever runs came before whoever waits, pre-empted ones apart.
        self._running: list[Request] = []
        self._in_flight: deque[Step] = deque()
        self._arrivals = 0
        self._refused: tuple[Request, int] | None = None
        """Who was refused for want of pages, and how many there were."""
        self._reused = self._prefilled = self._preemptions = 0

    # ------------------------------------------------------------------ what is going on

    @property
    def waiting(self) -> int:
        """Requests that have not been admitted, or were pre-empted."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Admitted requests: one for each slot at most, and those whose last token is on its way."""
        return len(self._running)

    @property
    def free_pages(self) -> int:
        """Pages that can be given out at once; some may hold what could be reused."""
        return self._pages.available

    @property
    def stats(self) -> SchedulerStats:
        """Totals since the start."""
        return SchedulerStats(
            self._reused, self._prefilled, self._preemptions, self._pages.evictions
        )

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: Request) -> None:
        """Queues a request, whose prompt has at least one token and leaves room for another."""
        assert 1 <= request.prompt_length <= len(request.ids) < self._context_length
        request.limit = min(request.prompt_length + request.max_new_tokens, self._context_length)
        assert not request.full
        assert request.arrival < 0
        request.arrival = self._arrivals
        self._arrivals += 1
        self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Ends a request, whatever it is doing; its pages are free at once. Idempotent."""
        self.finish(request)

    def finish(self, request: Request) -> None:
        """Ends a request; its pages go to the tree, and what it has in flight will be ignored. Idempotent."""
        if request.ended or request.arrival < 0:
            return
        request.ended = True
        self._placement.release(request)
        if request.running:
            self._running.remove(request)
            request.running = False
        else:
            self._waiting.remove(request)

    def set_version(self, version: int, recompute: bool) -> None:
        """Says that the steps scheduled from now on run with other weights.

        Args:
            version: Theirs. If it is not above the present one, nothing computed so far is reused.
            recompute: Running requests compute all their keys and values again before they go on.
        """
        self._placement.renew(version, self._running)
        if not recompute:
            return
        for request in self._running:
            self._placement.release(request)
            request.required = version
        for request in self._waiting:
            if request.preemptions:
                request.required = version

    def clear_cache(self) -> None:
        """Forgets every page that no request reads."""
        self._pages.clear()

    def forget(self) -> None:
        """Has nothing that was computed so far be reused; running requests go on with what they have."""
        self._placement.forget(self._running)

    # ------------------------------------------------------------------ steps

    def schedule(self) -> Step | None:
        """Makes the next step: every row that can decode, and prompts as far as they fit.

        None if there is nothing to do before the step in flight is complete, or nothing at all.
        """
        assert sum(step.burst for step in self._in_flight) <= 1, (
            "one step can be scheduled ahead, and none of a burst: complete() comes first"
        )
        self._placement.step += 1
        while True:
            draft = _Draft()
            self._decode(draft)
            self._admit(draft)
            self._prefill(draft)
            if draft.decode or draft.prefill:
                return self._finished(draft, burst=self._extend(draft))
            if not draft.starved or self._in_flight:
                return None
            # All wait for pages that the others hold.
            self._preempt(next(r for r in reversed(self._running) if r.pages))

    def complete(self, step: Step, tokens: Sequence[int]) -> list[tuple[Request, int]]:
        """Takes a step's samples. Steps are completed in the order in which they were scheduled.

        Args:
            step: As `schedule` gave it.
            tokens: Its samples, one for each row and block of the shape; of a burst, for each row's every
                token.

        Returns:
            The tokens that count, now in their requests' `ids`; a request's in their order. Requests that are
            then `full` have ended.
        """
        assert self._in_flight
        assert self._in_flight[0] is step
        self._in_flight.popleft()
        counted = [
            (row.request, token)
            for first in range(0, step.burst * step.rows, step.rows)
            for row, token in zip(step.decode, tokens[first:], strict=False)
            if not row.request.ended
        ]
        counted += [
            (block.request, token)
            for block, token in zip(step.prefill, tokens[step.rows :], strict=False)
            if block.samples and not block.request.ended
        ]
        size = self._size
        for request, token in counted:
            ids = request.ids
            ids.append(token)
            request.pending -= 1
            if len(ids) >= request.limit:
                self.finish(request)
            elif (len(request.nodes) + 1) * size <= request.computed:
                self._placement.index(request)
        return counted

    def _extend(self, draft: _Draft) -> int:
        """How many tokens each row of the step takes: several where nothing can come between them.

        What a request would still generate is not known; one that has gone on for a while most likely goes on
        for as long again, and what is computed past its end is then a small part.
        """
        burst = self._burst
        waiting = self._waiting or draft.prompts or draft.active > len(draft.decode)
        if burst == 1 or draft.prefill or waiting:
            return 1
        for request in (row.request for row in draft.decode):
            total = len(request.ids) + request.pending  # with this step's own
            if (
                not request.bursts
                or total - request.prompt_length < _BURSTS_BEFORE * burst
                or total + burst - 1 > request.limit
            ):
                return 1
        size = self._size
        for request in (row.request for row in draft.decode):
            while request.computed + burst - 1 > len(request.pages) * size:
                page = self._pages.take()
                if not page:
                    return 1  # what others got already they will need later
                request.pages.append(page)
        for request in (row.request for row in draft.decode):
            request.pending += burst - 1
            self._placement.computes(request, request.computed + burst - 1)
        return burst

    def _finished(self, draft: _Draft, *, burst: int) -> Step:
        rows = next(rows for rows in self._row_shapes if rows >= len(draft.decode))
        blocks = next(blocks for blocks in self._block_shapes if blocks >= len(draft.prefill))
        for index, block in enumerate(draft.prefill, rows):
            if block.samples:
                block.request.source = index
        if draft.prefill:
            self._refused = None
        step = Step(
            tuple(draft.decode), tuple(draft.prefill), rows, blocks, tuple(draft.copies), burst
        )
        self._in_flight.append(step)
        return step

    def _decode(self, draft: _Draft) -> None:
        """Adds the rows of running requests; notes who has more to compute."""
        size = self._size
        for request in tuple(self._running):
            total = len(request.ids) + request.pending
            if total >= request.limit or not request.running:
                continue
            draft.active += 1
            if total - request.computed > 1:
                draft.prompts.append(request)
            elif not (request.pending and request.lockstep):
                if request.computed == len(request.pages) * size:
                    page = self._pages.take() or self._take_from_later(request)
                    if not page:
                        draft.starved = True
                        continue
                    request.pages.append(page)
                self._add_row(request, draft)

    def _add_row(self, request: Request, draft: _Draft) -> None:
        position = request.computed
        if request.pending:
            row = DecodeRow(request, -1, request.source, position)
        else:
            row = DecodeRow(request, request.ids[-1], -1, position)
            if position < request.prompt_length:
                self._prefilled += 1
                self._reused += request.reused
        request.source = len(draft.decode)
        request.pending += 1
        self._placement.computes(request, position + 1)
        draft.decode.append(row)

    # ------------------------------------------------------------------ admission and pre-emption

    def _admit(self, draft: _Draft) -> None:
        """Admits requests in order of arrival while there are slots, and pages for their prompts."""
        if not self._waiting or draft.active >= self._slots:
            return
        promised = sum(max(0, self._needed(r) - len(r.pages)) for r in draft.prompts)
        while self._waiting and draft.active < self._slots:
            request = self._waiting[0]
            left = self._pages.available - promised
            if self._refused and self._refused[0] is request and self._refused[1] >= left:
                return
            self._placement.follow(request)
            needed = self._needed(request) - len(request.pages)
            if needed > self._pages.available - promised:
                self._placement.release(request)
                self._refused = (request, left)
                return
            promised += needed
            self._waiting.popleft()
            request.running = True
            insort(self._running, request, key=_arrival)
            draft.active += 1
            draft.prompts.append(request)

    def _needed(self, request: Request) -> int:
        """Pages for all its tokens and one page more, but not more than it can ever fill."""
        tokens = len(request.ids) + request.pending
        # Keys and values of the last token before the limit are not needed.
        return min(-(-tokens // self._size) + 1, -(-(request.limit - 1) // self._size))

    def _take_from_later(self, request: Request) -> int:
        """A page for which requests that came later are pre-empted, the latest first; 0 without any."""
        while True:
            victim = next(r for r in reversed(self._running) if r.pages or r is request)
            if victim is request:
                return 0
            self._preempt(victim)
            if page := self._pages.take():
                return page

    def _preempt(self, request: Request) -> None:
        self._placement.release(request)
        if len(request.ids) + request.pending >= request.limit:
            return  # its last token is on its way, for which it needs no pages any more
        request.preemptions += 1
        self._preemptions += 1
        self._running.remove(request)
        request.running = False
        insort(self._waiting, request, key=_arrival)

    # ------------------------------------------------------------------ prompts

    def _prefill(self, draft: _Draft) -> None:
        """Shares the step's blocks out.

        Half go to the prompts that came first, so none waits for ever; the other half to those that have
        least left to compute, so short ones don't wait for long ones. What a half doesn't use goes to the
        other.
        """
        most = self._block_shapes[-1]
        half = most - most // 2
        draft.prompts.sort(key=_arrival)
        unfinished = [r for r in draft.prompts if not self._add_blocks(r, draft, most=half)]
        unfinished.sort(key=lambda r: len(r.ids) + r.pending - r.computed)
        for request in unfinished:
            self._add_blocks(request, draft, most=most)

    def _add_blocks(self, request: Request, draft: _Draft, *, most: int) -> bool:
        """Adds as much of a request as fits; whether nothing is left of it for this step.

        Args:
            request: Has more to compute than one token.
            draft: Where to.
            most: Blocks that the draft may then have.
        """
        if request.pending > 1 or (request.pending and request.lockstep):
            return True  # the host doesn't know all that has to be computed
        size = self._size
        self._placement.follow(request)
        most -= len(draft.prefill)
        if most > 0 and len(draft.copies) < self._slots:
            copy = self._placement.branch(request)
            if copy is not None:
                draft.copies.append(copy)
        total = len(request.ids) + request.pending
        start = request.computed
        if total - start > 1:
            if most <= 0:
                return False
            end = min(len(request.ids), start + most * size)
            if (total - start) % size == 1:
                end = min(end, total - 1)  # a row for the last token is cheaper than a block
            room = self._placement.extend(request, end)
            if room < end:
                draft.starved, end = True, room
            if end <= start:
                return True
            for at in range(start, end, size):
                stop = min(at + size, end)
                draft.prefill.append(
                    PrefillBlock(request, request.ids[at:stop], at, samples=stop == total)
                )
            self._placement.computes(request, end)
            self._prefilled += end - start
            if end == total:
                if total == request.prompt_length:
                    self._reused += request.reused
                request.pending += 1
            # The step being made writes these pages, and others may read them in it.
            self._placement.index(request, swap=False)
            if end == total or total - end > 1:
                return end == total
        if self._placement.extend(request, total) == total:
            self._add_row(request, draft)
        else:
            draft.starved = True
        return True


def _arrival(request: Request) -> int:
    return request.arrival
