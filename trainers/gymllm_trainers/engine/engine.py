"""The engine's thread, and the async face in front of it.

The thread owns the device: it admits requests, runs one step after another and swaps weights between two
steps, so weights never wait for a generation to end and each token knows the version that made it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from gymllm.engine import GenerateRequest, Generation
from gymllm.errors import ClosedError, ContextLengthError, EngineError
from gymllm.timeline import Timeline
from gymllm_trainers.engine.config import EngineConfig
from gymllm_trainers.engine.programs import Programs, Sampled, empty_inputs
from gymllm_trainers.engine.slots import Request, SlotScheduler, Step
from gymllm_trainers.models.decoder import Decoder

Tree = Any
"""A pytree of arrays."""


@dataclass(eq=False)
class _Ticket:
    """A request and who waits for it."""

    request: Request
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]
    queued_ns: int
    started_ns: int = 0


@dataclass
class EngineCounts:
    """Totals since the start."""

    steps: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    requests: int = 0
    publications: int = 0
    computed_tokens: int = 0
    """Tokens of the shapes that ran, padding included."""


class JaxEngine:
    """Serves one decoder from this process; an `Engine`. Its event loop must be asyncio's."""

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        *,
        timeline: Timeline,
        version: int = 0,
        name: str = "engine",
        log: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Starts the engine's thread, which compiles first; requests wait meanwhile.

        Args:
            decoder: The model, without adapters. Its arrays are shared, never written to.
            config: Sizes.
            timeline: Where spans go.
            version: Policy version of these weights.
            name: What its clock and its thread are called.
            log: Called with each program's name as it is compiled.
        """
        self.config = config
        self.counts = EngineCounts()
        self.idle_cause: Callable[[], str] = lambda: "waiting: requests"
        """Says why there is nothing to do; the answer becomes the clock's state."""
        graph, state = nnx.split(decoder)
        self._vocabulary = decoder.config.vocab_size
        self._programs = Programs(graph, state, config)
        self._state, self._version = state, version
        self._next: tuple[Tree, int] | None = None
        self._log = log
        self._timeline, self._clock = timeline, timeline.clock(name)
        self._slots = SlotScheduler(config)
        self._tickets: dict[Request, _Ticket] = {}
        self._new: list[_Ticket] = []
        self._wake = threading.Condition()
        self._closed = False
        self._broken: BaseException | None = None
        self.ready = threading.Event()
        """Set once everything is compiled."""
        # A daemon, so that a program that won't end can't keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ the async face

    @property
    def context_length(self) -> int:
        """Tokens of prompt and generation together."""
        return self.config.context_length

    @property
    def version(self) -> int:
        """Version of the weights that the next step runs with."""
        following = self._next
        return following[1] if following else self._version

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return self._slots.waiting + len(self._new)

    @property
    def running(self) -> int:
        """Requests with a slot."""
        return self._slots.running

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generates; see `gymllm.engine.Engine`.

        Raises:
            ContextLengthError: The prompt fills the context.
            EngineError: The prompt is empty or has ids outside the vocabulary, or the engine broke.
            ClosedError: The engine was closed before.
        """
        prompt = [int(i) for i in request.prompt_ids]
        self._check(prompt, request.request_id)
        loop = asyncio.get_running_loop()
        ticket = _Ticket(
            Request(sampling=request.sampling, ids=prompt, prompt_length=len(prompt)),
            loop,
            loop.create_future(),
            time.perf_counter_ns(),
        )
        with self._wake:
            self._refuse_if_down()
            self._new.append(ticket)
            self._wake.notify()
        try:
            await ticket.future
        except asyncio.CancelledError:
            ticket.request.cancelled = True
            with self._wake:
                self._wake.notify()
            raise
        done = ticket.request
        assert done.finish is not None, "an engine answers only finished requests"
        return Generation(
            token_ids=np.array(done.ids[done.prompt_length :], np.int32),
            logprobs=np.array(done.logprobs, np.float32),
            versions=np.array(done.versions, np.int32),
            finish_reason=done.finish,
            queued_s=(ticket.started_ns - ticket.queued_ns) / 1e9,
        )

    def publish(self, state: Tree, version: int) -> None:
        """Gives the engine new weights, used from its next step on; requests go on meanwhile.

        Args:
            state: As `nnx.state` of the decoder that the engine was made with. Shared, not copied.
            version: Their policy version.
        """
        with self._wake:
            self._next = (state, version)
            self._wake.notify()

    async def aclose(self) -> None:
        """Ends every request with `EngineError`, and the thread; waits for a step, not for requests."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        while self._thread.is_alive():  # noqa: ASYNC110 - a thread has no event to wait for
            await asyncio.sleep(0.005)

    def _check(self, prompt: list[int], name: str) -> None:
        where = f" (request {name})" if name else ""
        if len(prompt) >= self.config.context_length:
            raise ContextLengthError(
                f"a prompt of {len(prompt)} tokens leaves no room in engine.context_length = "
                f"{self.config.context_length}{where}: shorten it or raise the limit."
            )
        if not prompt:
            raise EngineError(f"the prompt is empty{where}; it needs at least one token.")
        if min(prompt) < 0 or max(prompt) >= self._vocabulary:
            bad = next(i for i in prompt if not 0 <= i < self._vocabulary)
            raise EngineError(
                f"token id {bad} is outside the model's vocabulary of {self._vocabulary}{where}: is "
                f"this the model's own tokenizer?"
            )

    def _refuse_if_down(self) -> None:
        if self._broken is not None:
            raise EngineError(f"the engine broke: {self._broken!r}") from self._broken
        if self._closed:
            raise ClosedError("the engine is closed.")

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            with self._clock.during("compile"):
                self._programs.compile(self._compiling)
                self._cache = self._programs.new_cache()
            self.ready.set()
            while not self._closed:
                if not self._work():
                    self._rest()
        except BaseException as error:  # whatever it is, whoever waits must hear of it
            if not self._closed:
                self._broken = error
        finally:
            self.ready.set()
            self._clock.enter("closed")
            self._fail_everything()

    def _compiling(self, name: str) -> None:
        if self._closed:
            raise ClosedError("closed while compiling")
        self._log(name)

    def _rest(self) -> None:
        with self._wake:
            if not (self._new or self._next or self._closed):
                self._clock.enter(self.idle_cause())
                self._wake.wait(0.05)  # wakes to ask for the cause again

    def _work(self) -> bool:
        """Runs one step; False if there is nothing to do."""
        with self._wake:
            new, self._new = self._new, []
            following, self._next = self._next, None
        if following:
            self._state, self._version = following
            self.counts.publications += 1
        for ticket in new:
            self._tickets[ticket.request] = ticket
            self._slots.add(ticket.request)
        for request in self._slots.drop_cancelled():
            self._tickets.pop(request, None)
        self._admit()
        step = self._slots.next_step()
        if step is None:
            return False
        self._clock.enter("decode" if step.chunk == 1 else "prefill")
        sampled = self._launch(step)
        tokens, logprobs = np.asarray(sampled.token), np.asarray(sampled.logprob)
        ended = self._slots.advance(step, tokens.tolist(), logprobs.tolist(), self._version)
        self._count(step)
        self._deliver(ended)
        return True

    def _admit(self) -> None:
        before = self._slots.running
        for copy in self._slots.admit(self._version):
            self._cache = self._programs.copy(self._cache, copy.source, copy.target)
        if self._slots.running != before:
            now = time.perf_counter_ns()
            for ticket in self._tickets.values():
                if ticket.request.slot >= 0 and not ticket.started_ns:
                    ticket.started_ns = now

    def _launch(self, step: Step) -> Sampled:
        inputs = empty_inputs(step.batch_rows, step.chunk, slots=self.config.slots)
        for index, row in enumerate(step.rows):
            inputs.tokens[index, : len(row.tokens)] = row.tokens
            inputs.slot[index] = row.slot
            inputs.start[index] = row.start
            inputs.valid[index] = len(row.tokens)
            inputs.temperature[index] = row.request.sampling.temperature
            inputs.seed[index] = row.request.sampling.seed & 0xFFFFFFFF
        sampled, self._cache = self._programs.step(self._state, self._cache, inputs)
        return sampled

    def _count(self, step: Step) -> None:
        counts = self.counts
        counts.steps += 1
        counts.computed_tokens += step.batch_rows * step.chunk
        counts.generated_tokens += sum(row.last for row in step.rows)
        if step.chunk > 1:
            counts.prefill_tokens += sum(len(row.tokens) for row in step.rows)

    def _deliver(self, ended: list[Request]) -> None:
        """Hands results over, with one wake-up an event loop."""
        loops: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        for request in ended:
            ticket = self._tickets.pop(request)
            self.counts.requests += 1
            loops.setdefault(ticket.loop, []).append(ticket.future)
        for loop, futures in loops.items():
            _call(loop, _resolve, futures)

    def _fail_everything(self) -> None:
        with self._wake:
            self._closed = True
            left = [*self._tickets.values(), *self._new]
            self._tickets, self._new = {}, []
        why = f"the engine broke: {self._broken!r}" if self._broken else "the engine was closed."
        for ticket in left:
            _call(ticket.loop, _fail, ticket.future, why)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        # The loop is closed: nobody waits any more.
        return


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def _fail(future: asyncio.Future[None], why: str) -> None:
    if not future.done():
        future.set_exception(EngineError(why))
