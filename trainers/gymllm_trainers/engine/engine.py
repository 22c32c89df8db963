"""The engine's thread, and the async face in front of it.

The thread owns the device. It starts step n + 1 before it reads what step n sampled: the ids stay on the
device for the next step, and the host's work is done while the device computes. Weights are swapped
between two steps, so they never wait for a generation to end, and each token knows the version that made
it.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from gymllm.engine import GenerateRequest, Generation
from gymllm.errors import ClosedError, ConfigError, EngineError, GymLLMError
from gymllm.timeline import Timeline
from gymllm_agents.tokenizer import Tokenizer
from gymllm_trainers.engine.batch import pack_step
from gymllm_trainers.engine.config import EngineConfig
from gymllm_trainers.engine.desk import Desk
from gymllm_trainers.engine.kernels import Kernels, load, unavailable
from gymllm_trainers.engine.programs import (
    Programs,
    plain_inputs,
    unpack_sampled,
)
from gymllm_trainers.engine.publication import Publisher
from gymllm_trainers.engine.requests import Request, Step
from gymllm_trainers.engine.sampling import FullInputs, PlainInputs, uniform
from gymllm_trainers.engine.scheduler import Scheduler
from gymllm_trainers.engine.tickets import (
    Delta,
    Ticket,
    delta_of,
    fill_inputs,
    generation_of,
    likeliest,
    no_numbers,
    tell,
)
from gymllm_trainers.models.decoder import Decoder

Tree = Any
"""A pytree of arrays."""

_SEEDS = 2**64 - 1


@dataclass
class EngineCounts:
    """Totals since the start."""

    steps: int = 0
    prefill_tokens: int = 0
    """Prompt tokens that were computed."""
    reused_tokens: int = 0
    """Prompt tokens that were found computed."""
    generated_tokens: int = 0
    requests: int = 0
    publications: int = 0
    preemptions: int = 0
    computed_tokens: int = 0
    """Tokens of the shapes that ran, padding included."""


@dataclass(frozen=True)
class _Flight:
    """A step on the device."""

    step: Step
    samples: list[int]
    """The scheduler's number of each result."""
    tickets: list[Ticket]
    """Who each result is for."""
    packed: Array
    previous: Array
    top: tuple[Array, Array] | None
    version: int


class JaxEngine:
    """Serves one decoder from this process; an `Engine`. Its event loop must be asyncio's."""

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        *,
        timeline: Timeline,
        tokenizer: Tokenizer | None = None,
        version: int = 0,
        name: str = "engine",
        mesh: Mesh | None = None,
        log: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Starts the engine's thread, which compiles first; requests wait meanwhile.

        Args:
            decoder: The model, with or without adapters. Its arrays are shared, never written to, where their
                dtype is its `compute_dtype`; others are converted once.
            config: Sizes.
            timeline: Where spans go.
            tokenizer: The model's; without it, stop strings and grammars are refused.
            version: Policy version of these weights.
            name: What its clock and its thread are called.
            mesh: Where the decoder's arrays are, if on several devices.
            log: Called with each program's name as it is compiled, and with what there is to say of kernels.
        """
        graph, state = nnx.split(decoder)
        self._publisher = Publisher(graph, state, compute_dtype=decoder.compute_dtype)
        state = self._publisher.state
        self.config = config = config.resolved(decoder.config)
        self.counts = EngineCounts()
        self.idle_cause: Callable[[], str] = lambda: "waiting: requests"
        """Says why there is nothing to do; the answer becomes the clock's state."""
        self._desk = Desk(
            vocabulary=decoder.config.vocab_size,
            context_length=config.context_length,
            tokenizer=tokenizer,
        )
        self._kernels = _kernels(config, mesh, log)
        self._programs = Programs(graph, state, config, kernels=self._kernels, mesh=mesh)
        self._leaves, self._version = jax.tree.leaves(state), version
        self._next: tuple[list[Array], int] | None = None
        self._publishing = threading.Lock()
        """What is published from several threads is taken one after another."""
        self._log = log
        self._timeline, self._clock = timeline, timeline.clock(name)
        self._scheduler = Scheduler(config, version=version)
        self._tickets: dict[Request, Ticket] = {}
        self._new: list[Ticket] = []
        self._cancelled: list[Ticket] = []
        self._flight: _Flight | None = None
        self._nothing = np.zeros(config.slots, np.int32)
        self._wake = threading.Condition()
        self._paused = False
        self._forget = False
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
    def closed(self) -> bool:
        """Whether it takes no more requests: closed, or broken."""
        return self._closed

    @property
    def waiting(self) -> int:
        """Requests that hold no pages yet."""
        return self._scheduler.waiting + len(self._new)

    @property
    def running(self) -> int:
        """Requests that hold pages."""
        return self._scheduler.running

    @property
    def free_pages(self) -> int:
        """Pages that nobody reads; what they hold may still be reused."""
        return self._scheduler.free_pages

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generates; see `gymllm.engine.Engine`.

        Raises:
            ContextLengthError: The prompt fills the context.
            ConfigError: Something in `request.sampling` can't be honoured.
            EngineError: The prompt is empty or has ids outside the vocabulary, the model's logits are not
                numbers, or the engine broke.
            ClosedError: The engine was closed before.
        """
        ticket = self._submit(request, streaming=False)
        try:
            await ticket.wake.wait()
        except asyncio.CancelledError:
            self._cancel(ticket)
            raise
        return generation_of(ticket)

    async def generate_n(self, request: GenerateRequest, n: int) -> list[Generation]:
        """Generates n answers to one prompt, which is computed once; the i-th has seed `seed + i`.

        Raises:
            ConfigError: n < 1.
            EngineError: As `generate`, for any of them; the others are cancelled.
        """
        if n < 1:
            raise ConfigError(f"n must be >= 1, got {n}.")
        tickets: list[Ticket] = []
        try:
            for number in range(n):
                own = replace(request.sampling, seed=request.sampling.seed + number)
                tickets.append(self._submit(replace(request, sampling=own), streaming=False))
            for ticket in tickets:
                await ticket.wake.wait()
            return [generation_of(ticket) for ticket in tickets]
        finally:
            for ticket in tickets:
                if not ticket.ended:
                    self._cancel(ticket)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """Generates, and tells of tokens as they come; closing the generator cancels.

        Raises:
            As `generate`.
        """
        ticket = self._submit(request, streaming=True)
        try:
            while True:
                await ticket.wake.wait()
                ticket.wake.clear()
                if ticket.error:
                    raise EngineError(ticket.error)
                have, finish = ticket.news
                if have > ticket.told:
                    yield delta_of(ticket, have, finish)
                if finish is not None:
                    return
        finally:
            if not ticket.ended:
                self._cancel(ticket)

    def publish(self, state: Tree, version: int) -> None:
        """Gives the engine new weights, used from its next step on; requests go on meanwhile.

        Blocks while the weights are checked, so call it from a thread where that matters.

        Args:
            state: As `nnx.state` of the decoder that the engine was made with, or of its adapters alone
                (`nnx.state(decoder, LoRAParam)`). Shared, not copied, where the dtypes agree.
            version: Their policy version, an integer from 0 to 2**31 - 1. If it is not above the present one,
                nothing computed so far is reused.

        Raises:
            ConfigError: Not such a version.
            ModelError: Names or shapes are others, or a number is NaN or infinite; the weights that there
                were stay. Other dtypes are converted.
            ClosedError: The engine was closed before, or meanwhile.
        """
        self._refuse_if_down()
        # Each token's is kept as int32.
        if type(version) is not int or not 0 <= version < 2**31:
            raise ConfigError(
                f"version must be an integer from 0 to {2**31 - 1}, got {repr(version)[:100]}."
            )
        with self._publishing:
            checked = self._publisher.check(state)
            with self._wake:
                self._refuse_if_down()
                self._next = (jax.tree.leaves(checked), version)
                self._wake.notify()

    def pause(self) -> None:
        """No step is started until `resume`; requests keep what they have."""
        with self._wake:
            self._paused = True

    def resume(self) -> None:
        """Goes on after `pause`."""
        with self._wake:
            self._paused = False
            self._wake.notify()

    def clear_cache(self) -> None:
        """Forgets the keys and values that no running request reads."""
        with self._wake:
            self._forget = True
            self._wake.notify()

    async def aclose(self) -> None:
        """Ends every request with `EngineError`, and the thread; waits for a step, not for requests."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        while self._thread.is_alive():  # noqa: ASYNC110 - a thread has no event to wait for
            await asyncio.sleep(0.005)

    # ------------------------------------------------------------------ requests

    def _submit(self, request: GenerateRequest, *, streaming: bool) -> Ticket:
        ticket = self._desk.ticket(request, streaming=streaming)
        with self._wake:
            self._refuse_if_down()
            self._new.append(ticket)
            self._wake.notify()
        return ticket

    def _cancel(self, ticket: Ticket) -> None:
        with self._wake:
            ticket.cancelled = True
            self._cancelled.append(ticket)
            self._wake.notify()

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
                self._compiling("engine publication")
                self._publisher.compile()
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
            nothing_new = not (self._new or self._cancelled or self._next or self._forget)
            if self._closed or not (nothing_new or self._paused):
                return
            self._clock.enter("paused" if self._paused else self.idle_cause())
            self._wake.wait(0.05)  # wakes to ask for the cause again

    def _work(self) -> bool:
        """Starts a step and reads the one before; False if there is nothing to do."""
        if self._flight is not None and self._flight.step.burst > 1:
            # What it brings may end requests, and another one for nothing would take as long.
            burst, self._flight = self._flight, None
            self._read(burst)
        self._take_news()
        step = None if self._paused else self._scheduler.schedule()
        before, self._flight = self._flight, None
        if step is not None:
            self._clock.enter("prefill" if step.prefill else "decode")
            self._flight = self._launch(step, before)
        if before is not None:
            self._read(before)
        return step is not None or before is not None

    def _take_news(self) -> None:
        with self._wake:
            new, self._new = self._new, []
            cancelled, self._cancelled = self._cancelled, []
            following, self._next = self._next, None
            forget, self._forget = self._forget, False
        if following:
            self._leaves, self._version = following
            self.counts.publications += 1
            recompute = self.config.on_publish == "recompute"
            self._scheduler.set_version(self._version, recompute=recompute)
        for ticket in new:
            self._tickets[ticket.request] = ticket
            self._scheduler.add(ticket.request)
        for ticket in cancelled:
            self._scheduler.cancel(ticket.request)
            self._tickets.pop(ticket.request, None)
        if forget:
            self._scheduler.clear_cache()

    def _launch(self, step: Step, before: _Flight | None) -> _Flight:
        if step.copies:
            self._cache = self._programs.copy(self._cache, list(step.copies))
        shape = (step.rows, step.blocks)
        sources = {sample: at for at, sample in enumerate(before.samples)} if before else {}
        packed, samples = pack_step(step, self._programs.layout(*shape), sources)
        previous = self._nothing if before is None else before.previous
        if step.burst > 1:
            return self._launch_burst(step, packed, samples, previous)
        hidden, self._cache = self._programs.forward(
            shape, self._leaves, self._cache, packed, previous
        )
        tickets = [self._tickets[_at(step, sample)] for sample in samples]
        now = time.perf_counter_ns()
        for ticket in (*tickets, *(self._tickets[block.request] for block in step.prefill)):
            ticket.started_ns = ticket.started_ns or now
        self._count(step)
        return self._sample(step, samples, tickets, hidden)

    def _launch_burst(
        self,
        step: Step,
        packed: npt.NDArray[np.int32],
        samples: list[int],
        previous: Array | npt.NDArray[np.int32],
    ) -> _Flight:
        tickets = [self._tickets[_at(step, sample)] for sample in samples]
        self._count(step)
        inputs = self._programs.burst_inputs(step.rows)
        self._draw(inputs, step, samples, tickets)
        sampled, previous, self._cache = self._programs.burst(
            step.rows, self._leaves, self._cache, packed, previous, len(samples), inputs
        )
        return _Flight(step, samples, tickets, sampled, previous, None, self._version)

    def _sample(
        self, step: Step, samples: list[int], tickets: list[Ticket], hidden: Array
    ) -> _Flight:
        rows = next(rows for rows in self.config.row_shapes if rows >= len(samples))
        programs, top = self._programs, None
        if any(ticket.full for ticket in tickets):
            inputs = programs.full_inputs(rows)
            self._draw(inputs, step, samples, tickets)
            for index, ticket in enumerate(tickets):
                if ticket.full:
                    try:
                        fill_inputs(inputs, index, ticket)
                    except GymLLMError as error:
                        # Its grammar can't go on; the others of the step can.
                        ticket.error = f"{error}{ticket.name}"
            packed, previous, *both = programs.sample_full(
                self._leaves, hidden, len(tickets), inputs
            )
            top = both[0], both[1]
        else:
            plain = plain_inputs(rows)
            self._draw(plain, step, samples, tickets)
            packed, previous = programs.sample_plain(self._leaves, hidden, len(tickets), plain)
        return _Flight(step, samples, tickets, packed, previous, top, self._version)

    @staticmethod
    def _draw(
        inputs: PlainInputs | FullInputs, step: Step, samples: list[int], tickets: list[Ticket]
    ) -> None:
        """Writes the temperatures and the uniform numbers that decide what is drawn."""
        count = len(tickets)
        temperature_F, uniform_F = np.asarray(inputs.temperature), np.asarray(inputs.uniform)
        # Hotter than that all tokens are as likely in float32 already.
        temperature_F[:count] = [min(ticket.sampling.temperature, 1e30) for ticket in tickets]
        seeds = np.array([ticket.sampling.seed & _SEEDS for ticket in tickets], np.uint64)
        positions = np.array([_position(step, sample) for sample in samples])
        if step.burst > 1:
            positions = positions + np.arange(step.burst)[:, None]
        uniform_F[..., :count] = uniform(seeds, positions)

    def _count(self, step: Step) -> None:
        counts, stats = self.counts, self._scheduler.stats
        counts.steps += 1
        counts.computed_tokens += step.rows * step.burst + step.blocks * self.config.page_size
        counts.prefill_tokens, counts.reused_tokens = stats.prefilled, stats.reused
        counts.preemptions = stats.preemptions

    def _read(self, flight: _Flight) -> None:
        """Takes a step's results: tokens to their requests, ends, and word to whoever waits."""
        sampled, burst = unpack_sampled(flight.packed), flight.step.burst
        tokens = sampled.token
        if burst == 1:
            tokens = [0] * (flight.step.rows + flight.step.blocks)
            for sample, token in zip(flight.samples, sampled.token, strict=False):
                tokens[sample] = token
        top = None
        if flight.top is not None:
            top = np.asarray(flight.top[0]), np.asarray(flight.top[1])
        where = {id(ticket.request): index for index, ticket in enumerate(flight.tickets)}
        told: dict[Ticket, None] = {}
        spoilt = False
        for request, token in self._scheduler.complete(flight.step, tokens):
            ticket = self._tickets.get(request)
            if ticket is None:
                continue  # a burst's tokens past the end of a request, too
            index = where[id(request)]
            if burst > 1:
                where[id(request)] += flight.step.rows  # of its next token
            if sampled.bad[index]:
                ticket.error = ticket.error or no_numbers(ticket)
                spoilt |= not (ticket.full and math.isfinite(sampled.base_logprob[index]))
            if not ticket.error:
                ticket.logprobs.append(sampled.logprob[index])
                ticket.base_logprobs.append(sampled.base_logprob[index])
                ticket.top_logprobs.append(likeliest(top, index, ticket.sampling.top_logprobs))
                ticket.versions.append(flight.version)
                self.counts.generated_tokens += 1
                ticket.take(token, context_length=self.config.context_length)
                if ticket.loop.is_closed():
                    ticket.error = "the event loop that waited for it is closed."
            if ticket.ended:
                self._scheduler.finish(request)
                del self._tickets[request]
                self.counts.requests += 1
            if ticket.ended or ticket.streaming:
                told[ticket] = None
        if spoilt:
            # Weights can be finite and what they compute not: better ones must not go on from that.
            self._scheduler.forget()
        tell(list(told))

    def _fail_everything(self) -> None:
        with self._wake:
            self._closed = True
            left = [*self._tickets.values(), *self._new]
            self._tickets, self._new = {}, []
        why = f"the engine broke: {self._broken!r}" if self._broken else "the engine was closed."
        for ticket in left:
            ticket.error = why
        tell(left)


def _kernels(config: EngineConfig, mesh: Mesh | None, log: Callable[[str], None]) -> Kernels | None:
    """The CPU's kernels where they can be had and are wanted."""
    if config.kernels == "xla":
        return None
    why = ""
    if jax.default_backend() != "cpu":
        why = f"the platform is {jax.default_backend()}"
    elif mesh is not None and mesh.size > 1:
        why = "the engine runs on several devices"
    else:
        kernels = load()
        if kernels is not None:
            return kernels
        why = unavailable() or ""
    if config.kernels == "cpu":
        raise ConfigError(
            f"engine.kernels is cpu, which can't be had: {why.rstrip('.')}. Set auto or xla."
        )
    if jax.default_backend() == "cpu":
        log(f"engine without CPU kernels: {why}")
    return None


def _at(step: Step, sample: int) -> Request:
    """Whose sample it is."""
    if sample < step.rows:
        return step.decode[sample].request
    return step.prefill[sample - step.rows].request


def _position(step: Step, sample: int) -> int:
    """Place in its sequence of what is sampled."""
    if sample < step.rows:
        return step.decode[sample].position + 1
    block = step.prefill[sample - step.rows]
    return block.start + len(block.tokens)
