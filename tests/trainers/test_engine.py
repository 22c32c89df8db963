"""The embedded engine: what it generates, and that nobody who waits for it is forgotten."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gymllm.engine import FinishReason, GenerateRequest, Generation, SamplingParams
from gymllm.env import Env
from gymllm.errors import (
    ClosedError,
    ConfigError,
    ContextLengthError,
    EngineError,
    ModelError,
)
from gymllm.pool import EnvPool
from gymllm.rollout import AdmissionGate, Rollout, RolloutConfig
from gymllm.task import SeededTasks
from gymllm.timeline import Timeline
from gymllm.trajectory import Trajectory
from gymllm_agents import ConversationConfig, ModelAgent, Tokenizer, train_tokenizer
from gymllm_trainers.engine import Delta, EngineConfig, JaxEngine
from gymllm_trainers.engine.kernels import load
from gymllm_trainers.engine.programs import Programs
from gymllm_trainers.models import Decoder
from gymllm_trainers.models.decoder import LoRAParam, merge_adapters
from gymllm_trainers.models.logprob_head import token_statistics

LENGTH = 128
TOKENIZER = train_tokenizer(["user\nassistant\ncoin "] * 50, vocab_size=270)
VOCABULARY = TOKENIZER.vocab_size
CONFIG = EngineConfig(
    slots=4, context_length=LENGTH, small_batch=2, prefill_tokens=(32,), page_size=8, reuse_lag=1
)
MakeEngine = Callable[[], JaxEngine]


@pytest.fixture(scope="module")
def decoders(make_decoder: Callable[..., Decoder]) -> list[Decoder]:
    return [make_decoder(seed, vocab_size=VOCABULARY) for seed in range(2)]


@pytest.fixture(scope="module")
def compiled(decoders: list[Decoder]) -> Programs:
    graph, state = nnx.split(decoders[0])
    programs = Programs(
        graph,
        state,
        CONFIG.resolved(decoders[0].config),
        kernels=load(),
    )
    programs.compile()
    return programs


@pytest.fixture
def make_engine(
    decoders: list[Decoder], compiled: Programs, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeEngine]:
    """Makes engines that take what was compiled once instead of compiling it again."""

    compile_all = Programs.compile

    def take(self: Programs, log: Callable[[str], None] = lambda name: None) -> None:
        if self._config != compiled._config:
            return compile_all(self, log)
        log("taken")
        self._forwards, self._bursts = compiled._forwards, compiled._bursts
        self._samplers = compiled._samplers
        self._copy = compiled._copy

    monkeypatch.setattr(Programs, "compile", take)
    with making(decoders[0], CONFIG, TOKENIZER) as make:
        yield make


@contextmanager
def making(
    decoder: Decoder, config: EngineConfig, tokenizer: Tokenizer | None
) -> Iterator[MakeEngine]:
    made: list[JaxEngine] = []

    def make() -> JaxEngine:
        made.append(JaxEngine(decoder, config, timeline=Timeline(), tokenizer=tokenizer))
        return made[-1]

    yield make
    for engine in made:
        asyncio.run(engine.aclose())
        assert not engine._thread.is_alive()


@pytest.fixture
def make_bare(make_engine: MakeEngine, decoders: list[Decoder]) -> Iterator[MakeEngine]:
    """Without a tokenizer; with what `make_engine` takes."""
    with making(decoders[0], CONFIG, None) as make:
        yield make


@pytest.fixture
def make_recomputing(make_engine: MakeEngine, decoders: list[Decoder]) -> Iterator[MakeEngine]:
    """Computes keys and values again when weights are published; compiles anew."""
    config = replace(CONFIG, on_publish="recompute", prefill_tokens=(8,), small_batch=4)
    with making(decoders[0], config, None) as make:
        yield make


@pytest.fixture
def make_tight(decoders: list[Decoder]) -> Iterator[MakeEngine]:
    """With pages for two conversations; compiles anew, as the cache has another shape."""
    config = replace(CONFIG, pages=2 * CONFIG.table_pages, small_batch=4)
    with making(decoders[0], config, None) as make:
        yield make


@pytest.fixture
def engine(make_engine: MakeEngine) -> JaxEngine:
    return make_engine()


def ask(
    prompt: Sequence[int],
    *,
    new: int = 8,
    seed: int = 0,
    temperature: float = 1.0,
    stop: tuple[int, ...] = (),
) -> GenerateRequest:
    sampling = SamplingParams(
        max_new_tokens=new, seed=seed, temperature=temperature, stop_token_ids=stop
    )
    return GenerateRequest(prompt_ids=prompt, sampling=sampling)


def prompt(seed: int, size: int) -> list[int]:
    return np.random.default_rng(seed).integers(VOCABULARY, size=size).tolist()


async def gather(engine: JaxEngine, requests: Sequence[GenerateRequest]) -> list[Generation]:
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.generate(one)) for one in requests]
    return [task.result() for task in tasks]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what another thread does has no event
            await asyncio.sleep(0)


@jax.jit
def trained_logprobs(
    decoder: Decoder, ids: jax.Array, mask: jax.Array, temperature: jax.Array
) -> jax.Array:
    """Log-probability of each token of a sequence given those before it, as the learner has it."""
    count = jnp.arange(LENGTH)[None]
    hidden = decoder.hidden(ids[None], count, jnp.full_like(count, count.size))[0]
    target = jnp.roll(ids, -1)
    statistics = token_statistics(
        hidden, decoder.head_DV, target, jnp.roll(mask, -1), temperature=temperature, chunk=32
    )
    return jnp.roll(statistics.logprob, 1)


def assert_agrees(
    decoder: Decoder, ids: Sequence[int], answer: Generation, temperature: float = 1.0
) -> None:
    """The answer's log-probabilities are the learner's, to 1e-4."""
    start, size = len(ids), len(answer.token_ids)
    row, mask = np.zeros(LENGTH, np.int32), np.zeros(LENGTH, np.float32)
    row[:start], row[start : start + size] = ids, answer.token_ids
    mask[start : start + size] = 1
    ours = np.asarray(trained_logprobs(decoder, row, mask, temperature))
    assert size > 0
    np.testing.assert_allclose(answer.logprobs, ours[start : start + size], atol=1e-4, rtol=0)


# ---------------------------------------------------------------------- what it generates


@pytest.mark.asyncio
async def test_greedy_is_the_models_likeliest_token(
    engine: JaxEngine, decoders: list[Decoder]
) -> None:
    ids = prompt(0, 20)
    answer = await engine.generate(ask(ids, new=6, temperature=0.0))
    forward = jax.jit(lambda decoder, ids: decoder.logits(_hidden(decoder, ids)))
    row = np.zeros(LENGTH, np.int32)
    for token in answer.token_ids:
        row[: len(ids)] = ids
        assert token == np.asarray(forward(decoders[0], row))[len(ids) - 1].argmax()
        ids = [*ids, int(token)]
    assert answer.finish_reason is FinishReason.LENGTH


def _hidden(decoder: Decoder, ids: jax.Array) -> jax.Array:
    count = jnp.arange(LENGTH)[None]
    return decoder.hidden(ids[None], count, jnp.full_like(count, count.size))[0]


@pytest.mark.asyncio
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_the_learners(
    engine: JaxEngine, decoders: list[Decoder], temperature: float
) -> None:
    """Chunked prefill, shared pages, copied pages, later turns: all to 1e-4."""
    beginning = prompt(1, 40)
    talks = [beginning + prompt(10 + member, 3) for member in range(6)]
    for turn in range(3):
        requests = [
            ask(talk, new=3 + member, seed=100 * turn + member, temperature=temperature)
            for member, talk in enumerate(talks)
        ]
        answers = await gather(engine, requests)
        for member, answer in enumerate(answers):
            assert_agrees(decoders[0], talks[member], answer, temperature)
            talks[member] += [*answer.token_ids.tolist(), *prompt(turn, 1 + 4 * turn)]
    counts = engine.counts
    assert counts.reused_tokens > counts.prefill_tokens, "most of all prompts was in the cache"


@pytest.mark.asyncio
async def test_same_seed_same_tokens_whatever_else_is_going_on(make_engine: MakeEngine) -> None:
    requests = [ask(prompt(n % 5, 10 + n), new=5 + n, seed=n) for n in range(10)]
    alone = [await make_engine().generate(one) for one in requests[:3]]
    together = await gather(make_engine(), requests)
    backwards = (await gather(make_engine(), requests[::-1]))[::-1]
    for left, right in zip([*alone, *together], [*together[:3], *backwards], strict=True):
        np.testing.assert_array_equal(left.token_ids, right.token_ids)
        np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-5)
    other = await make_engine().generate(ask(requests[0].prompt_ids, new=5, seed=77))
    assert other.token_ids.tolist() != together[0].token_ids.tolist()


@pytest.mark.asyncio
async def test_the_engine_agrees_with_itself_about_stop_and_length(engine: JaxEngine) -> None:
    ids = prompt(2, 30)
    long = (await engine.generate(ask(ids, new=12))).token_ids.tolist()
    stopped = await engine.generate(ask(ids, new=12, stop=(long[4],)))
    at = long.index(long[4])
    assert stopped.token_ids.tolist() == long[: at + 1]
    assert stopped.finish_reason is FinishReason.STOP
    full = await engine.generate(ask(prompt(3, LENGTH - 2), new=12))
    assert len(full.token_ids) == 2
    assert full.finish_reason is FinishReason.LENGTH
    assert full.queued_s >= 0


class Coin(Env):
    """Reward 1 for an even number of characters, three turns."""

    async def areset(self, *, seed=None, options=None):
        self._turns, self.seed = 0, seed
        return f"coin {seed}"[:9], {}

    async def astep(self, action):
        self._turns += 1
        return f"coin {len(action) % 2}", float(len(action) % 2 == 0), self._turns == 3, False, {}


async def played(engine: JaxEngine, *, seed: int, concurrency: int) -> dict[object, Trajectory]:
    """Two groups of three of a run."""
    pool, ended = EnvPool(Coin, concurrency), dict[object, Trajectory]()
    config = ConversationConfig(max_new_tokens=6)
    rollout = Rollout(
        pool=pool,
        make_agent=ModelAgent.factory(TOKENIZER, config),
        engine=engine,
        tasks=SeededTasks(run_seed=seed),
        config=RolloutConfig(group_size=3, concurrency=concurrency),
        gate=AdmissionGate(groups_per_step=2, max_lag=0),
        run_seed=seed,
        timeline=Timeline(),
    )
    with anyio.fail_after(20):
        async with rollout.stream() as groups:
            for _ in range(2):
                group = await groups.receive()
                ended |= {(group.task.index, t.member): t for t in group.trajectories}
    await pool.aclose()
    return ended


def ids_of(trajectory: Trajectory) -> list[list[int]]:
    return [segment.ids.tolist() for segment in trajectory.segments]


@pytest.mark.asyncio
async def test_a_trajectory_is_a_function_of_seed_task_and_member(make_engine: MakeEngine) -> None:
    state = str(np.random.get_state(legacy=False))
    runs = [
        await played(make_engine(), seed=seed, concurrency=concurrency)
        for seed, concurrency in ((1, 1), (1, 6), (2, 6))
    ]
    assert str(np.random.get_state(legacy=False)) == state, "and touches no state of others"
    one, many, other = runs
    assert one.keys() == many.keys() == {(task, member) for task in (0, 1) for member in range(3)}
    for key, trajectory in one.items():
        assert ids_of(trajectory) == ids_of(many[key])
        assert trajectory.reward == many[key].reward
        assert ids_of(trajectory) != ids_of(other[key])
    for task in (0, 1):
        members = [one[task, member] for member in range(3)]
        assert len({t.turns[0].observation for t in members}) == 1, (
            "the environment's seed is shared"
        )
        assert len({str(ids_of(t)) for t in members}) == 3, "what is sampled is not"
    assert one[0, 0].turns[0].observation != one[1, 0].turns[0].observation


# ---------------------------------------------------------------------- weights


@pytest.mark.asyncio
async def test_weights_change_between_two_tokens_and_nothing_drains(
    engine: JaxEngine, decoders: list[Decoder]
) -> None:
    old, new = (nnx.state(decoder) for decoder in decoders)
    requests = [ask(prompt(n, 10), new=100, seed=n) for n in range(4)]
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.generate(one)) for one in requests]
        for version in (1, 2):
            reached = engine.counts.generated_tokens + 8
            await until(lambda reached=reached: engine.counts.generated_tokens > reached)
            engine.publish(new if version == 1 else old, version)
            assert engine.version == version
    for task in tasks:
        versions = task.result().versions
        assert len(versions) == 100
        assert (np.diff(versions) >= 0).all()
        assert set(versions.tolist()) == {0, 1, 2}
    assert engine.counts.publications == 2
    # A prefix of the old weights' generation is the old weights'.
    first = tasks[0].result()
    kept = int((first.versions == 0).sum())
    assert_agrees(
        decoders[0],
        requests[0].prompt_ids,
        Generation(
            token_ids=first.token_ids[:kept],
            logprobs=first.logprobs[:kept],
            versions=first.versions[:kept],
            finish_reason=FinishReason.LENGTH,
        ),
    )


@pytest.mark.asyncio
async def test_new_weights_are_used_and_old_keys_only_within_reuse_lag(
    engine: JaxEngine, decoders: list[Decoder]
) -> None:
    ids = prompt(0, 40)
    await engine.generate(ask(ids))
    engine.publish(nnx.state(decoders[1]), 1)
    reused = engine.counts.reused_tokens
    within = await engine.generate(ask(ids))
    assert set(within.versions.tolist()) == {1}
    assert engine.counts.reused_tokens == reused + 39
    engine.publish(nnx.state(decoders[1]), 2)
    beyond = await engine.generate(ask(ids))
    assert engine.counts.reused_tokens == reused + 39
    assert_agrees(decoders[1], ids, beyond)
    with pytest.raises(AssertionError):
        assert_agrees(decoders[1], ids, within)  # its prompt's keys are the old weights'


# ---------------------------------------------------------------------- shapes are few


@pytest.mark.asyncio
async def test_nothing_compiles_again(
    engine: JaxEngine, decoders: list[Decoder], compilations: list[str]
) -> None:
    weights = nnx.state(decoders[1])
    engine.ready.wait()
    del compilations[:]
    for count in (1, 2, 3, 9):
        await gather(engine, [ask(prompt(n, 1 + 13 * n % 60), new=1 + n) for n in range(count)])
        engine.publish(weights, count)
    await gather(engine, [ask([*prompt(0, 50), n], temperature=n % 2) for n in range(6)])
    assert engine.counts.reused_tokens > 0
    assert compilations == []


# ---------------------------------------------------------------------- cancellation and close


@pytest.mark.asyncio
async def test_cancellation_frees_slots_and_places_in_the_queue(engine: JaxEngine) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.generate(ask([n], new=120))) for n in range(8)]
        await until(lambda: engine.running == 4 and engine.waiting == 4)
        for task in tasks:
            task.cancel()
    await until(lambda: engine.running == engine.waiting == 0)
    assert engine._tickets == {}
    assert engine.counts.requests == 0
    assert len((await engine.generate(ask([1], new=3))).token_ids) == 3


@pytest.mark.asyncio
async def test_a_cancelled_neighbour_changes_nothing(make_engine: MakeEngine) -> None:
    request = ask(prompt(0, 20), new=60)
    expected = await make_engine().generate(request)
    engine = make_engine()
    async with asyncio.TaskGroup() as group:
        neighbours = [
            group.create_task(engine.generate(ask(prompt(n, 30), new=60))) for n in range(3)
        ]
        mine = group.create_task(engine.generate(request))
        await until(lambda: engine.counts.generated_tokens > 10)
        for task in neighbours:
            task.cancel()
    np.testing.assert_array_equal(mine.result().token_ids, expected.token_ids)


async def assert_fail(tasks: list[asyncio.Task[Generation]], match: str) -> None:
    async with asyncio.timeout(5):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        assert isinstance(result, EngineError)
        assert match in str(result)


@pytest.mark.asyncio
async def test_close_fails_what_is_in_flight_at_once(engine: JaxEngine) -> None:
    # `gather` waits for them below.
    tasks = [asyncio.ensure_future(engine.generate(ask([n], new=120))) for n in range(8)]
    await until(lambda: engine.running == 4)
    await engine.aclose()
    await assert_fail(tasks, "the engine was closed")
    await engine.aclose()
    with pytest.raises(ClosedError, match="the engine is closed"):
        await engine.generate(ask([1]))


@pytest.mark.asyncio
async def test_close_while_compiling(
    decoders: list[Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, go_on = threading.Event(), threading.Event()

    def slow(self: Programs, log: Callable[[str], None]) -> None:
        compiling.set()
        go_on.wait(10)
        log("next")
        raise AssertionError("a closed engine compiles no further")

    monkeypatch.setattr(Programs, "compile", slow)
    engine = JaxEngine(decoders[0], CONFIG, timeline=Timeline())
    task = asyncio.ensure_future(engine.generate(ask([1])))
    await until(compiling.is_set)
    closing = asyncio.ensure_future(engine.aclose())
    await until(lambda: engine._closed)
    go_on.set()
    await closing
    await assert_fail([task], "the engine was closed")
    with pytest.raises(ClosedError):
        await engine.generate(ask([1]))


@pytest.mark.asyncio
async def test_a_broken_program_fails_everyone_and_later_requests(
    engine: JaxEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.ready.wait()
    calls, step = [0], engine._programs.forward

    def break_down(*arguments):
        calls[0] += 1
        if calls[0] > 5:
            raise RuntimeError("device lost")
        return step(*arguments)

    monkeypatch.setattr(engine._programs, "forward", break_down)
    tasks = [asyncio.ensure_future(engine.generate(ask([n], new=120))) for n in range(8)]
    await assert_fail(tasks, "the engine broke: RuntimeError('device lost')")
    with pytest.raises(EngineError, match="device lost"):
        await engine.generate(ask([1]))
    await engine.aclose()


@pytest.mark.asyncio
async def test_a_broken_compilation_fails_who_waits(
    decoders: list[Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Programs, log: Callable[[str], None]) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(Programs, "compile", fail)
    engine = JaxEngine(decoders[0], CONFIG, timeline=Timeline())
    with pytest.raises(EngineError, match="no such instruction"):
        await engine.generate(ask([1]))
    await engine.aclose()


def test_two_event_loops_share_an_engine(engine: JaxEngine) -> None:
    results: dict[int, list[Generation]] = {}

    def loop(number: int) -> None:
        requests = [ask(prompt(n, 10), new=20, seed=n) for n in range(6)]
        results[number] = asyncio.run(gather(engine, requests))

    threads = [threading.Thread(target=loop, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for left, right in zip(results[0], results[1], strict=True):
        np.testing.assert_array_equal(left.token_ids, right.token_ids)


def test_a_loop_that_is_gone_is_no_harm(engine: JaxEngine) -> None:
    async def leave() -> None:
        task = asyncio.ensure_future(engine.generate(ask([1], new=120)))
        await until(lambda: engine.running == 1)
        assert not task.done()  # `run` cancels it, and closes the loop

    asyncio.run(leave())
    assert len(asyncio.run(engine.generate(ask([2], new=3))).token_ids) == 3


# ---------------------------------------------------------------------- mistakes


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("ids", "error", "match"),
    [
        ([], EngineError, "the prompt is empty"),
        ([1, -1], EngineError, "token id -1 is outside"),
        ([1, VOCABULARY], EngineError, f"token id {VOCABULARY} is outside .* {VOCABULARY}"),
        ([1] * LENGTH, ContextLengthError, f"128 tokens leaves no room .* {LENGTH}"),
        ([1] * 1000, ContextLengthError, "1000 tokens"),
        ([10**30], EngineError, "token id 10+ is outside"),
        ([1.5], EngineError, r"must be integers, one after another, got \[1.5\]"),
        (["1"], EngineError, "must be integers"),
        (None, EngineError, "must be integers, .* got None"),
        (np.array([[1, 2]]), EngineError, "must be integers, .* got array"),
        (np.array([1.0, np.nan]), EngineError, "must be integers"),
    ],
)
async def test_bad_prompts_are_refused_and_harm_nobody(
    engine: JaxEngine, ids: list[int], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        await engine.generate(ask(ids))
    assert len((await engine.generate(ask([1], new=2))).token_ids) == 2


@pytest.mark.asyncio
async def test_idle_time_has_a_cause_and_all_time_is_accounted_for(engine: JaxEngine) -> None:
    engine.idle_cause = lambda: "waiting: test"
    clock = engine._clock
    await engine.generate(ask(prompt(0, 20)))
    await until(lambda: clock.state == "waiting: test")
    totals = clock.totals_s()
    assert {"decode", "prefill", "waiting: test"} <= totals.keys()
    spans = [span for span in clock._timeline.spans() if span.track == "engine"]
    assert all(a.end_ns == b.start_ns for a, b in pairwise(spans))


# ---------------------------------------------------------------------- streams, forks, sampling


async def collected(engine: JaxEngine, request: GenerateRequest) -> list[Delta]:
    async with asyncio.timeout(20):
        return [delta async for delta in engine.stream(request)]


@pytest.mark.asyncio
async def test_a_stream_brings_what_generate_gives(engine: JaxEngine) -> None:
    request = ask(prompt(0, 30), new=12, temperature=0.8)
    whole = await engine.generate(request)
    deltas = await collected(engine, request)
    assert [i for delta in deltas for i in delta.token_ids] == whole.token_ids.tolist()
    for name in ("logprobs", "base_logprobs", "versions"):
        parts = [number for delta in deltas for number in getattr(delta, name)]
        np.testing.assert_allclose(parts, getattr(whole, name), atol=1e-5)
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [
        FinishReason.LENGTH
    ]
    assert len(deltas) > 3, "they come as they are made"


@pytest.mark.asyncio
async def test_leaving_a_stream_cancels(engine: JaxEngine) -> None:
    async with asyncio.timeout(20):
        stream = engine.stream(ask([1], new=120))
        await anext(stream)
        await stream.aclose()
        await until(lambda: engine.running == engine.waiting == 0)
    assert engine.free_pages == engine.config.total_pages - 1


@pytest.mark.asyncio
async def test_n_answers_compute_their_prompt_once(engine: JaxEngine) -> None:
    ids = prompt(5, 49)
    answers = await engine.generate_n(ask(ids, new=6, seed=10), 6)
    assert len({str(answer.token_ids) for answer in answers}) > 1
    # Six whole pages once, and the last token of each.
    assert engine.counts.prefill_tokens == 48 + 6
    for number, answer in enumerate(answers):
        alone = await engine.generate(ask(ids, new=6, seed=10 + number))
        np.testing.assert_array_equal(answer.token_ids, alone.token_ids)
    with pytest.raises(ConfigError, match="n must be >= 1, got 0"):
        await engine.generate_n(ask(ids), 0)


@pytest.mark.asyncio
async def test_two_kinds_of_logprobs(engine: JaxEngine, decoders: list[Decoder]) -> None:
    ids = prompt(1, 20)
    request = ask(ids, new=8, temperature=0.5)
    cut = replace(request, sampling=replace(request.sampling, top_k=3, top_logprobs=4))
    answer = await engine.generate(cut)
    assert answer.base_logprobs is not None
    base = replace(answer, logprobs=answer.base_logprobs)
    assert_agrees(decoders[0], ids, base)
    assert (answer.logprobs > base.logprobs).all(), "three tokens are likelier than all are"
    for token, logprob, likeliest in zip(
        answer.token_ids, base.logprobs, answer.top_logprobs, strict=True
    ):
        assert len(likeliest) == 4
        assert int(token) in list(likeliest)[:3]
        assert likeliest[int(token)] == pytest.approx(float(logprob), abs=1e-5)
    plain = await engine.generate(request)
    assert_agrees(decoders[0], ids, plain, temperature=0.5)


@pytest.mark.asyncio
async def test_a_request_is_the_same_among_others_that_ask_for_more(engine: JaxEngine) -> None:
    """One that asks for a filter puts the others of its step through the full sampler."""
    mine = ask(prompt(0, 20), new=20, seed=3)
    alone = await engine.generate(mine)
    other = ask(prompt(1, 20), new=40)
    fancy = replace(other, sampling=replace(other.sampling, top_p=0.5, presence_penalty=1.0))
    together, _ = await gather(engine, [mine, fancy])
    np.testing.assert_array_equal(together.token_ids, alone.token_ids)
    np.testing.assert_allclose(together.logprobs, alone.logprobs, atol=1e-5)


@pytest.mark.asyncio
async def test_penalties_and_biases_reach_the_sampler(engine: JaxEngine) -> None:
    ids = prompt(0, 10)
    request = ask(ids, new=30, temperature=0.0)
    free = (await engine.generate(request)).token_ids.tolist()
    sampling = request.sampling
    banned = replace(sampling, logit_bias=dict.fromkeys(set(free), -np.inf))
    without = await engine.generate(replace(request, sampling=banned))
    assert not set(without.token_ids.tolist()) & set(free)
    once = replace(sampling, frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=50.0)
    varied = await engine.generate(replace(request, sampling=once))
    assert len(set(varied.token_ids.tolist())) > len(set(free))


@pytest.mark.asyncio
async def test_stop_strings_and_grammars(engine: JaxEngine) -> None:
    request = ask(prompt(0, 10), new=40)
    free = await engine.generate(request)
    text = TOKENIZER.decode(free.token_ids.tolist(), skip_special=False)
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    stopped = await engine.generate(
        replace(request, sampling=replace(request.sampling, stop=(stop,)))
    )
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.matched == stop
    assert stopped.token_ids.tolist() == free.token_ids.tolist()[: len(stopped.token_ids)]
    assert stop in TOKENIZER.decode(stopped.token_ids.tolist(), skip_special=False)

    for constraint, fits in (
        ({"regex": "[a-c]{3}-[0-9]{2}"}, r"[a-c]{3}-[0-9]{2}"),
        ({"choices": ("heads", "tails")}, "heads|tails"),
    ):
        sampling = replace(request.sampling, **constraint)
        answers = await gather(
            engine, [replace(request, sampling=replace(sampling, seed=n)) for n in range(6)]
        )
        for answer in answers:
            assert answer.finish_reason is FinishReason.STOP
            said = TOKENIZER.decode(answer.token_ids.tolist(), skip_special=True)
            assert re.fullmatch(fits, said), said


@pytest.mark.asyncio
async def test_what_cannot_be_honoured_is_refused(
    engine: JaxEngine, decoders: list[Decoder], make_bare: MakeEngine
) -> None:
    bare = make_bare()
    for changes, match in (
        ({"stop": ("x",)}, "stop = .* needs a tokenizer"),
        ({"regex": "a+"}, "regex = .* needs a tokenizer"),
    ):
        request = ask([1])
        with pytest.raises(ConfigError, match=match):
            await bare.generate(replace(request, sampling=replace(request.sampling, **changes)))
    for changes, match in (
        ({"logit_bias": {VOCABULARY: 1.0}}, f"token id {VOCABULARY} in logit_bias"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "301 ids.*at most 300"),
        ({"regex": "("}, "regex"),
    ):
        request = ask([1])
        with pytest.raises(ConfigError, match=match):
            await engine.generate(replace(request, sampling=replace(request.sampling, **changes)))
    everything = dict.fromkeys(range(VOCABULARY), -np.inf)
    request = ask([1])
    with pytest.raises(EngineError, match="no token could be drawn"):
        await engine.generate(
            replace(request, sampling=replace(request.sampling, logit_bias=everything))
        )
    assert len((await engine.generate(ask([1], new=2))).token_ids) == 2


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e-300},
        {"temperature": 1e300},
        {"temperature": 1.0, "top_k": 2**70},
        {"temperature": 1.0, "top_p": 1e-300},
        {"temperature": 1.0, "min_p": 1e-300},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"logit_bias": {1: 1e300, 2: -1e300}},
        {"temperature": 1.0, "logit_bias": dict.fromkeys(range(VOCABULARY), 3e38)},
        {"temperature": 1.0, "seed": -(2**200)},
    ],
    ids=str,
)
async def test_extremes_are_clipped_and_harm_nobody(
    engine: JaxEngine, extreme: dict[str, object]
) -> None:
    request = ask([1, 2, 3])
    plain = replace(request, sampling=replace(request.sampling, temperature=0))
    expected = await engine.generate(plain)
    wild = replace(plain, sampling=replace(plain.sampling, **extreme))
    answers = await asyncio.gather(engine.generate(wild), engine.generate(plain))
    assert np.isfinite(answers[0].logprobs).all()
    np.testing.assert_array_equal(answers[1].token_ids, expected.token_ids)
    if "logit_bias" in extreme and "temperature" not in extreme:
        assert set(answers[0].token_ids.tolist()) == {1}


# ---------------------------------------------------------------------- a full cache


@pytest.mark.asyncio
async def test_a_cache_that_is_too_small_pre_empts_and_nothing_changes(
    make_engine: MakeEngine, make_tight: MakeEngine
) -> None:
    requests = [ask(prompt(n, 20 + n), new=60, seed=n) for n in range(6)]
    expected = await gather(make_engine(), requests)
    tight = make_tight()
    tight.ready.wait(60)
    answers = await gather(tight, requests)
    assert tight.counts.preemptions > 0
    for left, right in zip(expected, answers, strict=True):
        np.testing.assert_array_equal(left.token_ids, right.token_ids)
        np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-5)
    assert tight.free_pages == tight.config.total_pages - 1


# ---------------------------------------------------------------------- weights, once more


@pytest.mark.asyncio
async def test_what_is_no_array_or_was_deleted_is_refused(
    engine: JaxEngine, decoders: list[Decoder]
) -> None:
    request = ask(prompt(0, 20), temperature=0.0)
    before = await engine.generate(request)
    spent = jnp.copy(decoders[1].norm[...])
    spent.delete()
    for value, match in (
        (np.asarray(decoders[1].norm[...]), "'norm' must be a jax.Array of floats, got ndarray"),
        (decoders[1].norm[...].astype(jnp.int32), "a jax.Array of floats, got int32"),
        (None, "a jax.Array of floats, got NoneType"),
        (spent, "'norm' was deleted, or donated to a program"),
    ):
        state = nnx.to_flat_state(nnx.state(decoders[1]))
        changed = [
            (path, each.replace(value) if path == ("norm",) else each) for path, each in state
        ]
        with pytest.raises(ModelError, match=match):
            engine.publish(nnx.from_flat_state(changed), 1)
    for version in (-1, 2**31, 10**400, 1.5, True, None):
        with pytest.raises(ConfigError, match="version must be an integer from 0 to 2147483647"):
            engine.publish(nnx.state(decoders[1]), version)  # type: ignore[arg-type]
    assert engine.version == 0
    after = await engine.generate(request)
    np.testing.assert_array_equal(before.token_ids, after.token_ids)


@pytest.mark.asyncio
async def test_recomputed_keys_are_the_new_weights(
    make_recomputing: MakeEngine, decoders: list[Decoder]
) -> None:
    engine = make_recomputing()
    engine.ready.wait(60)
    request = ask(prompt(0, 20), new=80)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        task = group.create_task(engine.generate(request))
        await until(lambda: engine.counts.generated_tokens > 8)
        engine.publish(nnx.state(decoders[1]), 1)
    answer = task.result()
    old = int((answer.versions == 0).sum())
    assert 8 < old < 80
    # What the new weights generated is what they give to the same text from its beginning.
    so_far = [*request.prompt_ids, *answer.token_ids[:old].tolist()]
    rest = replace(answer, token_ids=answer.token_ids[old:], logprobs=answer.logprobs[old:])
    assert_agrees(decoders[1], so_far, rest)


@pytest.mark.asyncio
async def test_bad_weights_are_refused_and_the_old_ones_stay(
    engine: JaxEngine, decoders: list[Decoder], make_decoder: Callable[..., Decoder]
) -> None:
    request = ask(prompt(0, 20), temperature=0.0)
    before = await engine.generate(request)
    graph, state = nnx.split(decoders[1])
    spoilt = nnx.merge(graph, jax.tree.map(lambda leaf: leaf, state))
    spoilt.norm[...] = spoilt.norm[...].at[3].set(jnp.nan)
    with pytest.raises(ModelError, match=r"NaN or infinite in 1 of \d+ parameters, such as 'norm'"):
        engine.publish(nnx.state(spoilt), 1)
    wider = nnx.state(make_decoder(0, vocab_size=VOCABULARY, intermediate_size=64))
    with pytest.raises(
        ModelError, match=r"'layers/down' has shape .* 64, 32\], the engine's model"
    ):
        engine.publish(wider, 1)
    assert engine.version == 0
    after = await engine.generate(request)
    np.testing.assert_array_equal(before.token_ids, after.token_ids)
    assert set(after.versions.tolist()) == {0}


@pytest.mark.asyncio
async def test_what_finite_weights_made_nan_is_not_gone_on_from(
    engine: JaxEngine, decoders: list[Decoder]
) -> None:
    huge = jax.tree.map_with_path(
        lambda path, leaf: leaf * 1e20 if "_norm" in str(path) else leaf, nnx.state(decoders[0])
    )  # scores overflow, the weights do not
    ids = prompt(0, 20)
    request = ask(ids, temperature=0.0)
    held = replace(request, sampling=replace(request.sampling, logit_bias={5: 9.0}))
    engine.publish(huge, 1)
    for one in (request, held):
        with pytest.raises(EngineError, match="logits are NaN or infinite"):
            await engine.generate(one)
        engine.publish(nnx.state(decoders[0]), engine.version + 1)
        answer = await engine.generate(request)
        assert answer.reused_tokens == 0
        assert_agrees(decoders[0], ids, answer)
        assert (await engine.generate(request)).reused_tokens > 0
        # A request that rules out every token itself says nothing of the model.
        none = dict.fromkeys(range(VOCABULARY), -float("inf"))
        with pytest.raises(EngineError, match="allow no token"):
            await engine.generate(
                replace(request, sampling=replace(request.sampling, logit_bias=none))
            )
        assert (await engine.generate(request)).reused_tokens > 0
        engine.publish(huge, engine.version + 1)
        engine.clear_cache()


@pytest.mark.asyncio
async def test_with_adapters_only_they_move(decoders: list[Decoder]) -> None:
    graph, state = nnx.split(decoders[0])
    decoder = nnx.merge(graph, jax.tree.map(lambda leaf: leaf, state))
    decoder.add_adapters(rank=2, alpha=4.0, rngs=nnx.Rngs(0))
    config = replace(CONFIG, prefill_tokens=(8,), small_batch=4, reuse_lag=0)
    engine = JaxEngine(decoder, config, timeline=Timeline())
    try:
        engine.ready.wait(60)
        ids = prompt(0, 20)
        at_first = await engine.generate(ask(ids, temperature=0.0))
        assert_agrees(decoders[0], ids, at_first)
        moved = jax.tree.map(lambda leaf: leaf + 0.3, nnx.state(decoder, LoRAParam))
        held = [leaf.unsafe_buffer_pointer() for leaf in engine._leaves]
        engine.publish(moved, 1)
        answer = await engine.generate(ask(ids, temperature=0.0))
        after = [leaf.unsafe_buffer_pointer() for leaf in engine._leaves]
        assert 0 < len(set(after) - set(held)) == len(jax.tree.leaves(moved)), "no copy of the base"
        nnx.update(decoder, moved)
        assert_agrees(merge_adapters(decoder), ids, answer)
        with pytest.raises(AssertionError):
            assert_agrees(decoders[0], ids, answer)
    finally:
        await engine.aclose()


@pytest.mark.asyncio
async def test_published_weights_are_shared_not_copied(
    engine: JaxEngine, decoders: list[Decoder]
) -> None:
    state = nnx.state(decoders[1])
    engine.publish(state, 1)
    await engine.generate(ask([1], new=2))
    given = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    assert given == [leaf.unsafe_buffer_pointer() for leaf in engine._leaves]


@pytest.mark.asyncio
async def test_a_paused_engine_keeps_everything_and_goes_on(engine: JaxEngine) -> None:
    request = ask(prompt(0, 10), new=60)
    expected = await engine.generate(request)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        task = group.create_task(engine.generate(request))
        reached = engine.counts.generated_tokens + 5
        await until(lambda: engine.counts.generated_tokens > reached)
        engine.pause()
        await until(lambda: engine._clock.state == "paused")
        assert engine.running == 1
        engine.resume()
    np.testing.assert_array_equal(task.result().token_ids, expected.token_ids)
