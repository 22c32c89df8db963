"""What the embedded engine does with clients that die, callers that crowd, and sizes at their limits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from flax import nnx

from gymllm.engine import FinishReason, GenerateRequest, Generation, SamplingParams
from gymllm.errors import ClosedError, EngineError
from gymllm.timeline import Timeline
from gymllm_trainers.engine import EngineConfig, JaxEngine
from gymllm_trainers.engine.kernels import load
from gymllm_trainers.engine.programs import Programs
from gymllm_trainers.engine.publication import Publisher
from gymllm_trainers.engine.requests import Request
from gymllm_trainers.engine.tickets import Ticket
from gymllm_trainers.models import Decoder

LENGTH = 64
CONFIG = EngineConfig(
    slots=4, context_length=LENGTH, small_batch=4, prefill_tokens=(32,), page_size=8
)


@pytest.fixture(scope="module")
def decoders(make_decoder: Callable[..., Decoder]) -> list[Decoder]:
    return [make_decoder(seed) for seed in range(2)]


@pytest.fixture(scope="module")
def compiled(decoders: list[Decoder]) -> Programs:
    graph, state = nnx.split(decoders[0])
    programs = Programs(graph, state, CONFIG.resolved(decoders[0].config), kernels=load())
    programs.compile()
    return programs


@pytest.fixture
def engine(
    decoders: list[Decoder], compiled: Programs, monkeypatch: pytest.MonkeyPatch
) -> Iterator[JaxEngine]:
    """Takes what was compiled once instead of compiling it again; others of other sizes compile anew."""
    compile_all = Programs.compile

    def take(self: Programs, log: Callable[[str], None] = lambda name: None) -> None:
        if self._config != compiled._config:
            return compile_all(self, log)
        self._forwards, self._bursts = compiled._forwards, compiled._bursts
        self._samplers = compiled._samplers
        self._copy = compiled._copy

    monkeypatch.setattr(Programs, "compile", take)
    with serving(decoders[0], CONFIG) as engine:
        yield engine


@contextmanager
def serving(decoder: Decoder, config: EngineConfig) -> Iterator[JaxEngine]:
    engine = JaxEngine(decoder, config, timeline=Timeline())
    try:
        assert engine.ready.wait(120)
        yield engine
    finally:
        asyncio.run(engine.aclose())
        assert not engine._thread.is_alive()


def ask(ids: list[int], *, new: int = 8, seed: int = 0) -> GenerateRequest:
    return GenerateRequest(prompt_ids=ids, sampling=SamplingParams(max_new_tokens=new, seed=seed))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what another thread does has no event
            await asyncio.sleep(0)


def answer(engine: JaxEngine, request: GenerateRequest) -> Generation:
    return asyncio.run(engine.generate(request))


def assert_unharmed(engine: JaxEngine) -> None:
    asyncio.run(until(lambda: engine.running == engine.waiting == 0))
    assert not engine._tickets
    assert engine.free_pages == engine.config.total_pages - 1
    assert len(answer(engine, ask([1], new=3)).token_ids) == 3


# ---------------------------------------------------------------------- clients


def test_requests_of_a_loop_that_died_end(engine: JaxEngine) -> None:
    engine.pause()
    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(engine.generate(ask([n], new=10**9))) for n in range(8)]
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()  # nobody cancels them
    assert engine.waiting == 8
    engine.resume()
    assert_unharmed(engine)
    assert engine.counts.generated_tokens <= 8 * 2 + 3
    for task in tasks:
        task._log_destroy_pending = False  # what else asyncio has to say of such a loop
        task.get_coro().close()


def test_two_thousand_requests_at_once(engine: JaxEngine) -> None:
    async def crowd() -> list[Generation]:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(engine.generate(ask([n % 7, n % 5], new=2, seed=n % 35)))
                for n in range(2_000)
            ]
        return [task.result() for task in tasks]

    answers = asyncio.run(crowd())
    for number, one in enumerate(answers):
        assert one.token_ids.tolist() == answers[number % 35].token_ids.tolist()
    assert_unharmed(engine)


def test_a_streams_last_tokens_come_with_their_end() -> None:
    """The stream's thread may look at any moment of the engine's: here in the midst of a token."""
    seen: list[tuple[int, FinishReason | None]] = []

    class Curious:
        def push(self, token_id: int) -> str | None:
            seen.append(ticket.news)
            return "end" if token_id == 2 else None

    ticket = Ticket(
        Request(ids=[1], prompt_length=1, max_new_tokens=9),
        SamplingParams(max_new_tokens=9, stop=("end",)),
        "",
        asyncio.new_event_loop(),
        asyncio.Event(),
        0,
        stops=Curious(),  # type: ignore[arg-type] - the real one can't look
        matcher=None,
        streaming=True,
        full=False,
    )
    ticket.loop.close()
    for token in (1, 2):
        ticket.take(token, context_length=LENGTH)
        seen.append(ticket.news)
    assert seen == [(0, None), (1, None), (1, None), (2, FinishReason.STOP)]


# ---------------------------------------------------------------------- publications


def test_publications_from_several_threads(engine: JaxEngine, decoders: list[Decoder]) -> None:
    """Weights of one and the version of another never meet."""
    states = [nnx.state(decoder) for decoder in decoders]
    expected = []
    for state in states:
        engine.publish(state, engine.version + 10)
        expected.append(answer(engine, ask([1, 2, 3])).token_ids.tolist())
    assert expected[0] != expected[1]
    start = threading.Barrier(4)

    def publish(thread: int) -> None:
        start.wait(10)
        for number in range(10):
            version = 1_000 * (1 + thread + 4 * number)
            engine.publish(states[version // 1_000 % 2], version)

    threads = [threading.Thread(target=publish, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    one = answer(engine, ask([1, 2, 3]))
    assert set(one.versions.tolist()) == {engine.version}
    assert one.token_ids.tolist() == expected[engine.version // 1_000 % 2]


def test_publications_while_closing_are_taken_or_refused(
    engine: JaxEngine, decoders: list[Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, closed = threading.Event(), threading.Event()
    check = Publisher.check

    def slow(self: Publisher, state: object) -> object:
        whole = check(self, state)
        checked.set()
        assert closed.wait(10)
        return whole

    monkeypatch.setattr(Publisher, "check", slow)
    refused: list[BaseException] = []

    def publish() -> None:
        try:
            engine.publish(nnx.state(decoders[1]), 1)
        except ClosedError as error:
            refused.append(error)

    thread = threading.Thread(target=publish)
    thread.start()
    assert checked.wait(10)
    asyncio.run(engine.aclose())
    closed.set()
    thread.join(10)
    assert len(refused) == 1
    assert engine.version == 0


@pytest.mark.parametrize("program", ["sample_plain", "sample_full", "copy"])
def test_whatever_program_breaks_everyone_hears_of_it(
    engine: JaxEngine, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine._programs, program, fail)
    requests = [ask([*range(1, 21), n], new=40, seed=n) for n in range(8)]
    if program == "sample_full":
        cut = replace(requests[3].sampling, top_k=2)
        requests[3] = replace(requests[3], sampling=cut)

    async def everyone() -> list[Generation | BaseException]:
        async with asyncio.timeout(30):
            asks = [engine.generate(request) for request in requests]
            return await asyncio.gather(*asks, return_exceptions=True)

    answers = asyncio.run(everyone())
    assert any(isinstance(each, EngineError) for each in answers)
    for each in answers:
        assert isinstance(each, Generation) or "device lost" in str(each)
    with pytest.raises(EngineError, match="device lost"):
        answer(engine, ask([1]))
    assert not engine._tickets


# ---------------------------------------------------------------------- sizes


def test_lengths_at_their_limits(engine: JaxEngine) -> None:
    long = answer(engine, ask([1], new=10**12))
    assert len(long.token_ids) == LENGTH - 1
    assert long.finish_reason is FinishReason.LENGTH
    full = answer(engine, ask([n % 60 for n in range(LENGTH - 1)], new=10**12))
    assert len(full.token_ids) == 1
    assert full.finish_reason is FinishReason.LENGTH
    assert_unharmed(engine)


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": 1, "small_batch": 1},
        {"page_size": 1, "prefill_tokens": (8,)},
        {
            "page_size": 3,
            "pages": 23,
        },  # exactly one conversation, and the page that padding goes to
        {"page_size": 100},  # more than the context
        {"page_size": 64, "prefill_tokens": (1,), "pages": 2},
    ],
    ids=str,
)
def test_sizes_change_nothing_but_speed(
    engine: JaxEngine, decoders: list[Decoder], changes: dict[str, object]
) -> None:
    requests = [ask([*range(n, 21), n], new=3 + 5 * n, seed=n) for n in range(8)]
    requests.append(ask([n % 60 for n in range(LENGTH - 1)], new=5))

    async def everyone(engine: JaxEngine) -> list[Generation]:
        async with asyncio.timeout(60):
            return await asyncio.gather(*(engine.generate(request) for request in requests))

    expected = asyncio.run(everyone(engine))
    with serving(decoders[0], replace(CONFIG, **changes)) as other:
        answers = asyncio.run(everyone(other))
        assert_unharmed(other)
    for left, right in zip(expected, answers, strict=True):
        np.testing.assert_array_equal(left.token_ids, right.token_ids)
        np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-5)
