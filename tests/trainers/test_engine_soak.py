"""Random requests by the hundred, or by the thousand; every answer is checked against plain arithmetic.

A few dozen clients keep an engine with far too small a cache busy, while weights are published, the cache is
cleared and the engine pauses. What a client got is computed again: logits by a dense forward of the whole
sequence with the weights of the token's version, and the draw from them in NumPy, one token at a time.

Axes: B sequences of a batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import resource
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from flax import nnx

from gymllm.engine import FinishReason, GenerateRequest, Generation, SamplingParams
from gymllm.errors import ConfigError, ContextLengthError, EngineError
from gymllm.timeline import Timeline
from gymllm_agents import train_tokenizer
from gymllm_trainers.engine import Delta, EngineConfig, JaxEngine
from gymllm_trainers.engine.constraints import Grammars
from gymllm_trainers.engine.kernels import load
from gymllm_trainers.engine.programs import Programs
from gymllm_trainers.engine.sampling import DEPTH, uniform
from gymllm_trainers.engine.tickets import Ticket
from gymllm_trainers.models import Decoder

LENGTH = 96
TOKENIZER = train_tokenizer(["user\nassistant\ncoin "] * 50, vocab_size=270)
VOCABULARY = TOKENIZER.vocab_size
GRAMMARS = Grammars(TOKENIZER, VOCABULARY)
CLIENTS = 48
QUIET = 3
"""Clients that go on in a lull, where steps generate bursts: nobody waits."""
BATCH = 32
CLOSE = 1e-4
"""How far log-probabilities, and what decides a draw, may be from the reference's."""
CONFIG = EngineConfig(
    slots=16,
    context_length=LENGTH,
    small_batch=4,
    prefill_tokens=(48,),
    page_size=8,
    pages=41,  # a fifth of what sixteen conversations of this length take
    burst=2,
)
CONSTRAINTS: tuple[dict[str, object], ...] = (
    {"regex": "[a-c]{2,5}-[0-9]{2}"},
    {"choices": ("heads", "tails", "headstrong")},
    {"json_schema": '{"type": "object", "properties": {"a": {"type": "boolean"}}}'},
)
Row = npt.NDArray[np.float64]
Random = np.random.Generator


@dataclass(frozen=True)
class Answer:
    """What a client asked for and got."""

    request: GenerateRequest
    changes: int
    """How many times other weights had been published when it asked."""
    generation: Generation


# ---------------------------------------------------------------------- the reference


class Reference:
    """Checks answers; counts what it checked."""

    def __init__(self, decoders: Sequence[Decoder]) -> None:
        self._decoders = decoders
        self.counts = Counter[str]()

        def logits(decoder: Decoder, ids_BT: jax.Array) -> jax.Array:
            position_BT = jnp.broadcast_to(jnp.arange(LENGTH), ids_BT.shape)
            ends_BT = jnp.full_like(ids_BT, ids_BT.shape[1])
            return decoder.logits(decoder.hidden(ids_BT, position_BT, ends_BT))

        self._compiled = nnx.jit(logits)
        self._logits([[0]], 0)

    def _logits(self, sequences: Sequence[Sequence[int]], weights: int) -> list[Row]:
        """What each token of some sequences lets expect next, [T, V] each."""
        ids_BT = np.zeros((BATCH, LENGTH), np.int32)
        for row, sequence in zip(ids_BT, sequences, strict=False):
            row[: len(sequence)] = sequence
        logits_BTV = np.asarray(self._compiled(self._decoders[weights], ids_BT), np.float64)
        return [row[: len(sequence)] for row, sequence in zip(logits_BTV, sequences, strict=False)]

    def check(
        self, answers: Sequence[Answer], changes_of: dict[int, int], *, mixed: bool = False
    ) -> None:
        """Checks answers.

        Args:
            answers: Some.
            changes_of: How many times the weights had changed with each version; each change brings the next
                of the decoders'.
            mixed: Whether keys and values of other weights may have been kept: then only those tokens that
                were made before the first change of weights are computed again.
        """
        for number in range(len(self._decoders)):
            for start in range(0, len(answers), BATCH):
                some = answers[start : start + BATCH]
                sequences = [
                    [*answer.request.prompt_ids, *answer.generation.token_ids.tolist()]
                    for answer in some
                ]
                for answer, logits in zip(some, self._logits(sequences, number), strict=True):
                    made = [changes_of[int(v)] for v in answer.generation.versions]
                    own = [
                        changes % len(self._decoders) == number
                        and (not mixed or changes == answer.changes)
                        for changes in made
                    ]
                    self._check_tokens(answer, logits, own)
        for answer in answers:
            _check_form(answer)
            _check_end(answer)
            self.counts["answers"] += 1
            self.counts["tokens"] += len(answer.generation.token_ids)

    def _check_tokens(self, answer: Answer, logits_TV: Row, own: Sequence[bool]) -> None:
        """Checks the tokens that the logits are of."""
        request, generation = answer.request, answer.generation
        sampling, start = request.sampling, len(request.prompt_ids)
        prompt, said = set(request.prompt_ids), Counter[int]()
        matcher = GRAMMARS.matcher(sampling)
        numbers = uniform(
            sampling.seed, np.arange(start, start + len(generation.token_ids))
        ).tolist()
        assert generation.base_logprobs is not None
        for at, token in enumerate(generation.token_ids.tolist()):
            allowed = np.ones(VOCABULARY, bool)
            if matcher is not None:
                words = np.zeros(-(-VOCABULARY // 32), np.uint32)
                matcher.mask(words)
                allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCABULARY] != 0
                matcher.accept(token)
            if own[at]:
                logits = logits_TV[start + at - 1]
                base = logits - logits.max()
                base -= np.log(np.exp(base).sum())
                assert abs(base[token] - generation.base_logprobs[at]) < CLOSE
                if sampling.top_logprobs:
                    _check_likeliest(generation.top_logprobs[at], base, sampling.top_logprobs)
                changed = weighed(np.where(allowed, logits, -np.inf), sampling, prompt, said)
                if sampling.temperature == 0:
                    assert changed[token] >= changed.max() - CLOSE
                    assert abs(base[token] - generation.logprobs[at]) < CLOSE
                else:
                    drawn = check_draw(
                        changed, sampling, numbers[at], token, float(generation.logprobs[at])
                    )
                    self.counts["too close to call"] += not drawn
                self.counts["computed again"] += 1
            said[token] += 1


def weighed(logits: Row, sampling: SamplingParams, prompt: set[int], said: Counter[int]) -> Row:
    """Logits after biases and penalties, as `SamplingParams` has them."""
    logits = logits.copy()
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    penalty = sampling.repetition_penalty
    for token in prompt | said.keys():
        logits[token] *= 1 / penalty if logits[token] > 0 else penalty
        logits[token] -= sampling.presence_penalty * (said[token] > 0)
        logits[token] -= sampling.frequency_penalty * said[token]
    return logits


def kept(scaled: Row, sampling: SamplingParams, slack: float) -> npt.NDArray[np.bool_]:
    """What the cuts leave of logits over their temperature if all thresholds give way by `slack`."""
    keep, near = scaled > -np.inf, max(slack, 0.0)  # what the threshold itself is never falls
    if 0 < sampling.top_k < VOCABULARY:
        keep &= scaled >= np.sort(scaled)[-sampling.top_k] - near
    if sampling.top_p < 1:
        shares = np.where(keep, np.exp(scaled - scaled.max()), 0)
        falling = np.sort(shares)[::-1]
        reached = np.cumsum(falling) / shares.sum() >= sampling.top_p - 1e-6 + slack
        last = falling[int(reached.argmax()) if reached.any() else -1]
        keep &= shares >= last * np.exp(-near)
    if sampling.min_p:
        keep &= scaled >= scaled.max() + np.log(sampling.min_p) - slack
    return keep


_COLUMNS = -(-VOCABULARY // DEPTH)
LINE = [i for n in range(_COLUMNS) for i in range(n, VOCABULARY, _COLUMNS)]
"""In which order tokens lie on the line that a uniform number points to."""


def check_draw(
    logits: Row, sampling: SamplingParams, number: float, token: int, logprob: float
) -> bool:
    """Checks a draw from what `weighed` gave; False if it depends on what is too close to call."""
    scaled = (logits - logits.max()) / sampling.temperature
    close = CLOSE * max(1.0, 1 / sampling.temperature)
    most, least = (kept(scaled, sampling, slack) for slack in (close / 4, -close / 4))
    assert most[token]
    if (most != least).any():
        return False
    shares = np.where(most, np.exp(scaled), 0)
    shares /= shares.sum()
    upto = np.cumsum(shares[LINE])[LINE.index(token)]
    assert upto - shares[token] - close <= number <= upto + close
    assert abs(np.log(shares[token]) - logprob) < close
    return True


def _check_likeliest(told: object, base: Row, count: int) -> None:
    assert isinstance(told, dict)
    assert len(told) == count
    np.testing.assert_allclose(list(told.values()), np.sort(base)[::-1][:count], atol=CLOSE)
    np.testing.assert_allclose(list(told.values()), base[list(told)], atol=CLOSE)


def _check_form(answer: Answer) -> None:
    generation = answer.generation
    size = len(generation.token_ids)
    assert size >= 1
    assert generation.base_logprobs is not None
    for numbers in (generation.logprobs, generation.base_logprobs):
        assert numbers.shape == (size,)
        assert (numbers <= 0).all()
    assert (np.diff(generation.versions) >= 0).all()
    assert len(generation.versions) == size
    assert len(generation.top_logprobs) == (size if answer.request.sampling.top_logprobs else 0)
    assert 0 <= generation.reused_tokens < len(answer.request.prompt_ids)
    assert generation.queued_s >= 0


def _check_end(answer: Answer) -> None:
    request, generation = answer.request, answer.generation
    sampling, ids = request.sampling, generation.token_ids.tolist()
    text, before = (TOKENIZER.decode(part, skip_special=False) for part in (ids, ids[:-1]))
    assert not set(sampling.stop_token_ids) & set(ids[:-1])
    assert not [stop for stop in sampling.stop if stop in before]
    most = min(sampling.max_new_tokens, LENGTH - len(request.prompt_ids))
    assert len(ids) <= most
    if ids[-1] in sampling.stop_token_ids:
        assert generation.finish_reason is FinishReason.STOP
        assert generation.matched == ids[-1]
    elif [stop for stop in sampling.stop if stop in text]:
        assert generation.finish_reason is FinishReason.STOP
        assert generation.matched in sampling.stop
        assert str(generation.matched) in text
    elif generation.finish_reason is FinishReason.STOP:
        said = TOKENIZER.decode(ids, skip_special=True)
        if sampling.regex is not None:
            assert re.fullmatch(sampling.regex, said)
        elif sampling.choices:
            assert said in sampling.choices
        else:
            assert sampling.json_schema is not None
            assert isinstance(json.loads(said), dict)
    else:
        assert len(ids) == most
        assert generation.matched is None


# ---------------------------------------------------------------------- the clients


def random_sampling(rng: Random, *, lull: bool = False) -> SamplingParams:
    """Those of a lull are longer, and fewer of them need what no burst can do."""
    sampling = SamplingParams(
        max_new_tokens=int(rng.integers(1, 60 if lull else 30)) if rng.random() < 0.95 else 10**9,
        temperature=float(rng.choice([0.0, 0.3, 0.7, 1.0, 1.5])),
        seed=int(rng.integers(-(2**63), 2**63)),
    )
    if rng.random() < (0.05 if lull else 0.3):
        filters: list[dict[str, object]] = [
            {"top_k": int(rng.integers(1, 100))},
            {"top_p": float(rng.uniform(0.05, 1))},
            {"min_p": float(rng.uniform(0, 0.3))},
            {"repetition_penalty": float(rng.uniform(0.7, 2))},
            {"presence_penalty": float(rng.uniform(-2, 2))},
            {"frequency_penalty": float(rng.uniform(-2, 2))},
            {"logit_bias": {int(i): float(rng.choice([-np.inf, -1, 3])) for i in some_ids(rng, 9)}},
            {"top_logprobs": int(rng.integers(1, 21))},
        ]
        for index in rng.choice(len(filters), size=rng.integers(1, 4), replace=False):
            sampling = replace(sampling, **filters[index])
    ending = rng.random()
    if ending < 0.15:
        return replace(sampling, stop_token_ids=tuple(some_ids(rng, 12)))
    if ending < 0.25:
        return replace(sampling, stop=tuple(rng.choice(list("aeioust \n"), size=2)))
    if ending < (0.26 if lull else 0.32):
        return replace(sampling, **CONSTRAINTS[rng.integers(len(CONSTRAINTS))])
    return sampling


def some_ids(rng: Random, count: int) -> list[int]:
    return rng.integers(VOCABULARY, size=count).tolist()


class Clients:
    """Keep an engine busy with requests of all kinds, and meddle with it."""

    def __init__(
        self,
        engine: JaxEngine,
        reference: Reference,
        states: Sequence[object],
        *,
        seed: int,
        requests: int,
    ) -> None:
        """Nothing runs yet.

        Args:
            engine: Has the first weights.
            reference: Has the same weights in the same order.
            states: What to publish.
            seed: Of everything that is random but for what runs when.
            requests: How many.
        """
        self.engine, self.reference, self.states = engine, reference, states
        self.counts = Counter[str]()
        self._changes, self._changes_of = 0, {0: 0}
        self.tenth: Callable[[], None] = lambda: None
        """Called after each tenth of the requests."""
        self._seed, self._requests = seed, requests
        self._mixed = engine.config.on_publish == "keep"
        self._version, self._started, self._ended = 0, 0, 0
        self._end = asyncio.Condition()
        self._meddling, self._checking = asyncio.Lock(), asyncio.Lock()
        self._answers: list[Answer] = []
        rng = np.random.default_rng(seed)
        self._beginnings = [some_ids(rng, int(size)) for size in rng.integers(1, 60, size=12)]
        self._talks: deque[list[int]] = deque(maxlen=40)

    async def run(self) -> None:
        """Until all requests have ended and all answers are checked."""
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._client(number), name=f"client {number}")
        self._check_answers()

    @property
    def _lull(self) -> bool:
        return self._started % 100 >= 70

    async def _client(self, number: int) -> None:
        while self._started < self._requests:
            if self._lull and number >= QUIET:
                async with self._end:
                    await self._end.wait_for(
                        lambda: not self._lull or self._started >= self._requests
                    )
                continue
            rng = np.random.default_rng([self._seed, self._started])
            self._started += 1
            if self._started % max(self._requests // 10, 1) == 0:
                self.tenth()
            async with asyncio.timeout(120):
                await self._ask(rng)
            async with self._end:
                self._ended += 1
                self._end.notify_all()
            if rng.random() < 0.06:
                async with self._meddling:
                    await self._meddle(rng)
            if len(self._answers) >= 2 * BATCH:
                async with self._checking:  # one at a time, so that one thread's memory is used
                    await asyncio.to_thread(self._check_answers)

    def _check_answers(self) -> None:
        answers, self._answers = self._answers, []
        self.reference.check(answers, self._changes_of, mixed=self._mixed)

    async def _ask(self, rng: Random) -> None:
        sampling = random_sampling(rng, lull=self._lull)
        request = GenerateRequest(prompt_ids=self._prompt(rng), sampling=sampling)
        kind = rng.choice(
            ["one", "stream", "several", "cancelled", "left", "refused"],
            p=[0.55, 0.15, 0.06, 0.12, 0.08, 0.04],
        )
        self.counts[str(kind)] += 1
        match kind:
            case "one":
                changes = self._changes
                self._keep(request, changes, await self.engine.generate(request))
            case "stream":
                await self._stream(request, leave=0)
            case "left":
                await self._stream(request, leave=int(rng.integers(1, 6)))
            case "several":
                await self._several(request, int(rng.integers(2, 5)))
            case "cancelled":
                await self._cancel(request, int(rng.integers(0, 10)))
            case _:
                await self._refused(request, int(rng.integers(5)))

    def _prompt(self, rng: Random) -> list[int]:
        source = rng.random()
        if source < 0.4 and self._talks:  # a next turn, or a fork of an earlier one
            talk = self._talks[rng.integers(len(self._talks))]
            cut = len(talk) if rng.random() < 0.7 else int(rng.integers(1, len(talk) + 1))
            return [*talk[:cut], *some_ids(rng, int(rng.integers(1, 12)))][: LENGTH - 1]
        if source < 0.8:
            beginning = self._beginnings[rng.integers(len(self._beginnings))]
            return [*beginning, *some_ids(rng, int(rng.integers(0, 8)))]
        return some_ids(rng, int(rng.choice([1, 2, 7, 8, 9, 40, 94, 95])))

    def _keep(self, request: GenerateRequest, changes: int, generation: Generation) -> None:
        self._answers.append(Answer(request, changes, generation))
        self._talks.append([*request.prompt_ids, *generation.token_ids.tolist()])

    async def _stream(self, request: GenerateRequest, *, leave: int) -> None:
        changes, deltas = self._changes, list[Delta]()
        async with aclosing(self.engine.stream(request)) as stream:
            async for delta in stream:
                deltas.append(delta)
                if len(deltas) == leave:
                    return
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        last = deltas[-1]
        assert last.finish_reason is not None
        top = tuple(each for delta in deltas for each in delta.top_logprobs)

        def joined(name: str, kind: type) -> npt.NDArray[np.generic]:
            return np.array([n for delta in deltas for n in getattr(delta, name)], kind)

        generation = Generation(
            token_ids=joined("token_ids", np.int32),
            logprobs=joined("logprobs", np.float32),
            base_logprobs=joined("base_logprobs", np.float32),
            versions=joined("versions", np.int32),
            top_logprobs=top if request.sampling.top_logprobs else (),
            finish_reason=last.finish_reason,
            matched=last.matched,
            reused_tokens=last.reused_tokens,
            queued_s=last.queued_s,
        )
        self._keep(request, changes, generation)

    async def _several(self, request: GenerateRequest, count: int) -> None:
        request = replace(request, sampling=replace(request.sampling, seed=count))
        changes = self._changes
        for number, generation in enumerate(await self.engine.generate_n(request, count)):
            own = replace(request.sampling, seed=count + number)
            self._keep(replace(request, sampling=own), changes, generation)

    async def _cancel(self, request: GenerateRequest, patience: int) -> None:
        """Cancels once some other requests have ended, or in the moment in which it ends."""
        changes = self._changes
        task = asyncio.ensure_future(self.engine.generate(request))
        others = asyncio.ensure_future(self._others(self._ended + patience))
        await asyncio.wait({task, others}, return_when=asyncio.FIRST_COMPLETED)
        others.cancel()
        task.cancel()
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(result, Generation):
            self._keep(request, changes, result)
        else:
            assert isinstance(result, asyncio.CancelledError)

    async def _others(self, ended: int) -> None:
        async with self._end:
            await self._end.wait_for(lambda: self._ended >= ended)

    async def _refused(self, request: GenerateRequest, kind: int) -> None:
        sampling = request.sampling
        free = replace(sampling, regex=None, json_schema=None, choices=())
        nothing = replace(free, logit_bias=dict.fromkeys(range(VOCABULARY), -np.inf))
        bad, error = (
            (replace(request, prompt_ids=[]), EngineError),
            (replace(request, prompt_ids=[VOCABULARY]), EngineError),
            (replace(request, prompt_ids=[1] * LENGTH), ContextLengthError),
            (replace(request, sampling=replace(free, regex="(")), ConfigError),
            (replace(request, sampling=nothing), EngineError),
        )[kind]
        with pytest.raises(error):
            await self.engine.generate(bad)

    async def _meddle(self, rng: Random) -> None:
        kind = rng.choice(["publish", "pause", "clear"], p=[0.6, 0.2, 0.2])
        self.counts[str(kind)] += 1
        match kind:
            case "publish":
                # Where keys of other weights may be kept, most publications bring the same weights once
                # more, and others come with a version that is too far away for reuse.
                self._version += 1
                if not self._mixed or rng.random() < 0.15:
                    self._version += self.engine.config.reuse_lag
                    self._changes += 1
                self._changes_of[self._version] = self._changes
                self.engine.publish(self.states[self._changes % len(self.states)], self._version)
            case "pause":
                self.engine.pause()
                await until(lambda: self.engine._clock.state == "paused")
                self.engine.resume()
            case _:
                self.engine.clear_cache()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what another thread does has no event
            await asyncio.sleep(0)


# ---------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def decoders(make_decoder: Callable[..., Decoder]) -> list[Decoder]:
    # With so many numbers in a row, XLA's sums of them depend on how many rows there are.
    return [make_decoder(seed, vocab_size=VOCABULARY, hidden_size=96) for seed in range(3)]


@pytest.fixture(scope="module")
def reference(decoders: list[Decoder]) -> Reference:
    return Reference(decoders)


@pytest.fixture(scope="module")
def compiled(decoders: list[Decoder]) -> Programs:
    graph, state = nnx.split(decoders[0])
    programs = Programs(graph, state, CONFIG.resolved(decoders[0].config), kernels=load())
    programs.compile()
    return programs


@pytest.fixture
def copies(compiled: Programs, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has engines of `CONFIG`'s sizes take what was compiled once; gets how many pages each copy had."""

    def take(self: Programs, log: Callable[[str], None] = lambda name: None) -> None:
        self._forwards, self._bursts = compiled._forwards, compiled._bursts
        self._samplers = compiled._samplers
        self._copy = compiled._copy

    done: list[int] = []
    copy = Programs.copy

    def counted(self: Programs, cache: object, pairs: list[tuple[int, int]]) -> object:
        done.append(len(pairs))
        return copy(self, cache, pairs)

    monkeypatch.setattr(Programs, "compile", take)
    monkeypatch.setattr(Programs, "copy", counted)
    return done


@pytest.fixture
def bursts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets how many requests took part in each burst."""
    done: list[int] = []
    burst = Programs.burst

    def counted(self: Programs, rows: int, *rest: object) -> object:
        count, _ = rest[-2:]
        done.append(count)
        return burst(self, rows, *rest)

    monkeypatch.setattr(Programs, "burst", counted)
    return done


@contextmanager
def serving(decoder: Decoder, config: EngineConfig) -> Iterator[JaxEngine]:
    threads = set(threading.enumerate())
    engine = JaxEngine(decoder, config, timeline=Timeline(), tokenizer=TOKENIZER)
    try:
        engine.ready.wait(120)
        yield engine
    finally:
        asyncio.run(engine.aclose())
    left = set(threading.enumerate()) - threads
    assert not [thread for thread in left if thread.name == "engine"]


def assert_nothing_left(engine: JaxEngine) -> None:
    """No page, ticket or node of the tree belongs to a request that has ended."""
    asyncio.run(until(lambda: engine._flight is None and not engine._cancelled))
    assert engine.running == engine.waiting == 0
    assert engine.free_pages == engine.config.total_pages - 1
    assert not engine._tickets
    assert not engine._new
    engine.clear_cache()
    asyncio.run(until(lambda: not engine._forget and not engine._scheduler._pages.root.children))
    assert not any(engine._scheduler._pages._users)
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, Ticket)]


def soak(
    engine: JaxEngine,
    reference: Reference,
    decoders: Sequence[Decoder],
    *,
    seed: int,
    requests: int,
    tenth: Callable[[], None] = lambda: None,
) -> Counter[str]:
    reference.counts.clear()
    states = [nnx.state(decoder) for decoder in decoders]

    async def run() -> Clients:
        clients = Clients(engine, reference, states, seed=seed, requests=requests)
        clients.tenth = tenth
        await clients.run()
        return clients

    counts = asyncio.run(run()).counts
    assert_nothing_left(engine)
    assert counts.total() - counts["publish"] - counts["pause"] - counts["clear"] == requests
    stats = engine._scheduler.stats
    assert stats.preemptions > 0
    assert stats.evictions > 0
    assert stats.reused > 0
    checked = reference.counts
    assert checked["too close to call"] < 0.05 * checked["computed again"]
    return counts + checked


def assert_enough(counts: Counter[str], on_publish: str) -> None:
    """Without keys and values of older weights, all tokens; else those before a change of weights."""
    share = counts["computed again"] / counts["tokens"]
    assert share == 1 if on_publish == "recompute" else share > 0.4


def assert_bursts(bursts: list[int], counts: Counter[str]) -> None:
    """A tenth of all tokens or so came in bursts, of one request and of several."""
    tokens = CONFIG.burst * sum(bursts)
    assert tokens > 0.05 * counts["tokens"]
    assert set(range(1, QUIET + 1)) <= set(bursts)


@pytest.mark.parametrize(("on_publish", "reuse_lag"), [("recompute", 0), ("keep", 0), ("keep", 2)])
def test_every_answer_is_what_plain_arithmetic_gives(
    decoders: list[Decoder],
    reference: Reference,
    copies: list[int],
    bursts: list[int],
    compilations: list[str],
    on_publish: str,
    reuse_lag: int,
) -> None:
    config = replace(CONFIG, on_publish=on_publish, reuse_lag=reuse_lag)
    with serving(decoders[0], config) as engine:
        del compilations[:]
        counts = soak(engine, reference, decoders, seed=1, requests=300)
        assert engine.counts.publications > 0
    assert compilations == []
    assert sum(copies) > 0
    assert_bursts(bursts, counts)
    assert_enough(counts, on_publish)


def test_the_same_bits_alone_and_in_the_crowd(
    decoders: list[Decoder],
    copies: list[int],
    bursts: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether a prefix was prefilled, decoded, found, copied or computed again after pre-emption, and whether
    tokens came one by one or in bursts."""
    rng = np.random.default_rng(3)
    beginnings = [some_ids(rng, int(size)) for size in rng.integers(5, 50, size=6)]
    talks = [[*beginnings[n % 6], *some_ids(rng, int(rng.integers(1, 9)))] for n in range(40)]
    asked: list[tuple[GenerateRequest, Generation]] = []
    tickets: list[Ticket] = []

    async def together(engine: JaxEngine) -> None:
        for _ in range(2):
            requests = [
                GenerateRequest(prompt_ids=talk, sampling=random_sampling(rng))
                for talk in talks
                if len(talk) < LENGTH - 8
            ]
            answers = await asyncio.gather(*(engine.generate(each) for each in requests))
            asked.extend(zip(requests, answers, strict=True))
            for number, (request, answer) in enumerate(zip(requests, answers, strict=True)):
                talks[number] = [*request.prompt_ids, *answer.token_ids.tolist(), number]
            del talks[len(requests) :]

    async def alone(engine: JaxEngine) -> list[Generation]:
        answers: list[Generation] = []
        for request, _ in asked:
            engine.clear_cache()
            answers.append(await engine.generate(request))
        return answers

    with serving(decoders[0], CONFIG) as engine:
        take = engine._desk.ticket

        def noted(request: GenerateRequest, *, streaming: bool) -> Ticket:
            tickets.append(take(request, streaming=streaming))
            return tickets[-1]

        monkeypatch.setattr(engine._desk, "ticket", noted)
        asyncio.run(together(engine))
        assert sum(ticket.request.preemptions > 0 for ticket in tickets) > 5
        assert sum(ticket.request.reused > 0 for ticket in tickets) > 20
        assert sum(copies) > 0
        tickets.clear()
        in_crowd = len(bursts)
        expected = asyncio.run(alone(engine))
        assert len(bursts) > in_crowd + 20
        assert not any(ticket.request.reused or ticket.request.preemptions for ticket in tickets)
        tickets.clear()
        exact = (
            engine._kernels is not None
        )  # what XLA's products sum in which order depends on their shapes
    for (_, answer), other in zip(asked, expected, strict=True):
        np.testing.assert_array_equal(answer.token_ids, other.token_ids)
        for name in ("logprobs", "base_logprobs"):
            np.testing.assert_allclose(
                getattr(answer, name), getattr(other, name), atol=0 if exact else 1e-5, rtol=0
            )


@pytest.mark.slow
@pytest.mark.parametrize(("on_publish", "reuse_lag"), [("recompute", 0), ("keep", 2)])
def test_ten_thousand_requests_leave_nothing(
    decoders: list[Decoder],
    reference: Reference,
    copies: list[int],
    bursts: list[int],
    compilations: list[str],
    on_publish: str,
    reuse_lag: int,
) -> None:
    """Twenty thousand, both ways together."""
    config = replace(CONFIG, on_publish=on_publish, reuse_lag=reuse_lag)
    resident: list[int] = []
    with serving(decoders[0], config) as engine:
        del compilations[:]
        counts = soak(
            engine,
            reference,
            decoders,
            seed=2,
            requests=10_000,
            tenth=lambda: resident.append(resident_kb()),
        )
        made = engine.counts, engine._scheduler.stats, sum(copies), Counter(bursts), resident
        print(dict(counts), *made)  # noqa: T201 - for who runs it
    assert compilations == []
    assert sum(copies) > 0
    assert_bursts(bursts, counts)
    assert_enough(counts, on_publish)
    # What is resident goes up and down by tens of MB with what malloc holds back; a leak moves its floor.
    assert min(resident[5:]) - min(resident[:5]) < 12_000


def resident_kb() -> int:
    gc.collect()
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize() // 1024
