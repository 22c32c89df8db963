"""`ThreadWorker`: the environment runs in a daemon thread of its own.

For environments that block. Those that wait asynchronously get an event loop in that thread, so a call
that is cancelled (its limit passed, or its episode was) is cancelled there too. A thread that blocks can't
be interrupted: one that does not end within a moment is lost, told to end if it ever can, and otherwise
left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import weakref
from collections.abc import Awaitable, Coroutine
from queue import SimpleQueue
from typing import Any

import anyio
import gymnasium

from gymllm.bridge import Finished, Inbox, LoopRunner, Reply, current_host, running_loop, start_sync
from gymllm.env import Env
from gymllm.workers.worker import EnvFacts, MakeEnv, invoke, made_by

CANCEL_GRACE_S = 0.1
"""How long a cancelled call may take to clean up before its thread counts as lost."""
STOP_LIMIT_S = 1.0
"""How long an idle thread may take to end."""

_inboxes: weakref.WeakKeyDictionary[object, Inbox] = weakref.WeakKeyDictionary()


def _inbox() -> Inbox:
    """The running loop's inbox, shared by all its threads: that is what makes one wake-up enough."""
    host = current_host()
    inbox = _inboxes.get(host)
    if inbox is None:
        inbox = _inboxes[host] = Inbox()
    return inbox


class _Call:
    """One call on its way to the thread and back."""

    def __init__(self, method: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self.method, self.args, self.kwargs = method, args, kwargs
        self.reply = Reply[object]()
        self.begun = False
        """Whether its task runs: one that is cancelled before never does."""
        self.ended = False
        self.abandoned = False
        self.task: asyncio.Task[object] | None = None
        """Where it runs, if that is a task of the thread's own loop."""


class ThreadWorker:
    """Runs one environment in a thread. Used from one loop."""

    log_tail = ""

    def __init__(self, make_env: MakeEnv, *, name: str) -> None:
        """Starts the thread.

        Args:
            make_env: Called in the thread.
            name: The thread's name.
        """
        self._make_env = make_env
        self._inbox = _inbox()
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._runner: LoopRunner | None = None  # of an environment that waits asynchronously
        self._env: gymnasium.Env[Any, Any] | None = None
        self._ended: Reply[None] | None = None
        self._stopping = False
        self.is_lost = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def start(self) -> EnvFacts:
        facts = await self._ask(_Call("start", (), {}))
        assert isinstance(facts, EnvFacts), "that is what starting answers"
        return facts

    def call(
        self, method: str, *args: object, **kwargs: object
    ) -> Finished[object] | Awaitable[object]:
        return self._ask(_Call(method, args, kwargs))

    async def aclose(self) -> None:
        try:
            if not self.is_lost:
                await self._ask(_Call("close", (), {}))
        finally:
            await self._stop()

    async def _ask(self, call: _Call) -> object:
        runner = self._runner
        if runner is None:
            self._calls.put(call)
        else:
            # trio leaves a mark in the context that makes asyncio's tasks think they are trio's.
            context = None if running_loop() is not None else contextvars.Context()
            runner.loop.call_soon_threadsafe(self._begin, runner.loop, call, context=context)
        try:
            return await call.reply.wait()
        except BaseException:
            if not call.ended:
                await self._cancel(call)
            raise

    async def _cancel(self, call: _Call) -> None:
        """Cancels a call that runs in a task, and waits a moment for any call to end."""
        ended = call.reply = Reply[object]()  # the old one was waited for and can't be again
        if self._runner is not None:
            with contextlib.suppress(RuntimeError):
                self._runner.loop.call_soon_threadsafe(self._cancel_there, call)
        # Whatever it ends with, the cancellation is what the caller gets.
        with anyio.move_on_after(CANCEL_GRACE_S, shield=True), contextlib.suppress(BaseException):
            if not call.ended:
                await ended.wait()
        self.is_lost = call.abandoned = not call.ended

    def tell_to_end(self) -> None:
        """Tells the thread to close the environment and end as soon as it can; from any thread."""
        self._stopping = True  # before the runner is looked for: the thread may be about to make it
        if self._runner is not None:
            self._runner.stop()
        self._calls.put(None)

    async def _stop(self) -> None:
        self._ended = Reply[None]()
        self.tell_to_end()
        if not self.is_lost:
            with anyio.move_on_after(STOP_LIMIT_S, shield=True):
                await self._ended.wait()
                self._thread.join(STOP_LIMIT_S)  # it has just called us as its last act

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                answer = self._serve(call)
            except BaseException as error:
                self._inbox.post(_fail, call, error)
            else:
                self._inbox.post(_answer, call, answer)
            if self._runner is not None:
                if self._stopping:  # whoever said so may not have seen the runner
                    self._runner.stop()
                self._runner.run()
        if self._env is not None:  # nobody could wait for it to be closed
            with contextlib.suppress(Exception):
                self._env.close()
        self._inbox.post(self._tell_ended)

    def _tell_ended(self) -> None:
        if self._ended is not None:
            self._ended.set(None)

    def _serve(self, call: _Call) -> object:
        if call.method == "start":
            self._env = env = made_by(self._make_env)
            if isinstance(env.unwrapped, Env) and env.unwrapped.waits:
                self._runner = LoopRunner()
            return EnvFacts.of(env)
        env = self._env
        if call.method == "close":
            self._env = None
            return env.close() if env is not None else None
        assert env is not None, "start() comes first"
        return invoke(env, call.method, call.args, call.kwargs)

    def _begin(self, loop: asyncio.AbstractEventLoop, call: _Call) -> None:
        try:
            started = start_sync(self._serve, call)
        except BaseException as error:
            self._inbox.post(_fail, call, error)
            return
        if isinstance(started, Finished):
            self._inbox.post(_answer, call, started.value)
        else:
            call.task = loop.create_task(self._finish(call, started))

    async def _finish(self, call: _Call, rest: Coroutine[object, Any, object]) -> None:
        # Answers from within the task: a callback of it would take the loop another turn.
        call.begun = True
        try:
            answer = await rest
        except BaseException as error:
            self._inbox.post(_fail, call, error)
        else:
            self._inbox.post(_answer, call, answer)

    def _cancel_there(self, call: _Call) -> None:
        if call.task is not None:
            call.task.cancel()
            if not call.begun:
                self._inbox.post(_fail, call, asyncio.CancelledError())


def _answer(call: _Call, value: object) -> None:
    call.ended = True
    if not call.abandoned:
        call.reply.set(value)


def _fail(call: _Call, error: BaseException) -> None:
    call.ended = True
    # No future takes the first, and the others would end more than this call.
    if isinstance(error, StopIteration | GeneratorExit | KeyboardInterrupt):
        error = RuntimeError(f"{type(error).__name__} was raised: {error}")
    if not call.abandoned:
        call.reply.fail(error)
