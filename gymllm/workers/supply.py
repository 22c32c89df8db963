"""`WorkerSupply`: where slots get workers from: a few kept ready, the rest made in turn."""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio

from gymllm.bridge import Finished
from gymllm.errors import EnvTypeError
from gymllm.workers.limits import Limits, PoolStats
from gymllm.workers.worker import EnvFacts, Worker

log = logging.getLogger(__name__)


class WorkerSupply:
    """Makes workers, so many at a time, and keeps some started ahead."""

    def __init__(
        self,
        make_worker: Callable[[], Worker],
        *,
        spares: int,
        max_starts: int,
        limits: Limits,
        stats: PoolStats,
    ) -> None:
        """Makes nothing yet.

        Args:
            make_worker: Makes a worker that is not started.
            spares: Started workers that `keep_ready` keeps.
            max_starts: Workers that start at once.
            limits: How long a start, and closing a spare worker, may take.
            stats: Where starts are counted.
        """
        self._make_worker = make_worker
        self._wanted = spares
        self._limits, self._stats = limits, stats
        self._spares: list[tuple[Worker, EnvFacts]] = []
        self._taken = anyio.Event()
        self._first: EnvFacts | None = None
        self.turn = anyio.Semaphore(max_starts, fast_acquire=True)
        """Held while a worker starts."""

    @property
    def wants_spares(self) -> bool:
        """Whether any are to be kept."""
        return self._wanted > 0

    def check_spaces(self, facts: EnvFacts) -> None:
        """That an environment has the spaces of the first one, as their batch needs it.

        Raises:
            EnvTypeError: It has others.
        """
        first = self._first = self._first or facts
        for name in ("observation_space", "action_space"):
            expected, got = getattr(first, name), getattr(facts, name)
            if got != expected:
                raise EnvTypeError(
                    f"the {name} is {got}, but that of the pool's first environment is {expected}"
                )

    def make(self) -> Worker:
        """A new worker, not started."""
        self._stats.built += 1
        return self._make_worker()

    def take(self) -> tuple[Worker, EnvFacts] | None:
        """A started worker that is still alive, if one is ready."""
        while self._spares:
            worker, facts = self._spares.pop(0)
            self._taken.set()
            if not worker.is_lost:
                return worker, facts
        return None

    async def keep_ready(self) -> None:
        """Starts workers ahead until it is cancelled; one that fails is tried again at the next demand."""
        while True:
            self._taken = anyio.Event()
            while len(self._spares) < self._wanted:
                async with self.turn:
                    started = await self._start()
                if started is None:
                    break
                self._spares.append(started)
            await self._taken.wait()

    async def aclose(self) -> None:
        """Closes the spare workers, within the limit of closing one."""
        spares, self._spares = self._spares, []
        async with anyio.create_task_group() as group:
            for worker, _ in spares:
                group.start_soon(self._close, worker)

    async def _start(self) -> tuple[Worker, EnvFacts] | None:
        worker = self.make()
        try:
            with anyio.fail_after(self._limits.start_timeout_s):
                started = worker.start()
                return worker, started.value if isinstance(started, Finished) else await started
        except Exception as error:
            # Whoever needs one will start it, and be told.
            log.warning(
                "a spare environment could not be made: %s: %s", type(error).__name__, error
            )
            await self._close(worker)
            return None
        except BaseException:
            await self._close(worker)
            raise

    async def _close(self, worker: Worker) -> None:
        with anyio.move_on_after(self._limits.close_timeout_s, shield=True):
            try:
                await worker.aclose()
            except (Exception, SystemExit) as error:
                self._stats.close_failures += 1
                log.warning(
                    "closing a spare environment raised %s: %s", type(error).__name__, error
                )
