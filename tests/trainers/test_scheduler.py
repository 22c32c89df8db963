"""The scheduler against a device that is only written down: which token is in which cell of which page."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from gymllm_trainers.engine.paged_config import EngineConfig
from gymllm_trainers.engine.pages import Node
from gymllm_trainers.engine.scheduler import DecodeRow, PrefillBlock, Request, Scheduler, Step

CONFIG = EngineConfig(
    slots=4, context_length=48, small_batch=2, prefill_tokens=(8, 32), page_size=4, reuse_lag=2
)


def request(ids: Sequence[int], *, new: int = 3, lockstep: bool = False) -> Request:
    return Request(ids=list(ids), prompt_length=len(ids), max_new_tokens=new, lockstep=lockstep)


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
                drained = len(one.ids) + one.pending >= one.limit
                if (one.running and not drained) or one.preemptions:
                    self.required[one] = version

    def turn(self) -> Step | None:
        """Schedules a step, launches it, and completes the one before."""
        step = self.scheduler.schedule()
        for one in self.alive:
            if one.pages and self.placed.get(one, (-1, 0))[0] != one.preemptions:
                self.placed[one] = (one.preemptions, self.version)
        if step is not None:
            self.launch(step)
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
        assert not set(targets) & {source for source, _ in step.copies}
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
            assert page not in nodes or nodes[page].step == self.scheduler._number
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
        assert step.decode or step.prefill
        rows = [row.request for row in step.decode]
        assert len(set(rows)) == len(rows), "a request has one row"
        for one in requests_of(step):
            blocks = [block for block in step.prefill if block.request is one]
            assert all(a.start + len(a.tokens) <= b.start for a, b in pairwise(blocks))
            assert all(1 <= len(block.tokens) <= self.config.page_size for block in blocks)
            assert not any(block.samples for block in blocks[:-1])
            assert one.computed <= one.limit - 1
            assert not one.ended

    def complete(self) -> None:
        launched = self.queue.popleft()
        samples = self.execute(launched)
        counted = self.scheduler.complete(launched.step, samples)
        for one, token in counted:
            assert one.ids[-1] == token
            if one.full:
                assert one.ended
            elif len(one.ids) >= self.stops.get(one, 1 << 30):
                self.scheduler.finish(one)
            if one.ended:
                self.ended.append(one)
        self.alive = [r for r in self.alive if not r.ended]

    def execute(self, launched: Launched) -> list[int]:
        step, size = launched.step, self.config.page_size
        for source, target in step.copies:
            self.cells[target] = list(self.cells[source])
        entries: list[tuple[int, DecodeRow | PrefillBlock, int, list[int]]] = []
        for index, row in enumerate(step.decode):
            assert (row.token == -1) == (row.source >= 0)
            token = self.samples[row.source] if row.source >= 0 else row.token
            entries.append((index, row, row.position, [token]))
        for index, block in enumerate(step.prefill, step.rows):
            entries.append((index, block, block.start, list(block.tokens)))
        for _, entry, start, tokens in entries:
            for at, token in enumerate(tokens, start):
                page = launched.tables[entry.request][at // size]
                self.cells[page][at % size] = Cell(token, launched.version)
        samples = [-7] * (step.rows + step.blocks)
        for index, entry, start, tokens in entries:
            one = entry.request
            read: list[int] = []
            for at in range(start + len(tokens)):
                cell = self.cells[launched.tables[one][at // size]][at % size]
                assert cell is not None, "only what was written is read"
                assert cell.version >= launched.required[one], "kept keys are not too old"
                read.append(cell.token)
            known = one.ids[: len(read)]
            assert read[: len(known)] == known, "a row reads its own tokens"
            assert len(read) <= len(known) + 1
            if isinstance(entry, DecodeRow) or entry.samples:
                samples[index] = next_token(read)
        self.samples = samples
        return samples

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

    def check_pages(self) -> None:
        """No page is lost or in two places; whoever uses one is counted."""
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
    places = [(row.request, row.position) for row in step.decode]
    for block in step.prefill:
        places += [(block.request, block.start + i) for i in range(len(block.tokens))]
    return places


@pytest.mark.parametrize("ahead", [True, False])
def test_generates_what_the_model_says(ahead: bool) -> None:
    device = Device(ahead=ahead)
    (done,) = device.run(request(range(10), new=9))
    assert done.ids == expected(range(10), 9)
    device.check_nothing_left()


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_events_gives_the_same_tokens(seed: int) -> None:
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
    )
    device = Device(config, ahead=rng.random() < 0.8)
    past = [[10 * stem + rng.randrange(3) for _ in range(14)] for stem in range(2)]
    asked: list[tuple[Request, list[int]]] = []
    publishes = rng.random() < 0.7
    for _ in range(400):
        event = rng.random()
        if event < 0.3:
            stem = rng.choice(past)
            prompt = stem[: rng.randint(1, len(stem))]
            prompt += [rng.randrange(3) for _ in range(rng.randint(0, 6))]
            for _ in range(rng.choice([1, 1, 1, 4])):
                if len(prompt) < context:
                    one = request(prompt, new=rng.randint(1, 20), lockstep=rng.random() < 0.2)
                    if rng.random() < 0.3:
                        device.stops[one] = len(prompt) + rng.randint(1, 5)
                    asked.append((one, prompt))
                    device.add(one)
        elif event < 0.35 and asked:
            device.cancel(rng.choice(asked)[0])
            device.cancel(rng.choice(asked)[0])
        elif event < 0.40 and publishes:
            device.publish(device.version + 1, recompute=rng.random() < 0.4)
        elif event < 0.41:
            device.scheduler.clear_cache()
        else:
            device.turn()
            past += [one.ids for one in device.ended[-2:]]
            past = past[-8:]
        device.check_pages()
    device.run()
    for one, prompt in asked:
        assert one.ended
        new = len(one.ids) - len(prompt)
        assert one.ids == expected(prompt, new)
        assert one in device.ended or new < min(one.max_new_tokens, context - len(prompt))
        assert one.pending == 0 or one not in device.ended or one in device.stops
    device.check_nothing_left()
