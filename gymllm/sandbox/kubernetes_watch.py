"""One watch for all pods that somebody waits for.

The official client's `Watch` blocks a thread. One thread serves every pod of ours in a namespace, from the
first that is waited for until the last; between starts and removals there is none. It speaks to the
event loop through a descriptor of each `Follower`, so that neither ever waits for the other.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Protocol, cast

import anyio
import anyio.to_thread

from gymllm.sandbox.kubernetes_pod import Json, PodState, pod_state

_JOIN_TIMEOUT_S = 2.0
_LONGEST_PAUSE_S = 5.0


class PodSource(Protocol):
    """The API, as the thread uses it. Every call may raise any `Exception`: it pauses and begins anew."""

    def pods(self) -> tuple[str, list[Json]]:
        """The version of the list, and all pods of ours."""
        ...

    def events(self, version: str) -> Iterator[Json]:
        """What happens to them since; ends now and then."""
        ...

    def hang_up(self) -> None:
        """From another thread: ends `events`."""
        ...


class Follower:
    """What is known of one pod. One task at a time waits on it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pod: PodState | None = None
        self._closed = False

    def tell(self, pod: PodState | None) -> None:
        """From any thread: its state, or that there is none."""
        with self._lock:
            if not self._closed:
                self._pod = pod
                os.eventfd_write(self._changed, 1)

    async def next(self) -> PodState | None:
        """Waits for news; None: there is no such pod."""
        while True:
            await anyio.wait_readable(self._changed)
            with self._lock, suppress(BlockingIOError):
                os.eventfd_read(self._changed)
                return self._pod

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._changed)


class PodWatch:
    """Tells followers what happens to their pods."""

    def __init__(self, source: Callable[[], PodSource]) -> None:
        self._source = source
        self._followers: dict[str, list[Follower]] = {}
        self._lock = threading.Lock()
        self._thread: _Thread | None = None

    @asynccontextmanager
    async def following(self, name: str) -> AsyncGenerator[Follower]:
        """News of one pod. The first says what there is now, maybe nothing."""
        follower = Follower()
        with self._lock:
            self._followers.setdefault(name, []).append(follower)
            thread = self._thread
            if thread is None:
                thread = self._thread = _Thread(self._source(), self._tell_all, self._tell)
                thread.start()
            elif thread.listed:
                follower.tell(thread.known.get(name))
        try:
            yield follower
        finally:
            ended = self._leave(name, follower)
            if ended is not None:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(ended.join, _JOIN_TIMEOUT_S)

    @property
    def trouble(self) -> str:
        """Why there is no news just now."""
        thread = self._thread
        return thread.trouble if thread is not None else ""

    def _leave(self, name: str, follower: Follower) -> threading.Thread | None:
        with self._lock:
            self._followers[name].remove(follower)
            if not self._followers[name]:
                del self._followers[name]
            follower.close()
            if self._followers:
                return None
            ended, self._thread = self._thread, None
        if ended is not None:
            ended.stop()
        return ended

    def _tell(self, name: str, pod: PodState | None, teller: _Thread) -> None:
        with self._lock:
            if teller is self._thread:
                teller.remember(name, pod)
                for follower in self._followers.get(name, ()):
                    follower.tell(pod)

    def _tell_all(self, pods: dict[str, PodState], teller: _Thread) -> None:
        with self._lock:
            if teller is self._thread:
                teller.known, teller.listed = pods, True
                for name, followers in self._followers.items():
                    for follower in followers:
                        follower.tell(pods.get(name))


class _Thread(threading.Thread):
    def __init__(
        self,
        source: PodSource,
        tell_all: Callable[[dict[str, PodState], _Thread], None],
        tell: Callable[[str, PodState | None, _Thread], None],
    ) -> None:
        super().__init__(name="gymllm watches pods", daemon=True)
        self._source, self._tell_all, self._tell = source, tell_all, tell
        self._stopped = threading.Event()
        self.known: dict[str, PodState] = {}
        self.listed = False
        self.trouble = ""

    def stop(self) -> None:
        self._stopped.set()
        self._source.hang_up()

    def remember(self, name: str, pod: PodState | None) -> None:
        if pod is None:
            self.known.pop(name, None)
        else:
            self.known[name] = pod

    def run(self) -> None:
        pause = 0.05
        while not self._stopped.is_set():
            try:
                version, pods = self._source.pods()
                states = [pod_state(pod) for pod in pods]
                self._tell_all({state.name: state for state in states}, self)
                self.trouble, pause = "", 0.05
                for event in self._source.events(version):
                    if event.get("type") in ("ADDED", "MODIFIED", "DELETED"):
                        pod = pod_state(cast("Json", event["object"]))
                        gone = event["type"] == "DELETED"
                        self._tell(pod.name, None if gone else pod, self)
                    if self._stopped.is_set():
                        return
            except Exception as error:  # the client lets through what urllib3, ssl and json raise
                # The API restarts, says 429, or has forgotten the version (410): all is listed anew. Whoever
                # waits has a time limit of its own, and its other requests tell what is wrong.
                self.trouble = str(error) or type(error).__name__
                self._stopped.wait(pause * random.uniform(0.5, 1))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
