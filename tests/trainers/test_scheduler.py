"""The scheduler against a device that is only written down: which token is in which cell of which page."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from gymllm_trainers.engine.config import EngineConfig
from gymllm_trainers.engine.pages import Node
from gymllm_trainers.engine.requests import DecodeRow, PrefillBlock, Request, Step
from gymllm_trainers.engine.scheduler import Scheduler

CONFIG = EngineConfig(
    slots=4,
    context_length=48,
    small_batch=2,
    prefill_tokens=(8, 32),
    page_size=4,
    reuse_lag=2,
    burst=1,
)


BURSTS = replace(CONFIG, burst=3)


def request(
    ids: Sequence[int], *, new: int = 3, lockstep: bool = False, bursts: bool = True
) -> Request:
    return Request(
        ids=list(ids),
        prompt_length=len(ids),
        max_new_tokens=new,
        lockstep=lockstep,
        bursts=bursts and not lockstep,
    )


def next_token(ids: Sequence[int]) -> int:
    """The model: the next token is a function of all the tokens before it."""
    return hash(tuple(ids)) % 1000


def expected(prompt: Sequence[int], new: int) -> list[int]:
    ids = list(prompt)
    for _ in range(new):
        ids.append(next_token(ids))
    return ids


def requests_of(step: Step | None) -> set[Request]:
    return {entry.request for entry in (*step.decode, *step.prefill)} if step else set()


@dataclass
class Cell:
    """One position of a page."""

    token: int
    version: int


@dataclass
class Launched:
    """A step on its way, with the page tables it was launched with."""

    step: Step
    tables: dict[Request, list[int]]
    version: int
    required: dict[Request, int]
    """Oldest weights that each request may read."""


@dataclass
class Device:
    """Runs steps in order and, as the real pipeline does, one step behind the scheduler.

    Every read is checked: a row sees exactly the tokens of its own request, of weights not too old.
    """

    config: EngineConfig = CONFIG
    ahead: bool = True
    """Whether a step is scheduled before the one before is complete."""
    copies_at_once: bool = True
    stops: dict[Request, int] = field(default_factory=dict)
    """Requests that the engine ends when they have this many tokens."""

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config)
        empty = [None] * self.config.page_size
        self.cells: list[list[Cell | None]] = [list(empty) for _ in range(self.config.total_pages)]
        self.version = 0
        self.steps: list[Step] = []
        self.queue: deque[Launched] = deque()
        self.samples: list[int] = []
        self.required: dict[Request, int] = {}
        self.placed: dict[Request, tuple[int, int]] = {}
        """When each request got its first page: after how many pre-emptions, and at which version."""
        self.tables: dict[Request, tuple[list[int], list[int]]] = {}
        """Each request's list of pages, and what was in it."""
        self.ended: list[Request] = []
        self.alive: list[Request] = []

    def add(self, *requests: Request) -> None:
        for one in requests:
            self.scheduler.add(one)
            self.alive.append(one)

    def cancel(self, one: Request) -> None:
        self.scheduler.cancel(one)
        self.alive = [r for r in self.alive if not r.ended]

    def publish(self, version: int, *, recompute: bool = False) -> None:
        self.scheduler.set_version(version, recompute)
        self.version = version
        if recompute:
            for one in self.alive:
                if one.running or one.preemptions:
                    self.required[one] = version

    def turn(self, between: Callable[[], None] = lambda: None) -> Step | None:
        """Schedules a step, launches it, and completes the one before; `between` happens in between."""
        if self.queue and self.queue[0].step.burst > 1:
            self.complete()
        step = self.scheduler.schedule()
        for one in self.alive:
            if one.pages and self.placed.get(one, (-1, 0))[0] != one.preemptions:
                self.placed[one] = (one.preemptions, self.version)
        if step is not None:
            self.launch(step)
        for one in self.alive:
            pages, before = self.tables.get(one, (one.pages, []))
            assert one.pages is not pages or pages[: len(before)] == before, "a list only grows"
            self.tables[one] = (one.pages, list(one.pages))
        between()
        while len(self.queue) > (1 if self.ahead and step is not None else 0):
            self.complete()
        return step

    def launch(self, step: Step) -> None:
        self.steps.append(step)
        self.check_shape(step)
        tables = {one: list(one.pages) for one in requests_of(step)}
        self.check_writes(step, tables)
        targets = [target for _, target in step.copies]
        assert len(set(targets)) == len(targets) <= self.config.slots
        sources = [source for source, _ in step.copies]
        assert all(source not in targets[: i + 1] for i, source in enumerate(sources))
        required = {
            one: max(self.placed[one][1] - self.config.reuse_lag, self.required.get(one, 0))
            for one in tables
        }
        self.queue.append(Launched(step, tables, self.version, required))

    def check_writes(self, step: Step, tables: dict[Request, list[int]]) -> None:
        """Nobody writes to a page that another request writes to, or read before this step."""
        size = self.config.page_size
        nodes = {node.page: node for node in nodes_of(self.scheduler)}
        writer: dict[int, Request] = {}
        places = writes(step)
        assert len(set(places)) == len(places)
        for one, at in places:
            page = tables[one][at // size]
            assert page != 0
            assert writer.setdefault(page, one) is one
            assert page not in nodes or nodes[page].step == self.scheduler._placement.step
        for page, one in writer.items():
            for other in self.alive:
                if other is not one and page in other.pages:
                    assert page in nodes
                    assert nodes[page] in other.nodes

    def check_shape(self, step: Step) -> None:
        assert (step.rows, step.blocks) in self.config.shapes
        assert len(step.decode) <= step.rows
        assert len(step.prefill) <= step.blocks
        smaller = [s for s in self.config.shapes if s[0] <= step.rows and s[1] <= step.blocks]
        fits = [s for s in smaller if len(step.decode) <= s[0] and len(step.prefill) <= s[1]]
        assert fits == [(step.rows, step.blocks)], "the smallest shape that fits"
        samples = [row.request for row in step.decode]
        samples += [block.request for block in step.prefill if block.samples]
        assert len(set(samples)) == len(samples) <= self.config.slots
        assert step.decode or step.prefill
        for one in requests_of(step):
            blocks = [block for block in step.prefill if block.request is one]
            assert all(a.start + len(a.tokens) <= b.start for a, b in pairwise(blocks))
            assert all(1 <= len(block.tokens) <= self.config.page_size for block in blocks)
            assert not any(block.samples for block in blocks[:-1])
            assert one.computed <= one.limit - 1
            assert one.lockstep <= all(row.source < 0 for row in step.decode if row.request is one)
            assert not one.ended
            if step.burst > 1:
                assert one.bursts
                assert not step.prefill
                assert len(one.ids) + one.pending <= one.limit

    def complete(self) -> None:
        launched = self.queue.popleft()
        samples = self.execute(launched)
        counted = self.scheduler.complete(launched.step, samples)
        seen = Counter(one for one, _ in counted)
        for one, token in counted:
            assert one.ids[-seen[one]] == token
            seen[one] -= 1
            known = len(one.ids) - seen[one]
            if one.full and not seen[one]:
                assert one.ended
            elif known >= self.stops.get(one, 1 << 30):
                self.scheduler.finish(one)
            if one.ended and one not in self.ended:
                self.ended.append(one)
        self.alive = [r for r in self.alive if not r.ended]

    def execute(self, launched: Launched) -> list[int]:
        step = launched.step
        if step.burst > 1:
            return self.execute_burst(launched)
        cells = list(self.cells) if self.copies_at_once else self.cells
        for source, target in step.copies:
            self.cells[target] = list(cells[source])
        entries: list[tuple[int, DecodeRow | PrefillBlock, int, list[int]]] = []
        for index, row in enumerate(step.decode):
            assert (row.token == -1) == (row.source >= 0)
            token = self.samples[row.source] if row.source >= 0 else row.token
            entries.append((index, row, row.position, [token]))
        for index, block in enumerate(step.prefill, step.rows):
            entries.append((index, block, block.start, list(block.tokens)))
        for _, entry, start, tokens in entries:
            self.write(launched, entry.request, start, tokens)
        samples = [-7] * (step.rows + step.blocks)
        for index, entry, start, tokens in entries:
            read = self.read(launched, entry.request, start + len(tokens))
            if isinstance(entry, DecodeRow) or entry.samples:
                samples[index] = next_token(read)
        self.samples = samples
        return samples

    def execute_burst(self, launched: Launched) -> list[int]:
        step = launched.step
        assert not step.copies
        samples = [-7] * (step.rows * step.burst)
        tokens = [self.samples[row.source] if row.source >= 0 else row.token for row in step.decode]
        for number in range(step.burst):
            for row, token in zip(step.decode, tokens, strict=True):
                self.write(launched, row.request, row.position + number, [token])
            tokens = [
                next_token(self.read(launched, row.request, row.position + number + 1))
                for row in step.decode
            ]
            start = number * step.rows
            samples[start : start + len(tokens)] = tokens
        return samples

    def write(self, launched: Launched, one: Request, start: int, tokens: list[int]) -> None:
        size = self.config.page_size
        for at, token in enumerate(tokens, start):
            page = launched.tables[one][at // size]
            self.cells[page][at % size] = Cell(token, launched.version)

    def read(self, launched: Launched, one: Request, end: int) -> list[int]:
        size = self.config.page_size
        read: list[int] = []
        for at in range(end):
            cell = self.cells[launched.tables[one][at // size]][at % size]
            assert cell is not None, "only what was written is read"
            assert cell.version >= launched.required[one], "kept keys are not too old"
            read.append(cell.token)
        known = one.ids[: len(read)]
        assert read[: len(known)] == known, "a row reads its own tokens"
        assert len(read) <= len(known) + launched.step.burst
        return read

    def run(self, *requests: Request) -> list[Request]:
        """Adds requests and runs until nothing is left; they end in this order."""
        self.add(*requests)
        before = len(self.ended)
        idle = 0
        while self.scheduler.running or self.scheduler.waiting:
            idle = idle + 1 if self.turn() is None else 0
            assert idle <= 1, "something is left, so something runs"
        while self.queue:
            self.complete()
        return self.ended[before:]

    def run_until(self, *requests: Request) -> list[Request]:
        """Adds requests and runs until they have ended, whatever else is left."""
        self.add(*requests)
        while not all(one.ended for one in requests):
            self.turn()
        return list(requests)

    def check_pages(self) -> None:
        """No page is lost or in two places; whoever uses one is counted."""
        for queue in (self.scheduler._running, self.scheduler._waiting):
            assert all(one.arrival < other.arrival for one, other in pairwise(queue))
        pages, nodes = self.scheduler._pages, nodes_of(self.scheduler)
        in_tree = [node.page for node in nodes]
        assert len(set(in_tree)) == len(in_tree)
        assert len(set(pages._free)) == len(pages._free)
        users = Counter(page for one in self.alive for page in one.pages)
        users.update(in_tree)
        for page in range(1, self.config.total_pages):
            assert pages._users[page] == users[page]
            assert (users[page] == 0) == (page in set(pages._free))
        through = Counter(node for one in self.alive for node in one.nodes)
        for node in nodes:
            assert node.users == through[node]
            assert (node in pages._unused) == (node.users == 0)
            assert node.parent is not None
            assert node.parent is pages.root or node.parent.users >= node.users
            assert len(node.key) == self.config.page_size or not node.children
        assert set(pages._unused) <= set(nodes)
        order = {node: index for index, node in enumerate(pages._unused)}
        for node in order:
            assert order.get(node.parent, len(order)) > order[node], "a leaf is evicted first"

    def check_tree(self) -> None:
        """With nothing on its way, each page of the tree holds what its node says."""
        assert not self.queue
        stack = [(node, 1 << 60) for node in self.scheduler._pages.root.children.values()]
        while stack:
            node, above = stack.pop()
            cells = self.cells[node.page][: len(node.key)]
            assert tuple(cell.token for cell in cells if cell) == node.key
            assert node.version <= min(above, *(cell.version for cell in cells if cell))
            stack += [(child, node.version) for child in node.children.values()]

    def check_nothing_left(self) -> None:
        """Every page is free or in the tree, unused; and free once the tree is cleared."""
        assert (self.scheduler.running, self.scheduler.waiting) == (0, 0)
        assert self.scheduler.free_pages == self.config.total_pages - 1
        self.check_pages()
        self.check_tree()
        self.scheduler.clear_cache()
        assert not self.scheduler._pages.root.children
        assert len(self.scheduler._pages._free) == self.config.total_pages - 1


def nodes_of(scheduler: Scheduler) -> list[Node]:
    found: list[Node] = []
    stack = [scheduler._pages.root]
    while stack:
        children = stack.pop().children.values()
        found += children
        stack += children
    return found


def writes(step: Step) -> list[tuple[Request, int]]:
    """Every position that a step writes."""
    places = [(row.request, row.position + i) for row in step.decode for i in range(step.burst)]
    for block in step.prefill:
        places += [(block.request, block.start + i) for i in range(len(block.tokens))]
    return places


@pytest.mark.parametrize("ahead", [True, False])
def test_generates_what_the_model_says(ahead: bool) -> None:
    device = Device(ahead=ahead)
    (done,) = device.run(request(range(10), new=9))
    assert done.ids == expected(range(10), 9)
    device.check_nothing_left()


def prefilled(device: Device) -> int:
    return device.scheduler.stats.prefilled


def test_a_token_on_its_way_is_taken_from_the_device() -> None:
    device = Device()
    device.run(request(range(9), new=4))
    first, *rest = device.steps
    assert [len(block.tokens) for block in first.prefill] == [4, 4]
    assert [(row.token, row.position) for row in first.decode] == [(8, 8)], "cheaper than a block"
    assert [row.token for step in rest for row in step.decode] == [-1] * 3
    assert [row.position for step in rest for row in step.decode] == [9, 10, 11]


def test_nothing_is_scheduled_beyond_the_limits() -> None:
    for prompt, new, context in ((5, 4, 48), (5, 90, 20), (19, 9, 20), (1, 1, 20)):
        device = Device(EngineConfig(slots=2, context_length=context, page_size=4))
        (done,) = device.run(request(range(prompt), new=new))
        total = min(prompt + new, context)
        assert len(done.ids) == total
        assert sorted(at for step in device.steps for _, at in writes(step)) == list(
            range(total - 1)
        )


def test_ends_by_length_are_told() -> None:
    device = Device()
    one = request([1], new=2)
    device.add(one)
    device.turn()
    device.turn()
    assert (one.full, one.ended) == (False, False)
    assert device.turn() is None
    assert (one.full, one.ended) == (True, True)
    assert device.scheduler.running == 0


def test_a_slot_is_free_once_the_last_token_is_on_its_way() -> None:
    device = Device()
    device.add(*(request([start], new=2) for start in range(4)))
    late = request([9], new=2)
    device.add(late)
    device.turn()
    device.turn()
    assert not requests_of(device.steps[-1]) & {late}
    device.turn()
    assert requests_of(device.steps[-1]) == {late}
    device.run()


def test_a_stop_ends_a_request_whose_next_row_is_on_its_way() -> None:
    device = Device()
    one = request(range(6), new=20)
    device.stops[one] = 8
    device.run(one)
    assert one.ids == expected(range(6), 2)
    assert requests_of(device.steps[-1]) == {one}, "it was on its way"
    device.check_nothing_left()


def test_lockstep_waits_for_its_token_and_nobody_else_does() -> None:
    device = Device()
    slow, quick = request([1], new=4, lockstep=True), request([2], new=7)
    device.run(slow, quick)
    assert all(row.source == -1 for s in device.steps for row in s.decode if row.request is slow)
    turns = [one for step in device.steps for one in requests_of(step) if one is slow]
    assert len(turns) == 4
    assert len(device.steps) == 7
    assert slow.ids == expected([1], 4)


def test_the_members_of_a_group_compute_their_prompt_once_and_at_once() -> None:
    device = Device()
    device.add(*(request(range(18), new=4) for _ in range(4)))
    step = device.turn()
    assert step is not None
    assert len(requests_of(step)) == 4
    assert prefilled(device) == 16 + 4 * 2
    device.run()
    assert device.scheduler.stats.reused == 3 * 16
    assert [one.reused for one in device.ended] == [0, 16, 16, 16]
    device.check_nothing_left()


def test_a_long_common_prompt_is_computed_once_over_many_steps() -> None:
    config = EngineConfig(slots=4, context_length=200, prefill_tokens=(16,), page_size=4)
    device = Device(config)
    device.run(*(request(range(162), new=4) for _ in range(4)))
    # Those that are behind copy the beginning of the last page, or compute it beside.
    assert 162 <= prefilled(device) <= 160 + 4 * 2
    assert len([step for step in device.steps if step.prefill]) <= 12


@pytest.mark.parametrize("new", [7, 9, 10])
def test_the_next_turn_computes_only_what_is_new(new: int) -> None:
    device = Device()
    (first,) = device.run(request(range(10), new=new))
    turn = [*first.ids, *range(50, 57)]
    before = prefilled(device)
    (second,) = device.run(request(turn, new=3))
    # The last token of a turn was sampled, so its keys and values were never computed.
    assert second.reused == len(first.ids) - 1
    assert prefilled(device) - before == 1 + 7
    assert second.ids == expected(turn, 3)
    device.check_nothing_left()


def test_a_prompt_that_is_known_costs_one_row() -> None:
    for length in (15, 16, 17):
        device = Device()
        device.run(request(range(length), new=3))
        before = prefilled(device)
        device.add(*(request(range(length), new=3) for _ in range(3)))
        step = device.turn()
        assert step is not None
        assert (len(step.decode), len(step.prefill), step.blocks) == (3, 0, 0)
        assert all(row.token == length - 1 for row in step.decode)
        assert prefilled(device) - before == 3
        device.run()
        device.check_nothing_left()


def test_forks_copy_the_page_that_is_partly_common() -> None:
    device = Device()
    device.run(request(range(12), new=1))
    forks = [[*range(11), 70, 71], [*range(11), 80, 81], [*range(10), 90, 91]]
    device.add(*(request(ids, new=2) for ids in forks))
    step = device.turn()
    assert step is not None
    assert len(step.copies) == 3
    ended = device.run()
    assert [one.reused for one in ended] == [11, 11, 10]
    assert [one.ids for one in ended] == [expected(ids, 2) for ids in forks]
    device.check_nothing_left()


def test_what_the_step_in_the_making_writes_is_not_copied() -> None:
    device = Device()
    device.add(request(range(12), new=1), request([*range(11), 77, 78], new=1))
    step = device.turn()
    assert step is not None
    assert not step.copies
    assert prefilled(device) == 12 + 5
    device.run()


def test_one_common_token_is_not_worth_a_copy() -> None:
    device = Device()
    device.run(request(range(8), new=1))
    device.run(request([*range(5), 77, 78, 79], new=1))
    assert not any(step.copies for step in device.steps)


def test_a_turn_that_goes_on_replaces_the_end_of_the_last() -> None:
    device = Device()
    (first,) = device.run(request(range(9), new=3))  # its last page holds 3 of 4
    device.run(request([*first.ids, 60, 61, 62, 63, 64], new=1))
    for node in nodes_of(device.scheduler):
        assert node.parent is not None
        for sibling in node.parent.children:
            assert sibling == node.key or sibling[: len(node.key)] != node.key


def test_equal_generations_share_pages() -> None:
    device = Device(EngineConfig(slots=4, context_length=48, page_size=4, pages=60))
    device.add(*(request(range(8), new=30) for _ in range(4)))
    for _ in range(24):
        device.turn()
    used = 59 - device.scheduler.free_pages
    assert used <= 8 + 4 * 2, "each has its last page or two, the rest is common"
    device.run()
    device.check_nothing_left()


def test_the_step_takes_the_smallest_shape_and_all_that_can_decode() -> None:
    device = Device()
    device.add(*(request([start], new=20) for start in range(3)))
    device.turn()
    device.add(request(range(40, 60), new=5))
    step = device.turn()
    assert step is not None
    assert (step.rows, step.blocks, len(step.decode), len(step.prefill)) == (4, 8, 3, 5)
    device.run()


def test_a_long_prompt_does_not_keep_short_ones_or_decoding_waiting() -> None:
    config = EngineConfig(slots=8, context_length=400, prefill_tokens=(16,), page_size=4)
    device = Device(config)
    talking = request([1], new=60)
    device.add(talking)
    device.turn()
    long = request(range(300), new=2)
    device.add(long)
    device.turn()
    short = [request(range(1000 + 10 * i, 1007 + 10 * i), new=2) for i in range(4)]
    device.add(*short)
    for _ in range(6):
        step = device.turn()
        assert talking in requests_of(step)
        assert long in requests_of(step)
    assert all(one.ended for one in short)
    assert not long.ended
    device.run()


def test_a_stream_of_short_prompts_does_not_keep_a_long_one_waiting() -> None:
    config = EngineConfig(slots=8, context_length=400, prefill_tokens=(16,), page_size=4)
    device = Device(config)
    long = request(range(300), new=1)
    device.add(long)
    fresh = iter(range(1000, 10**9, 10))
    turns = 0
    while not long.ended:
        start = next(fresh)
        device.add(*(request(range(start + i, start + i + 7), new=1) for i in (0, 100_000)))
        device.turn()
        turns += 1
    assert turns <= 300 / 8 + 2, "it has half of each step"


def test_first_come_first_served() -> None:
    ended = Device().run(*(request([start], new=3) for start in range(12)))
    assert [one.ids[0] for one in ended] == list(range(12))


def test_prompts_wait_for_pages_in_order() -> None:
    config = EngineConfig(slots=4, context_length=40, page_size=4, pages=12)
    device = Device(config)
    first, long, short = request(range(20), new=9), request(range(50, 80)), request([90])
    device.add(first, long, short)
    device.turn()
    assert (device.scheduler.running, device.scheduler.waiting) == (1, 2)
    assert requests_of(device.steps[-1]) == {first}, "a short one does not overtake"
    assert device.run() == [first, long, short]
    assert device.scheduler.stats.preemptions == 0
    device.check_nothing_left()


def test_waiting_for_pages_does_not_search_the_tree_each_step(monkeypatch) -> None:
    config = EngineConfig(slots=4, context_length=40, page_size=4, pages=12)
    device = Device(config)
    device.add(request(range(20), new=9), request(range(50, 80)))
    device.turn()
    device.turn()
    looked: list[Request] = []
    placement = device.scheduler._placement
    follow = placement.follow
    monkeypatch.setattr(placement, "follow", lambda one: (looked.append(one), follow(one)))
    for _ in range(5):
        device.turn()
    assert not looked
    device.run()


def test_the_latest_is_preempted_and_goes_on_later() -> None:
    config = EngineConfig(slots=4, context_length=40, page_size=4, pages=15)
    device = Device(config)
    requests = [request(range(50 * i, 50 * i + 9), new=25) for i in range(3)]
    ended = device.run(*requests)
    assert ended == requests, "in order of arrival"
    assert requests[0].preemptions == 0
    assert device.scheduler.stats.preemptions == sum(one.preemptions for one in requests) > 0
    assert device.scheduler.stats.evictions > 0
    assert [one.ids for one in ended] == [expected(range(50 * i, 50 * i + 9), 25) for i in range(3)]
    device.check_nothing_left()


def test_the_preempted_finds_again_what_was_not_evicted() -> None:
    config = EngineConfig(slots=2, context_length=40, page_size=4, pages=13)
    device = Device(config)
    first, second = request(range(17), new=20), request(range(50, 67), new=20)
    device.run(first, second)
    assert (first.preemptions, second.preemptions) == (0, 1)
    computed = [at for step in device.steps for one, at in writes(step) if one is second]
    assert sorted(set(computed)) == list(range(36))
    assert len(computed) == 36 + 3 * 4, "of 6 pages the last 3 were taken"
    assert second.reused == 0, "only its first time counts"


def test_the_preempted_computes_again_under_new_weights_where_that_is_wanted() -> None:
    config = EngineConfig(slots=2, context_length=40, page_size=4, pages=13)
    device = Device(config)
    first, second = request(range(17), new=20), request(range(50, 67), new=20)
    device.add(first, second)
    while not second.preemptions:
        device.turn()
    assert device.scheduler.waiting == 1
    device.cancel(first)
    device.publish(1, recompute=True)
    device.run()  # the device checks that nothing older is read
    assert second.ids == expected(range(50, 67), 20)


def test_the_latest_waits_for_a_page_rather_than_begin_again() -> None:
    config = EngineConfig(slots=2, context_length=40, page_size=4, pages=13)
    device = Device(config)
    first, second = request(range(17), new=8), request(range(50, 69), new=16)
    device.add(first, second)
    waited = 0
    while not second.ended:
        waited += second not in requests_of(device.turn()) and not second.full
    assert waited >= 2
    assert device.scheduler.stats.preemptions == 0
    device.run()
    device.check_nothing_left()


def test_whose_last_token_is_on_its_way_gives_pages_without_beginning_again() -> None:
    config = EngineConfig(slots=2, context_length=40, page_size=4, pages=13)
    device = Device(config)
    first, second = request(range(17), new=20), request(range(50, 67), new=8)
    device.run(first, second)
    assert device.scheduler.stats.preemptions == 0
    assert sum(one is second for step in device.steps for one, _ in writes(step)) == 24
    device.check_nothing_left()


def test_who_waits_for_pages_is_admitted_when_others_have_computed_its_prompt() -> None:
    config = EngineConfig(slots=2, context_length=80, prefill_tokens=(8,), page_size=4, pages=22)
    device = Device(config)
    first, second = request(range(60), new=20), request([*range(56), 90, 91], new=2)
    device.add(first, second)
    device.turn()
    assert device.scheduler.waiting == 1
    while device.scheduler.waiting:
        device.turn()
    assert not first.ended
    device.run()
    assert second.ids == expected([*range(56), 90, 91], 2)


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("prompt", [1, 20, 47])
def test_one_request_that_fits_always_goes_on(page_size: int, prompt: int) -> None:
    """In the smallest cache there can be, full of others' pages."""
    table = -(-48 // page_size)
    config = EngineConfig(
        slots=3, context_length=48, prefill_tokens=(16,), page_size=page_size, pages=table + 1
    )
    device = Device(config)
    device.run(request(range(500, 540), new=8))
    ids = range(prompt)
    device.run(request(ids, new=48))
    device.run(*(request(ids, new=48) for _ in range(3)))
    assert all(one.ids == expected(ids, 48 - prompt) for one in device.ended[1:])
    assert device.ended[1].preemptions == 0
    device.check_nothing_left()


def test_a_prompt_left_without_pages_gets_those_of_the_latest() -> None:
    config = EngineConfig(slots=2, context_length=120, prefill_tokens=(8,), page_size=4, pages=31)
    device = Device(config)
    long, other = request(range(112), new=1), request(range(500, 504), new=60)
    device.run(long, other)
    assert (long.preemptions, other.preemptions) == (0, 1)
    assert other.ids == expected(range(500, 504), 60)
    device.check_nothing_left()


def test_cancelling_frees_pages_at_once_also_with_a_token_on_its_way() -> None:
    device = Device()
    kept, gone = request(range(10), new=30), request(range(50, 70), new=20)
    waiting = [request([i], new=3) for i in range(4)]
    device.add(kept, gone, *waiting)
    device.turn()
    device.turn()
    assert device.scheduler.waiting == 2
    before = device.scheduler.free_pages
    device.cancel(gone)
    assert device.scheduler.free_pages == before + 6
    device.cancel(gone)
    device.cancel(waiting[-1])
    assert (device.scheduler.running, device.scheduler.waiting) == (3, 1)
    ids = list(gone.ids)
    device.run()
    assert gone.ids == ids, "tokens that come later don't count"
    assert waiting[-1].ids == [3]
    assert kept.ids == expected(range(10), 30)
    device.cancel(kept)
    device.scheduler.cancel(request([1]))  # never added
    device.check_nothing_left()


def test_what_was_cancelled_is_found_again() -> None:
    device = Device()
    gone = request(range(16), new=20)
    device.add(gone)
    device.turn()
    device.cancel(gone)
    (again,) = device.run(request(range(16), new=2))
    assert again.reused == 15


@pytest.mark.parametrize(("lag", "reused"), [(0, 0), (1, 0), (2, 11), (3, 11)])
def test_pages_of_weights_too_old_are_not_reused(lag: int, reused: int) -> None:
    config = EngineConfig(slots=2, context_length=48, page_size=4, reuse_lag=lag)
    device = Device(config)
    device.run(request(range(12), new=1))
    device.publish(1)
    device.publish(2)
    (again,) = device.run(request(range(12), new=1))
    assert again.reused == reused
    device.check_nothing_left()


def test_a_page_is_as_old_as_the_oldest_before_it() -> None:
    device = Device()
    device.run(request(range(8), new=1))
    device.publish(2)
    (second,) = device.run(request([*range(8), *range(60, 68)], new=1))
    assert second.reused == 8
    device.publish(3)  # three after the first weights, one after the second
    (third,) = device.run(request([*range(8), *range(60, 68)], new=1))
    assert third.reused == 0
    device.publish(5)
    (fourth,) = device.run(request([*range(8), *range(60, 68)], new=1))
    assert fourth.reused == 15, "the newer pages took the place of the older ones"
    device.check_nothing_left()


def test_kept_keys_and_values_go_on_under_new_weights() -> None:
    device = Device()
    one = request(range(10), new=20)
    device.add(one)
    for version in range(1, 8):
        device.turn()
        device.publish(version)
    device.run()
    assert prefilled(device) == 10
    assert one.ids == expected(range(10), 20)
    assert sum(len(node.key) for node in nodes_of(device.scheduler)) < 20, (
        "what is too old to go on from is not kept"
    )


def test_others_compute_again_what_an_old_request_still_reads() -> None:
    device = Device()
    old = request(range(16), new=30)
    device.add(old)
    device.turn()
    device.publish(3)
    (new,) = device.run_until(request(range(16), new=2))
    assert new.reused == 0
    (newer,) = device.run_until(request(range(16), new=2))
    assert newer.reused == 15
    device.run()
    assert old.ids == expected(range(16), 30)
    device.check_nothing_left()


@pytest.mark.parametrize("lockstep", [False, True])
def test_recompute_computes_everything_again_and_groups_still_share(lockstep: bool) -> None:
    device = Device()
    group = [request(range(17), new=12, lockstep=lockstep) for _ in range(4)]
    device.add(*group)
    for _ in range(3):
        device.turn()
    before, steps = prefilled(device), len(device.steps)
    device.publish(1, recompute=True)
    assert all(one.computed == 0 for one in group)
    device.run()  # the device checks that nothing older is read
    again = prefilled(device) - before
    assert 17 <= again <= 16 + 4 * 4, "once for all, but for the last page"
    assert len(device.steps) - steps <= (25 if lockstep else 14)
    assert [one.ids for one in device.ended] == [expected(range(17), 12)] * 4
    assert device.scheduler.stats.reused == 3 * 16
    device.check_nothing_left()


def test_weights_that_are_not_newer_make_everything_forgotten() -> None:
    for version in (5, 3):
        device = Device()
        device.publish(5)
        device.run(request(range(16), new=1))
        running = request(range(16), new=20)
        device.add(running)
        device.turn()
        device.publish(version)
        (other,) = device.run_until(request(range(16), new=1))
        assert other.reused == 0
        (third,) = device.run_until(request(range(16), new=1))
        assert third.reused == 15
        device.run()
        assert running.ids == expected(range(16), 20)
        device.check_nothing_left()


def test_who_had_computed_nothing_when_all_was_forgotten_is_found_again() -> None:
    device = Device(EngineConfig(slots=2, context_length=48, prefill_tokens=(4,), page_size=4))
    early, late = request(range(40), new=1), request(range(60, 76), new=1)
    device.add(early, late)
    device.turn()
    assert (late.running, late.computed) == (True, 0)
    device.publish(0)
    device.run()
    again = [request(range(40), new=1), request(range(60, 76), new=1)]
    device.run(*again)
    assert [one.reused for one in again] == [0, 15]


def test_clearing_forgets_what_nobody_reads() -> None:
    device = Device()
    running = request(range(60, 76), new=20)
    device.add(running)
    device.run_until(request(range(16), new=1))
    device.scheduler.clear_cache()
    (again, same) = device.run_until(request(range(16), new=1), request(range(60, 76), new=1))
    assert (again.reused, same.reused) == (0, 15)
    device.run()
    device.check_nothing_left()


def test_nothing_to_do_is_no_step() -> None:
    scheduler = Scheduler(CONFIG)
    assert scheduler.schedule() is None
    scheduler.add(request([1], new=1))
    step = scheduler.schedule()
    assert step is not None
    assert scheduler.schedule() is None, "its last token is on its way"
    scheduler.complete(step, [7] * (step.rows + step.blocks))
    assert scheduler.schedule() is None


def test_counts_and_free_pages_follow() -> None:
    device = Device()
    assert device.scheduler.free_pages == device.config.total_pages - 1
    device.add(request(range(10), new=5))
    assert (device.scheduler.running, device.scheduler.waiting) == (0, 1)
    device.turn()
    assert (device.scheduler.running, device.scheduler.waiting) == (1, 0)
    assert device.scheduler.free_pages == device.config.total_pages - 1 - 3
    device.run()
    device.check_nothing_left()


# ---------------------------------------------------------------------- bursts


def burst_steps(device: Device) -> list[Step]:
    return [step for step in device.steps if step.burst > 1]


def until_burst(device: Device, *requests: Request) -> Step:
    """Adds requests, and runs until a burst is on its way."""
    device.add(*requests)
    for _ in range(60):
        step = device.turn()
        if step is not None and step.burst > 1:
            return step
    raise AssertionError("no burst was made")


def test_a_burst_comes_once_all_have_generated_for_a_while() -> None:
    device = Device(BURSTS)
    first, second = request([1, 2, 3], new=30), request([4, 5], new=30)
    device.add(first)
    for _ in range(4):
        device.turn()
    step = until_burst(device, second)
    # Nine tokens of the one that came later, this step's first among them.
    assert (step.burst, step.rows, step.blocks, step.copies) == (3, 2, 0, ())
    assert [row.request for row in step.decode] == [first, second]
    assert len(second.ids) + second.pending == 2 + 9 + 2
    assert all(row.source >= 0 for row in step.decode), "the step before was on its way"
    device.run()
    assert first.ids == expected([1, 2, 3], 30)
    assert second.ids == expected([4, 5], 30)
    device.check_nothing_left()


def test_without_bursts_there_are_none() -> None:
    device = Device(CONFIG)
    device.run(request([1], new=40))
    assert not burst_steps(device)


@pytest.mark.parametrize("new", range(9, 17))
def test_a_burst_ends_at_the_limit_and_not_past_it(new: int) -> None:
    device = Device(BURSTS)
    one = request([1, 2], new=new)
    device.run(one)
    assert one.ids == expected([1, 2], new)
    # From the ninth token on by threes, and what is left over by ones.
    assert len(burst_steps(device)) == (new - 8) // 3
    device.check_nothing_left()


def test_a_burst_ends_at_the_contexts_end() -> None:
    device = Device(BURSTS)
    one = request(range(20), new=10**9)
    device.run(one)
    assert one.ids == expected(range(20), BURSTS.context_length - 20)
    assert len(burst_steps(device)) == (BURSTS.context_length - 20 - 8) // 3
    device.check_nothing_left()


@pytest.mark.parametrize("other", [{"bursts": False}, {"lockstep": True}])
def test_who_cannot_take_part_keeps_others_from_it(other: dict[str, bool]) -> None:
    device = Device(BURSTS)
    one, apart = request([1], new=40), request([2], new=16, **other)
    device.run(one, apart)
    last = max(at for at, step in enumerate(device.steps) if apart in requests_of(step))
    assert not [step for step in device.steps[: last + 1] if step.burst > 1]
    assert [step for step in device.steps[last + 1 :] if step.burst > 1]
    assert one.ids == expected([1], 40)
    assert apart.ids == expected([2], 16)
    device.check_nothing_left()


def test_nobody_waits_for_a_burst_longer_than_it_takes() -> None:
    device = Device(BURSTS)
    until_burst(device, request([1], new=40))
    late = request([7, 8], new=2)
    device.add(late)
    step = device.turn()
    assert step is not None
    assert step.burst == 1
    assert [block.request for block in step.prefill] == [late]
    device.run()
    device.check_nothing_left()


def test_a_burst_is_complete_before_the_next_step() -> None:
    device = Device(BURSTS)
    until_burst(device, request([1], new=40))
    with pytest.raises(AssertionError, match="none of a burst"):
        device.scheduler.schedule()


def test_a_stop_in_a_burst_ends_the_request_and_its_beginning_is_found_again() -> None:
    device = Device(BURSTS)
    one, other = request([1, 2, 3], new=40), request([4], new=40)
    device.stops[one] = 3 + 10
    device.add(other)
    device.run_until(one)
    # A burst's other tokens are there, too: their keys and values were computed.
    assert len(one.ids) > 3 + 10
    assert one.ids == expected([1, 2, 3], len(one.ids) - 3)
    told = one.ids[:13]
    again = request([*told, 99, 98], new=12)
    device.run_until(again)
    # All but the last token that it said: three pages, and a copy of what stood in the fourth.
    assert again.reused == 12 + (1 if len(one.ids) > 13 + 1 else 0)
    assert again.ids == expected([*told, 99, 98], 12)
    device.run()
    assert other.ids == expected([4], 40)
    device.check_nothing_left()


def test_a_burst_takes_pages_only_where_there_are_enough() -> None:
    # Twelve pages for two requests of nine each.
    device = Device(replace(BURSTS, pages=13, context_length=36))
    first, second = request([1], new=33), request([2], new=33)
    device.run(first, second)
    assert first.ids == expected([1], 33)
    assert second.ids == expected([2], 33)
    assert second.preemptions == 1
    assert not first.preemptions
    assert {len(step.decode) for step in burst_steps(device)} == {1, 2}
    for step in burst_steps(device):
        assert len(step.decode) == 1 or second.preemptions
    device.check_nothing_left()


def test_cancelling_amid_a_burst_frees_pages_at_once() -> None:
    device = Device(BURSTS)
    one, other = request([1], new=40), request([2], new=40)
    until_burst(device, one, other)
    before = device.scheduler.free_pages
    held = len(one.pages)
    device.cancel(one)
    assert device.scheduler.free_pages == before + held
    late = request([1, 5], new=3)
    device.run(late)
    assert late.ids == expected([1, 5], 3)
    assert other.ids == expected([2], 40)
    assert one.ids == expected([1], len(one.ids) - 1)
    device.check_nothing_left()


@pytest.mark.parametrize("recompute", [False, True])
def test_new_weights_amid_a_burst_come_after_it(recompute: bool) -> None:
    device = Device(BURSTS)
    one = request([1, 2], new=30)
    step = until_burst(device, one)
    prefilled = device.scheduler.stats.prefilled
    device.publish(1, recompute=recompute)
    assert one.pending == step.burst
    device.run()
    assert one.ids == expected([1, 2], 30)
    again = device.scheduler.stats.prefilled - prefilled
    assert (again > 10) == recompute
    assert burst_steps(device)[-1] is not step
    device.check_nothing_left()


@pytest.mark.parametrize("seed", range(15))
def test_any_order_of_events_gives_the_same_tokens(seed: int) -> None:
    random_traffic(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1200, 20))
def test_any_order_of_many_more_events_gives_the_same_tokens(first: int) -> None:
    for seed in range(first, first + 20):
        random_traffic(seed)


def random_traffic(seed: int) -> None:
    """Turns, forks, siblings, strangers, stops, cancellations, new weights and flushes in any order, in
    caches from one conversation's size on."""
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4, 5])
    context = rng.randint(20, 60)
    table = -(-context // size)
    config = EngineConfig(
        slots=rng.randint(1, 6),
        context_length=context,
        small_batch=rng.randint(1, 3),
        prefill_tokens=rng.choice([(1,), (8,), (5, 30), (16, 64)]),
        page_size=size,
        pages=rng.choice([table + 1, table + 3, 2 * table, 0]),
        reuse_lag=rng.randint(0, 2),
        burst=rng.choice([1, 2, 2, 3]),
    )
    crowd = rng.choice([0.02, 0.05, 0.3])
    device = Device(config, ahead=rng.random() < 0.8, copies_at_once=rng.random() < 0.5)
    past = [[10 * stem + rng.randrange(3) for _ in range(14)] for stem in range(2)]
    asked: list[tuple[Request, list[int]]] = []
    publishes = rng.random() < 0.7
    for _ in range(400):
        event = rng.random()
        if event < crowd:
            stem = rng.choice(past)
            prompt = stem[: rng.randint(1, len(stem))]
            prompt += [rng.randrange(3) for _ in range(rng.randint(0, 6))]
            for _ in range(rng.choice([1, 1, 1, 4])):
                if len(prompt) < context:
                    one = request(
                        prompt,
                        new=rng.randint(1, rng.choice([20, 50])),
                        lockstep=rng.random() < 0.1,
                        bursts=rng.random() < 0.95,
                    )
                    if rng.random() < 0.3:
                        device.stops[one] = len(prompt) + rng.randint(1, 12)
                    asked.append((one, prompt))
                    device.add(one)
        elif 0.3 < event < 0.33 and asked:
            one = rng.choice(asked)[0]
            device.turn(lambda one=one: device.cancel(one))
            device.cancel(one)
            device.cancel(rng.choice(asked)[0])
        elif 0.33 < event < 0.37 and publishes:
            device.publish(device.version + 1, recompute=rng.random() < 0.4)
        elif 0.37 < event < 0.38:
            device.scheduler.clear_cache()
        else:
            device.turn()
            past += [one.ids for one in device.ended[-2:]]
            past = past[-8:]
        device.check_pages()
    device.run()
    for one, prompt in asked:
        assert one.ended
        limit = min(len(prompt) + one.max_new_tokens, context, device.stops.get(one, context))
        if one in device.ended:
            past_end = config.burst if one in device.stops else 1
            assert limit <= len(one.ids) < limit + past_end
        else:
            assert len(one.ids) < limit
        assert one.ids == expected(prompt, len(one.ids) - len(prompt))
    device.check_nothing_left()
