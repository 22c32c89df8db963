"""`LoopWatch`: says so when an event loop stands still, and where.

An environment that blocks in an inline worker stops everything on its loop, time limits included: nothing
there can notice. A thread can.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback

from gymllm.bridge import running_loop, threadsafe_wake

log = logging.getLogger(__name__)

PERIOD_S = 1.0
"""How often the loop is asked whether it lives."""
FRAMES_SHOWN = 4


class LoopWatch:
    """Asks the loop that it is made on for a sign of life, from a daemon thread, until `stop`.

    The thread also ends when the loop is closed.
    """

    def __init__(self, name: str, *, limit_s: float) -> None:
        """Starts to watch.

        Args:
            name: What the message calls those that run there.
            limit_s: How long the loop may stand still before it is said, once each time.
        """
        self._name, self._limit_s = name, limit_s
        self._wake = threadsafe_wake()
        self._loop = running_loop()
        self._loop_thread = threading.get_ident()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gymllm-watch", daemon=True)
        self._thread.start()

    def tell_to_end(self) -> None:
        """Has the thread end soon."""
        self._stopped.set()

    def stop(self) -> None:
        """Ends the thread, and returns when it has ended."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        period_s = min(PERIOD_S, self._limit_s)
        while not self._stopped.wait(period_s):
            alive = threading.Event()
            try:
                self._wake(alive.set)
            except RuntimeError:  # the loop is closed; nobody had to close the pool
                return
            if self._wait(alive, self._limit_s):
                continue
            if self._loop is not None and not self._loop.is_running():
                continue  # between two runs of it
            log.warning("%s", self._message())
            while not self._wait(alive, PERIOD_S):
                if self._stopped.is_set():
                    return

    def _wait(self, alive: threading.Event, limit_s: float) -> bool:
        """Whether the loop answered; also True once nobody watches any more."""
        step_s = min(limit_s, 0.1)
        for _ in range(max(round(limit_s / step_s), 1)):
            if alive.wait(step_s) or self._stopped.is_set():
                return True
        return False

    def _message(self) -> str:
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]  there is no other way
        frame = frames.get(self._loop_thread)
        lines = traceback.format_stack(frame)[-FRAMES_SHOWN:] if frame is not None else []
        return (
            f"the event loop of {self._name} has stood still for {self._limit_s:g} s: something on it "
            "blocks, and until it returns every episode waits and no time limit works. If it is the "
            'environment, run it with worker="thread" or worker="process" (gymllm-train: '
            "--env.worker thread). It is here:\n" + "".join(lines).rstrip()
        )
