"""Which requests run, where their keys and values are, and what the next step computes.

Steps run on the device in the order in which they were scheduled, and a step writes all its keys and values
before it reads any. So a page counts as computed as soon as the step that writes it is scheduled, and
another request may read it in the very same step: the members of a group compute their common prompt once.
A page that is given back may be given out at once, for the same reason.

One step may be scheduled before the results of the one before are known; its rows then take those tokens
from the device.

No arrays, no clock, no threads.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gymllm_trainers.engine.config import EngineConfig
from gymllm_trainers.engine.pages import STALE, Likeness, Node, Pages

FEWEST_COMMON = 2
"""Fewest tokens for which a page is copied, or kept when its request ends before it is full."""

_NOTHING_COMPUTED = 1 << 62
"""A version newer than all others."""


@dataclass(eq=False, slots=True)
class Request:
    """One request on its way. What comes after `tag` belongs to the scheduler."""

    ids: list[int]
    """Prompt, and what the host knows of what has been generated since."""
    prompt_length: int
    max_new_tokens: int
    lockstep: bool = False
    """Its next token must not be scheduled before its last one is known."""
    tag: object = None
    """Whatever the engine keeps with it."""

    pages: list[int] = field(default_factory=list)
    """Its pages, in order. The list only grows; where a page changes, it is another list."""
    nodes: list[Node] = field(default_factory=list, repr=False)
    """The tree's nodes of the first of its pages; those after are its own, and the only ones it writes to."""
    computed: int = 0
    """Tokens whose keys and values are in its pages once everything scheduled has run."""
    pending: int = 0
    """Tokens sampled by scheduled steps that the host doesn't know yet."""
    source: int = -1
    """Number of the latest of them among its step's samples."""
    oldest: int = _NOTHING_COMPUTED
    """Oldest weights that any of what is computed was computed with."""
    required: int = STALE
    """Oldest weights that it may go on from."""
    copied: Node | None = None
    """Where the beginning of its first own page was copied from."""
    limit: int = 0
    """Tokens, prompt included, at which it ends by length."""
    arrival: int = -1
    reused: int = 0
    """Tokens of the prompt that were found computed."""
    preemptions: int = 0
    """Times that its pages were taken away for another request."""
    running: bool = False
    ended: bool = False

    @property
    def full(self) -> bool:
        """Whether it has reached its limit."""
        return len(self.ids) >= self.limit


class DecodeRow(NamedTuple):
    """The next token after one token of a request."""

    request: Request
    token: int
    """-1 if the host doesn't know it yet."""
    source: int
    """Number of the previous step's sample that it is, or -1 if the host knows it."""
    position: int
    """Where it stands; its keys and values are written there, in the request's own page."""


class PrefillBlock(NamedTuple):
    """A few known tokens of a request."""

    request: Request
    tokens: Sequence[int]
    """At most `page_size`; not always of one page."""
    start: int
    """Where the first stands."""
    samples: bool
    """Whether these are the last ones, so that the sampled token counts."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one call of a compiled program does. A request's page table is `request.pages` right after
    `Scheduler.schedule`; a request can have several blocks, and a row beside them.

    Samples are numbered: decode row i is i, prefill block q is `rows` + q.
    """

    decode: tuple[DecodeRow, ...]
    prefill: tuple[PrefillBlock, ...]
    rows: int
    """Decode rows of the compiled shape."""
    blocks: int
    """Prefill blocks of the compiled shape."""
    copies: tuple[tuple[int, int], ...]
    """Pages to copy before the step, as (source, target), at most `slots`; all at once or one by one."""


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
        self._context_length, self._lag = config.context_length, config.reuse_lag
        self._row_shapes, self._block_shapes = config.row_shapes, config.block_shapes
        self._version = version
        self._pages = Pages(config.total_pages)
        self._waiting: deque[Request] = deque()
        # Both in order of arrival, and whoever runs came before whoever waits, pre-empted ones apart.
        self._running: list[Request] = []
        self._in_flight: deque[Step] = deque()
        self._number = 0
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
        self._release(request)
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
        if version <= self._version:
            self._pages.forget()
            for request in self._running:
                if request.computed:
                    request.oldest = STALE
        self._version = version
        if not recompute:
            return
        for request in self._running:
            self._release(request)
            request.required = version
        for request in self._waiting:
            if request.preemptions:
                request.required = version

    def clear_cache(self) -> None:
        """Forgets every page that no request reads."""
        self._pages.clear()

    # ------------------------------------------------------------------ steps

    def schedule(self) -> Step | None:
        """Makes the next step: every row that can decode, and prompts as far as they fit.

        None if there is nothing to do before the step in flight is complete, or nothing at all.
        """
        assert len(self._in_flight) <= 1, (
            "a step can be scheduled one ahead: complete() comes first"
        )
        self._number += 1
        while True:
            draft = _Draft()
            self._decode(draft)
            self._admit(draft)
            self._prefill(draft)
            if draft.decode or draft.prefill:
                return self._finished(draft)
            if not draft.starved or self._in_flight:
                return None
            # All wait for pages that the others hold.
            self._preempt(next(r for r in reversed(self._running) if r.pages))

    def complete(self, step: Step, tokens: Sequence[int]) -> list[tuple[Request, int]]:
        """Takes a step's samples. Steps are completed in the order in which they were scheduled.

        Args:
            step: As `schedule` gave it.
            tokens: Its samples, one for each row and block of the shape.

        Returns:
            The tokens that count, now in their requests' `ids`. Requests that are then `full` have ended.
        """
        assert self._in_flight
        assert self._in_flight[0] is step
        self._in_flight.popleft()
        counted = [
            (row.request, token)
            for row, token in zip(step.decode, tokens, strict=False)
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
                self._index(request)
        return counted

    def _finished(self, draft: _Draft) -> Step:
        rows = next(rows for rows in self._row_shapes if rows >= len(draft.decode))
        blocks = next(blocks for blocks in self._block_shapes if blocks >= len(draft.prefill))
        for index, block in enumerate(draft.prefill, rows):
            if block.samples:
                block.request.source = index
        if draft.prefill:
            self._refused = None
        step = Step(tuple(draft.decode), tuple(draft.prefill), rows, blocks, tuple(draft.copies))
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
        request.computed = position + 1
        if request.oldest > self._version:
            request.oldest = self._version
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
            self._follow(request)
            needed = self._needed(request) - len(request.pages)
            if needed > self._pages.available - promised:
                self._release(request)
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
        self._release(request)
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
        if request.pending and request.lockstep:
            return True
        size = self._size
        self._follow(request)
        most -= len(draft.prefill)
        if most > 0 and len(draft.copies) < self._slots:
            self._branch(request, draft)
        total = len(request.ids) + request.pending
        start = request.computed
        if total - start > 1:
            if most <= 0:
                return False
            end = min(len(request.ids), start + most * size)
            if (total - start) % size == 1:
                end = min(end, total - 1)  # a row for the last token is cheaper than a block
            end = self._make_room(request, end, draft)
            if end <= start:
                return True
            for at in range(start, end, size):
                stop = min(at + size, end)
                draft.prefill.append(
                    PrefillBlock(request, request.ids[at:stop], at, samples=stop == total)
                )
            request.computed = end
            if request.oldest > self._version:
                request.oldest = self._version
            self._prefilled += end - start
            if end == total:
                if total == request.prompt_length:
                    self._reused += request.reused
                request.pending += 1
            # The step being made writes these pages, and others may read them in it.
            self._index(request, swap=False)
            if end == total or total - end > 1:
                return end == total
        if self._make_room(request, total, draft) == total:
            self._add_row(request, draft)
        return True

    def _make_room(self, request: Request, end: int, draft: _Draft) -> int:
        """Takes pages up to a position; returns how far they go."""
        while len(request.pages) * self._size < end:
            page = self._pages.take()
            if not page:
                draft.starved = True
                return len(request.pages) * self._size
            request.pages.append(page)
        return end

    # ------------------------------------------------------------------ pages and the tree

    def _follow(self, request: Request) -> None:
        """Goes on through the tree as far as what comes next is there already."""
        size, computed = self._size, request.computed
        if computed != len(request.nodes) * size:
            return
        # The last token is always computed: its hidden state gives the next one.
        end = len(request.ids) + request.pending - 1
        oldest = max(self._version - self._lag, request.required)
        pages, ids = self._pages, request.ids
        node = request.nodes[-1] if request.nodes else pages.root
        while computed + size <= end:
            found = pages.find(node, tuple(ids[computed : computed + size]), oldest=oldest)
            if found is None:
                break
            node = found
            pages.enter(node)
            pages.hold(node.page)
            request.nodes.append(node)
            request.pages.append(node.page)
            computed += size
        if computed > request.computed:
            self._found(request, computed, node)

    def _branch(self, request: Request, draft: _Draft) -> None:
        """Copies the page that has the most of what comes next, if one has enough of it."""
        start = request.computed
        if start != len(request.nodes) * self._size:
            return
        end = min(start + self._size, len(request.ids) + request.pending - 1)
        if end - start < FEWEST_COMMON:
            return
        found = self._closest(request, request.ids[start:end], before=self._number)
        if found is None or found.common < FEWEST_COMMON:
            return
        self._pages.enter(found.node)  # or it might be evicted for the page it is copied to
        page = self._pages.take()
        self._pages.leave([found.node])
        if page:
            draft.copies.append((found.node.page, page))
            request.pages.append(page)
            request.copied = found.node
            self._found(request, start + found.common, found.node)

    def _closest(self, request: Request, ids: Sequence[int], *, before: int) -> Likeness | None:
        parent = request.nodes[-1] if request.nodes else self._pages.root
        oldest = max(self._version - self._lag, request.required)
        return self._pages.closest(parent, ids, oldest=oldest, before=before)

    def _found(self, request: Request, computed: int, node: Node) -> None:
        if len(request.ids) + request.pending == request.prompt_length:
            request.reused += computed - request.computed
        request.computed = computed
        request.oldest = min(request.oldest, node.version)

    def _index(self, request: Request, *, swap: bool = True) -> None:
        """Puts the full pages whose ids are known into the tree.

        Args:
            request: Whose.
            swap: Whether the request may go on with the tree's page where that has the same content; not
                while a step that writes the request's own is being made.
        """
        size = self._size
        known = min(request.computed, len(request.ids))
        if request.oldest < self._version - self._lag:
            return  # nobody would go on from them
        while (index := len(request.nodes)) * size + size <= known:
            parent = request.nodes[-1] if request.nodes else self._pages.root
            key = tuple(request.ids[index * size : (index + 1) * size])
            node = self._pages.find(parent, key, oldest=request.oldest)
            if node is None:
                page = request.pages[index]
                node = self._put(request, parent, key, page)
            elif swap:
                request.pages = list(request.pages)
                self._pages.drop(request.pages[index])
                self._pages.hold(node.page)
                request.pages[index] = node.page
            else:
                return
            self._pages.enter(node)
            request.nodes.append(node)

    def _put(self, request: Request, parent: Node, key: tuple[int, ...], page: int) -> Node:
        node = self._pages.put(parent, key, page, version=request.oldest, step=self._number)
        if request.copied is not None:
            self._pages.supersede(request.copied, key)
            request.copied = None
        return node

    def _keep_tail(self, request: Request) -> None:
        """Puts the page that is not full into the tree, so that the next turn can copy it."""
        known = min(request.computed, len(request.ids))
        index = len(request.nodes)
        tail = known - index * self._size
        if not FEWEST_COMMON <= tail < self._size or request.oldest < self._version - self._lag:
            return
        key = tuple(request.ids[known - tail : known])
        parent = request.nodes[-1] if request.nodes else self._pages.root
        there = self._pages.closest(parent, key, oldest=request.oldest, before=self._number + 1)
        if there is None or there.common < tail:
            self._put(request, parent, key, request.pages[index])

    def _release(self, request: Request) -> None:
        """Gives all pages back; the tree keeps what is worth it."""
        self._index(request)
        self._keep_tail(request)
        self._pages.leave(request.nodes)
        for page in request.pages:
            self._pages.drop(page)
        request.pages, request.nodes = [], []
        request.computed, request.copied = 0, None
        request.oldest = _NOTHING_COMPUTED
        if len(request.ids) + request.pending == request.prompt_length:
            request.reused = 0  # not yet counted


def _arrival(request: Request) -> int:
    return request.arrival
