"""Spans into a ring buffer, and clocks that account for every second of a resource."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

Attribute = int | float | str


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time."""

    track: str
    """Where it is drawn; "/" nests ("episodes/3")."""
    name: str
    start_ns: int
    """`time.perf_counter_ns`."""
    end_ns: int
    attributes: Mapping[str, Attribute] | None = None


class Timeline:
    """Records spans from any thread; the oldest are dropped past `capacity`.

    Appending to a bounded deque is atomic under the GIL, so the hot path takes no lock.
    """

    def __init__(self, capacity: int = 200_000) -> None:
        self.start_ns = time.perf_counter_ns()
        # As tuples, which cost a fifth of a `Span` and which the garbage collector leaves alone.
        self._spans: deque[tuple[str, str, int, int, Mapping[str, Attribute] | None]] = deque(
            maxlen=capacity
        )
        self._clocks: dict[str, ResourceClock] = {}
        self._added = 0

    def add(
        self,
        track: str,
        name: str,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> None:
        """Records a span that is over."""
        self._spans.append((track, name, start_ns, end_ns, attributes))
        self._added += 1

    @contextmanager
    def span(self, track: str, name: str, **attributes: Attribute) -> Generator[None]:
        """Records the time inside the `with` block, also when it raises."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(track, name, start, time.perf_counter_ns(), attributes or None)

    def clock(self, resource: str) -> ResourceClock:
        """The clock of a resource; made, in state "starting", when first asked for."""
        if resource not in self._clocks:
            self._clocks[resource] = ResourceClock(self, resource)
        return self._clocks[resource]

    @property
    def clocks(self) -> Mapping[str, ResourceClock]:
        """Every clock by resource."""
        return dict(self._clocks)

    @property
    def dropped(self) -> int:
        """Spans that the ring buffer no longer holds (approximate while others record)."""
        return max(0, self._added - len(self._spans))

    def spans(self) -> list[Span]:
        """A copy of what the ring holds, oldest end first; open states of clocks included."""
        while True:
            try:
                held = list(self._spans)
                break
            except RuntimeError:  # another thread appended while the deque was copied
                continue
        now = time.perf_counter_ns()
        return [Span(*span) for span in held] + [
            clock.open_span(now) for clock in self._clocks.values()
        ]


class ResourceClock:
    """Says what one resource is doing, all the time: in one state from its start to its stop.

    States are named as a person would say them: "gradient", "waiting: environments".
    """

    def __init__(self, timeline: Timeline, resource: str) -> None:
        self._timeline, self._resource = timeline, resource
        self._lock = threading.Lock()
        self._state, self._since = "starting", time.perf_counter_ns()
        self._totals_ns: dict[str, int] = {}

    @property
    def state(self) -> str:
        """What it is doing now."""
        return self._state

    def enter(self, state: str) -> str:
        """Changes to `state` and returns the one before; staying in the same state is free."""
        with self._lock:
            previous = self._state
            if state != previous:
                now = time.perf_counter_ns()
                self._timeline.add(self._resource, previous, self._since, now)
                self._totals_ns[previous] = self._totals_ns.get(previous, 0) + now - self._since
                self._state, self._since = state, now
            return previous

    @contextmanager
    def during(self, state: str) -> Generator[None]:
        """In `state` inside the block, in the state before it afterwards."""
        previous = self.enter(state)
        try:
            yield
        finally:
            self.enter(previous)

    def totals_s(self) -> dict[str, float]:
        """Seconds in each state so far, the open one included."""
        with self._lock:
            totals = dict(self._totals_ns)
            elapsed = time.perf_counter_ns() - self._since
            totals[self._state] = totals.get(self._state, 0) + elapsed
        return {state: ns / 1e9 for state, ns in totals.items()}

    def open_span(self, now_ns: int) -> Span:
        """The state it is in, as a span that ends now."""
        with self._lock:
            return Span(self._resource, self._state, self._since, max(now_ns, self._since))
