"""Steps that generate several tokens for each request: the same as one token a step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from flax import nnx

from gymllm.engine import FinishReason, GenerateRequest, Generation, SamplingParams
from gymllm.timeline import Timeline
from gymllm_agents import train_tokenizer
from gymllm_trainers.engine import Delta, EngineConfig, JaxEngine
from gymllm_trainers.engine.kernels import load
from gymllm_trainers.engine.programs import Programs
from gymllm_trainers.models import Decoder

LENGTH = 128
TOKENIZER = train_tokenizer(["user\nassistant\ncoin "] * 50, vocab_size=270)
CONFIG = EngineConfig(
    slots=4, context_length=LENGTH, small_batch=4, prefill_tokens=(32,), page_size=8, burst=8
)
Said = tuple[list[int], list[float], list[float]]


@pytest.fixture(scope="module")
def decoders(make_decoder: Callable[..., Decoder]) -> list[Decoder]:
    return [make_decoder(seed, vocab_size=TOKENIZER.vocab_size) for seed in range(2)]


@pytest.fixture(scope="module")
def compiled(decoders: list[Decoder]) -> Programs:
    graph, state = nnx.split(decoders[0])
    programs = Programs(graph, state, CONFIG.resolved(decoders[0].config), kernels=load())
    programs.compile()
    return programs


@pytest.fixture
def made(compiled: Programs, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has engines take what was compiled once; gets how many requests each burst had."""
    done: list[int] = []
    burst = Programs.burst

    def take(self: Programs, log: Callable[[str], None] = lambda name: None) -> None:
        self._forwards, self._samplers = compiled._forwards, compiled._samplers
        self._bursts, self._copy = compiled._bursts, compiled._copy

    def counted(self: Programs, rows: int, *rest: object) -> object:
        count, _ = rest[-2:]
        done.append(count)
        return burst(self, rows, *rest)

    monkeypatch.setattr(Programs, "compile", take)
    monkeypatch.setattr(Programs, "burst", counted)
    return done


@contextmanager
def serving(decoder: Decoder, *, burst: int = 8) -> Iterator[JaxEngine]:
    config = replace(CONFIG, burst=burst)
    engine = JaxEngine(decoder, config, timeline=Timeline(), tokenizer=TOKENIZER)
    try:
        assert engine.ready.wait(120)
        yield engine
    finally:
        asyncio.run(engine.aclose())


def ask(ids: Sequence[int], **sampling: object) -> GenerateRequest:
    return GenerateRequest(prompt_ids=ids, sampling=SamplingParams(**sampling))


def prompt(seed: int, size: int) -> list[int]:
    return np.random.default_rng(seed).integers(TOKENIZER.vocab_size, size=size).tolist()


async def gather(engine: JaxEngine, *requests: GenerateRequest) -> list[Generation]:
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.generate(one)) for one in requests]
    return [task.result() for task in tasks]


async def alone(engine: JaxEngine, request: GenerateRequest) -> Generation:
    return (await gather(engine, request))[0]


def said(one: Generation) -> Said:
    assert one.base_logprobs is not None
    return one.token_ids.tolist(), one.logprobs.tolist(), one.base_logprobs.tolist()


async def everything(engine: JaxEngine) -> list[Generation]:
    """Answers of all kinds."""
    # Lengths that are no multiple of a burst's.
    plain = [
        ask(prompt(n, 5 + n), max_new_tokens=60 + n, seed=n, temperature=n / 2) for n in range(3)
    ]
    answers = await gather(engine, *plain)
    assert [len(one.token_ids) for one in answers] == [60, 61, 62]
    whole = answers[2].token_ids.tolist()
    for at in range(26, 42, 3):
        if whole[at] in whole[:at]:
            continue
        sampling = replace(plain[2].sampling, stop_token_ids=(whole[at],))
        stopped = await alone(engine, replace(plain[2], sampling=sampling))
        assert stopped.token_ids.tolist() == whole[: at + 1]
        assert (stopped.matched, stopped.finish_reason) == (whole[at], FinishReason.STOP)
        # What a burst made past the end is nothing to who goes on from there, but its pages are found.
        on = ask([*plain[2].prompt_ids, *whole[: at + 1], 7, 9], max_new_tokens=30, seed=3)
        fresh = await alone(engine, on)
        assert fresh.reused_tokens >= (len(on.prompt_ids) - 3) // 8 * 8
        answers += [stopped, fresh]
    text = TOKENIZER.decode(whole, skip_special=False)
    half = len(text) // 2
    stop = next(end for at in range(half, len(text)) if text.index(end := text[at : at + 3]) == at)
    sampling = replace(plain[2].sampling, stop=(stop,))
    cut = await alone(engine, replace(plain[2], sampling=sampling))
    assert cut.matched == stop
    assert cut.token_ids.tolist() == whole[: len(cut.token_ids)]
    long = await alone(engine, ask(prompt(9, 20), max_new_tokens=10**9))
    assert len(long.token_ids) == LENGTH - 20
    assert long.finish_reason is FinishReason.LENGTH
    # A stream, beside which one needs the full sampler for a while.
    deltas: list[Delta] = []

    async def stream() -> None:
        deltas.extend([delta async for delta in engine.stream(plain[2])])

    full = ask(prompt(5, 6), max_new_tokens=12, top_k=9)
    _, beside = await asyncio.gather(stream(), alone(engine, full))
    assert [token for delta in deltas for token in delta.token_ids] == whole
    assert [each for delta in deltas for each in delta.logprobs] == answers[2].logprobs.tolist()
    engine.clear_cache()
    return [*answers, cut, long, beside, await alone(engine, full)]


def test_bursts_change_nothing(decoders: list[Decoder], made: list[int]) -> None:
    with serving(decoders[0], burst=1) as engine:
        exact = engine._kernels is not None
        singly = [said(one) for one in asyncio.run(everything(engine))]
        steps = engine.counts.steps
    assert not made
    with serving(decoders[0]) as engine:
        bursting = [said(one) for one in asyncio.run(everything(engine))]
        assert engine.counts.steps < 0.8 * steps
        assert engine.counts.computed_tokens >= engine.counts.generated_tokens
    assert {1, 3} <= set(made)
    if exact:
        assert bursting == singly
        assert singly[-1] == singly[-2]  # with neighbours and alone
    else:
        assert [one[0] for one in bursting] == [one[0] for one in singly]


def test_each_token_says_its_version(decoders: list[Decoder], made: list[int]) -> None:
    states = [nnx.state(decoder) for decoder in decoders]
    request = ask(prompt(1, 8), max_new_tokens=LENGTH - 8)

    async def publishing(engine: JaxEngine) -> tuple[list[int], list[int]]:
        tokens, told, version = list[int](), list[int](), 0
        async for delta in engine.stream(request):
            tokens += delta.token_ids
            told += delta.versions
            # A stream may fall behind by several steps; each publication is seen before the next one.
            if len(tokens) > 20 and told[-1] == version < 3:
                version += 1
                engine.publish(states[version % 2], version)
        return tokens, told

    with serving(decoders[0]) as engine:
        tokens, told = asyncio.run(publishing(engine))
        assert len(tokens) == LENGTH - 8
        assert told == sorted(told)
        assert told[-1] >= 1
        assert engine.counts.publications >= told[-1]
        # Made with the same weights, what comes before the first publication is the same, and no more.
        first = told.index(1)
        engine.publish(states[0], 9)
        again = asyncio.run(alone(engine, request)).token_ids.tolist()
        assert again[:first] == tokens[:first]
    assert made


def test_cancelling_amid_bursts_frees_everything(decoders: list[Decoder], made: list[int]) -> None:
    async def cancel(engine: JaxEngine) -> None:
        async with asyncio.timeout(60):
            tasks = [
                asyncio.ensure_future(
                    engine.generate(ask(prompt(n, 4), max_new_tokens=10**9, seed=n))
                )
                for n in range(3)
            ]
            while len(made) < 2:  # noqa: ASYNC110 - what another thread does has no event
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            while engine.running or engine.waiting or engine._flight:  # noqa: ASYNC110
                await asyncio.sleep(0)

    with serving(decoders[0]) as engine:
        asyncio.run(cancel(engine))
        assert engine.free_pages == engine.config.total_pages - 1
        assert not engine._tickets
        one = asyncio.run(alone(engine, ask(prompt(0, 4), max_new_tokens=40)))
        assert len(one.token_ids) == 40


def test_a_bursts_cache_is_written_in_place(compiled: Programs) -> None:
    cache = compiled.new_cache()
    size = sum(part.nbytes for part in cache)
    for burst in compiled._bursts.values():
        memory = burst.memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes >= size
        assert memory.temp_size_in_bytes < size
