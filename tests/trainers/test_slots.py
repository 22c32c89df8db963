"""The slot scheduler, without a device: what a cache would hold is written down step by step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from gymllm.engine import FinishReason, SamplingParams
from gymllm.errors import ConfigError
from gymllm_trainers.engine.config import EngineConfig
from gymllm_trainers.engine.slots import PATIENCE, Request, SlotScheduler, Step

CONFIG = EngineConfig(
    slots=4,
    context_length=48,
    small_batch=2,
    prefill_chunks=(4, 16),
    share_prefix=6,
    reuse_lag=2,
)


def request(ids: Sequence[int], *, new: int = 3, stop: tuple[int, ...] = ()) -> Request:
    sampling = SamplingParams(max_new_tokens=new, stop_token_ids=stop)
    return Request(sampling=sampling, ids=list(ids), prompt_length=len(ids))


def next_token(ids: Sequence[int]) -> int:
    """The model: the next token is a function of all the tokens before it."""
    return hash(tuple(ids)) % 1000


class Device:
    """Runs a scheduler's steps on a cache whose cells say which token, and which weights', they are."""

    def __init__(self, config: EngineConfig = CONFIG) -> None:
        self.config = config
        self.slots = SlotScheduler(config)
        self.cache: list[dict[int, tuple[int, int]]] = [{} for _ in range(config.slots)]
        self.version = 0
        self.copies = 0
        self.steps: list[Step] = []
        self.admitted: dict[Request, int] = {}
        """Version at which each request got its slot."""

    def admit(self) -> None:
        copies = self.slots.admit(self.version)
        self.copies += len(copies)
        for copy in copies:
            self.cache[copy.target] = dict(self.cache[copy.source])
        for running in self.slots.everything():
            if running.slot >= 0:
                self.admitted.setdefault(running, self.version)

    def step(self) -> list[Request]:
        self.slots.drop_cancelled()
        self.admit()
        step = self.slots.next_step()
        if step is None:
            return []
        self.steps.append(step)
        assert (step.batch_rows, step.chunk) in self.config.shapes
        assert len(step.rows) <= step.batch_rows
        assert len({row.slot for row in step.rows}) == len(step.rows), "a slot is in one row"
        sampled: list[int] = []
        for row in step.rows:
            ids, cells = row.request.ids, self.cache[row.slot]
            end = row.start + len(row.tokens)
            assert 1 <= len(row.tokens) <= step.chunk
            assert end < self.config.context_length
            assert list(row.tokens) == ids[row.start : end]
            assert row.last == (end == len(ids))
            held = [cells[at] for at in range(row.start)]
            assert [token for token, _ in held] == ids[: row.start], (
                "it goes on from its own tokens"
            )
            limit = self.admitted[row.request] - self.config.reuse_lag
            assert all(version >= limit for _, version in held), "kept keys are not too old"
            for at, token in enumerate(row.tokens, row.start):
                cells[at] = (token, self.version)
            sampled.append(next_token(ids))
        # The device computes rows that are not in use too: what they sample means nothing.
        sampled += [-1] * (step.batch_rows - len(sampled))
        return self.slots.advance(step, sampled, [-1.0] * len(sampled), self.version)

    def run(self, *requests: Request) -> list[Request]:
        """Adds requests and runs until nothing is left; they end in this order."""
        for one in requests:
            self.slots.add(one)
        ended: list[Request] = []
        while self.slots.running or self.slots.waiting:
            before = len(self.steps)
            ended += self.step()
            assert len(self.steps) > before, "something is left, so something runs"
        return ended


def expected(prompt: Sequence[int], new: int) -> list[int]:
    ids = list(prompt)
    for _ in range(new):
        ids.append(next_token(ids))
    return ids


def test_generates_what_the_model_says() -> None:
    device = Device()
    (done,) = device.run(request(range(10), new=5))
    assert done.ids == expected(range(10), 5)
    assert done.finish is FinishReason.LENGTH
    assert len(done.logprobs) == len(done.versions) == done.generated == 5
    assert device.slots.prefilled_tokens == 10


def test_one_more_request_than_slots_waits_and_ends() -> None:
    device = Device()
    requests = [request([start], new=4) for start in range(5)]
    for one in requests:
        device.slots.add(one)
    device.step()
    assert (device.slots.running, device.slots.waiting) == (4, 1)
    assert requests[4].slot == -1
    device.run()
    assert [one.ids for one in requests] == [expected([start], 4) for start in range(5)]


def test_first_come_first_served() -> None:
    ended = Device().run(*(request([start], new=3) for start in range(12)))
    assert [one.ids[0] for one in ended] == list(range(12))


def test_stop_token_is_kept_and_ends() -> None:
    ids = expected(range(3), 6)
    (done,) = Device().run(request(range(3), new=6, stop=(ids[5],)))
    assert done.ids == ids[:6]
    assert done.finish is FinishReason.STOP


def test_stop_token_at_the_limit_is_a_stop() -> None:
    ids = expected(range(3), 2)
    (done,) = Device().run(request(range(3), new=2, stop=(ids[4],)))
    assert done.finish is FinishReason.STOP


@pytest.mark.parametrize("size", [40, 46, 47])
def test_the_context_is_filled_to_its_last_token(size: int) -> None:
    (done,) = Device().run(request(range(size), new=100))
    assert done.ids == expected(range(size), 48 - size)
    assert done.finish is FinishReason.LENGTH


def test_next_turn_goes_on_in_its_slot() -> None:
    device = Device()
    (first,) = device.run(request(range(10), new=4))
    other = request([7, 7, 7], new=2)
    second = request([*first.ids, 1, 2, 3], new=2)
    before = device.slots.prefilled_tokens
    device.run(other, second)
    assert second.slot == first.slot != other.slot
    # All but the last generated token, whose keys were never computed, and the new ones.
    assert device.slots.prefilled_tokens - before == 3 + (1 + 3)
    assert device.copies == 0


def test_a_repeated_prompt_computes_its_last_token_only() -> None:
    device = Device()
    device.run(request(range(10), new=4))
    before = device.slots.prefilled_tokens
    (again,) = device.run(request(range(10), new=4))
    assert device.slots.prefilled_tokens - before == 1
    assert again.ids == expected(range(10), 4)


def test_siblings_wait_for_the_first_ones_prefill_and_copy_it() -> None:
    device = Device()
    siblings = [request([*range(26), member], new=2) for member in range(4)]
    for one in siblings:
        device.slots.add(one)
    device.step()
    assert (device.slots.running, device.slots.waiting) == (1, 3)
    device.run()
    assert device.copies == 3
    assert device.slots.prefilled_tokens == 27 + 3 * 1
    assert [one.ids for one in siblings] == [expected([*range(26), m], 2) for m in range(4)]


def test_a_beginning_that_is_too_short_is_neither_waited_for_nor_copied() -> None:
    device = Device()
    for member in range(4):
        device.slots.add(request([*range(5), 100 + member, *range(20)]))
    device.step()
    assert (device.slots.running, device.copies) == (4, 0)


def test_who_waits_for_a_sibling_that_is_cancelled_starts_itself() -> None:
    device = Device()
    first, second = (request([*range(20), member]) for member in range(2))
    device.slots.add(first)
    device.slots.add(second)
    device.step()
    assert second.slot == -1
    first.cancelled = True
    device.run()
    assert second.ids == expected([*range(20), 1], 3)


def test_a_waiting_sibling_lets_others_pass() -> None:
    device = Device()
    first, sibling = (request([*range(20), member]) for member in range(2))
    other = request([50, 51])
    for one in (first, sibling, other):
        device.slots.add(one)
    device.step()
    assert first.slot >= 0
    assert sibling.slot == -1
    assert other.slot >= 0


def test_copy_takes_the_slot_unused_for_longest() -> None:
    device = Device()
    old, young = (device.run(request([start] * 4))[0].slot for start in (1, 2))
    device.slots.add(request(range(20), new=20))
    for _ in range(4):
        device.step()
    device.slots.add(request([*range(20), 7]))
    device.step()
    # The two slots that were never used are gone; the next is the one used longest ago.
    device.run(request([*range(20), 8]))
    assert device.cache[young][0][0] == 2
    assert device.cache[old][0][0] == 0


@pytest.mark.parametrize(("behind", "computed"), [(2, 1), (3, 10)])
def test_keys_older_than_reuse_lag_are_computed_again(behind: int, computed: int) -> None:
    device = Device()
    device.run(request(range(10)))
    device.version += behind
    before = device.slots.prefilled_tokens
    device.run(request(range(10)))
    assert device.slots.prefilled_tokens - before == computed


def test_age_follows_a_copy_and_a_continuation() -> None:
    device = Device()
    device.run(request(range(10), new=20))
    device.version = 2
    device.slots.add(request([*range(10), 5], new=20))
    device.step()
    device.slots.add(request([*range(10), 6], new=20))
    device.step()
    assert device.copies == 1
    device.run()
    device.version = 3  # some keys of both are of version 0
    before = device.slots.prefilled_tokens
    device.run(request([*range(10), 5]), request([*range(10), 6]))
    assert device.slots.prefilled_tokens - before == 11 + 1  # the second is the first's sibling


def test_cancellation_frees_the_slot_and_the_place_in_the_queue() -> None:
    device = Device()
    requests = [request([start], new=30) for start in range(6)]
    for one in requests:
        device.slots.add(one)
    device.step()
    requests[0].cancelled = requests[5].cancelled = True
    assert device.slots.drop_cancelled() == [requests[5], requests[0]]
    assert (device.slots.running, device.slots.waiting) == (3, 1)
    device.admit()
    assert requests[4].slot == requests[0].slot
    assert device.slots.drop_cancelled() == []


def test_versions_are_those_of_each_token() -> None:
    device = Device()
    one = request(range(3), new=4)
    device.slots.add(one)
    while one.finish is None:
        device.version += 1
        device.step()
    assert one.versions == [1, 2, 3, 4]


def test_prefill_and_decode_take_turns() -> None:
    device = Device()
    device.slots.add(request([1], new=40))
    device.step()
    device.slots.add(request(range(40), new=1))
    chunks = []
    for _ in range(6):
        device.step()
        chunks.append(device.steps[-1].chunk)
    assert chunks[0] > 1
    assert all((left == 1) != (right == 1) for left, right in pairwise(chunks))


def test_lone_prompts_share_a_step_or_wait_for_it() -> None:
    device = Device()
    device.slots.add(request([1], new=40))
    device.step()
    device.slots.add(request(range(3), new=1))  # 3 of a step's 8 tokens
    device.step()
    assert device.steps[-1].chunk == 4, "the first prompt for long is not kept waiting"
    device.slots.add(request(range(10, 13), new=1))
    chunks: list[int] = []
    while not chunks or chunks[-1] == 1:
        device.step()
        chunks.append(device.steps[-1].chunk)
    assert chunks == [1] * PATIENCE + [4]


def test_prompts_that_fill_half_a_step_do_not_wait() -> None:
    device = Device()
    device.slots.add(request([1], new=40))
    device.step()
    for start in (10, 20):
        device.slots.add(request(range(start, start + 3), new=1))
    device.step()
    assert device.steps[-1].chunk == 4


def test_nothing_to_do_is_no_step() -> None:
    slots = SlotScheduler(CONFIG)
    assert slots.admit(0) == []
    assert slots.next_step() is None


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_events_gives_the_same_tokens(seed: int) -> None:
    """Turns, siblings, strangers, cancellations and new weights, in any order.

    `Device.step` checks at every step that what is in the cache is what the request thinks it is.
    """
    rng = random.Random(seed)
    config = EngineConfig(
        slots=rng.randint(1, 5),
        context_length=40,
        small_batch=rng.randint(1, 3),
        prefill_chunks=rng.choice([(2,), (4, 16), (3, 5, 40)]),
        share_prefix=rng.choice([1, 4, 10]),
        reuse_lag=rng.randint(0, 2),
    )
    device = Device(config)
    beginnings = [[10 * b + rng.randrange(3) for _ in range(12)] for b in range(2)]
    past: list[list[int]] = [list(ids) for ids in beginnings]
    asked: list[tuple[Request, list[int]]] = []
    for _ in range(120):
        event = rng.random()
        if event < 0.35:
            stem = rng.choice(past)
            prompt = stem[: rng.randint(1, len(stem))] + [rng.randrange(3) for _ in range(3)]
            if len(prompt) < config.context_length:
                one = request(prompt, new=rng.randint(1, 8))
                asked.append((one, prompt))
                device.slots.add(one)
        elif event < 0.4 and asked:
            rng.choice(asked)[0].cancelled = True
        elif event < 0.5:
            device.version += 1
        else:
            past += [one.ids for one in device.step()]
    device.run()
    for one, prompt in asked:
        if one.finish is None:
            assert one.cancelled
        else:
            assert one.ids == expected(prompt, one.generated)
            assert one.versions == sorted(one.versions)
    assert (device.slots.running, device.slots.waiting) == (0, 0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"slots": 0}, "engine.slots must be >= 1, got 0"),
        ({"context_length": 1}, "engine.context_length must be >= 2, got 1"),
        ({"reuse_lag": -1}, "engine.reuse_lag must be >= 0, got -1"),
        ({"prefill_chunks": ()}, "in rising order"),
        ({"prefill_chunks": (1, 8)}, "in rising order"),
        ({"prefill_chunks": (8, 4)}, "in rising order"),
        ({"prefill_chunks": (8, 8)}, "in rising order"),
    ],
)
def test_settings_out_of_range_are_refused(setting, message) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**setting)


def test_shapes_are_few_and_follow_from_the_settings() -> None:
    assert CONFIG.shapes == ((2, 1), (4, 1), (2, 4), (4, 4), (2, 16), (4, 16))
    assert EngineConfig(slots=3, small_batch=8, prefill_chunks=(8,)).shapes == ((3, 1), (3, 8))
