"""Pages and the tree of their content."""

from __future__ import annotations

import random
from collections.abc import Sequence

from gymllm_trainers.engine.pages import NEAR, Node, Pages


def put(pages: Pages, parent: Node, key: Sequence[int], *, version: int = 0, step: int = 0) -> Node:
    """A page of one's own, put into the tree and no longer used."""
    page = pages.take()
    assert page
    node = pages.put(parent, tuple(key), page, version=version, step=step)
    pages.drop(page)
    return node


def path(pages: Pages, *keys: Sequence[int]) -> list[Node]:
    nodes: list[Node] = []
    for key in keys:
        nodes.append(put(pages, nodes[-1] if nodes else pages.root, key))
        pages.enter(nodes[-1])
    return nodes


def test_page_0_is_never_given_out_and_others_once() -> None:
    pages = Pages(5)
    assert pages.available == 4
    assert sorted(pages.take() for _ in range(4)) == [1, 2, 3, 4]
    assert pages.take() == 0
    assert pages.available == 0
    pages.drop(3)
    assert (pages.available, pages.take()) == (1, 3)


def test_a_page_is_free_when_its_last_user_drops_it() -> None:
    pages = Pages(2)
    page = pages.take()
    pages.hold(page)
    pages.drop(page)
    assert pages.available == 0
    pages.drop(page)
    assert pages.available == 1


def test_finds_what_was_put_unless_it_is_too_old() -> None:
    pages = Pages(4)
    node = put(pages, pages.root, (1, 2), version=3)
    assert pages.find(pages.root, (1, 2), oldest=3) is node
    assert pages.find(pages.root, (1, 2), oldest=4) is None
    assert pages.find(pages.root, (2, 1), oldest=0) is None
    assert pages.find(node, (1, 2), oldest=0) is None


def test_evicts_the_least_recently_used_and_ends_before_beginnings() -> None:
    pages = Pages(6)
    old, new = path(pages, (1,), (2,)), path(pages, (3,), (4,), (5,))
    pages.leave(new)
    pages.leave(old)
    order = [pages.take() for _ in range(5)]
    assert order == [node.page for node in (*reversed(new), *reversed(old))]
    assert pages.evictions == 5
    assert not pages.root.children


def test_free_pages_go_before_evictions() -> None:
    pages = Pages(3)
    pages.leave(path(pages, (1,)))
    pages.take()
    assert pages.evictions == 0
    pages.take()
    assert pages.evictions == 1


def test_what_a_request_leads_through_is_not_evicted() -> None:
    pages = Pages(4)
    shared, end = path(pages, (1,), (2,))
    pages.enter(shared)  # another request
    pages.leave([shared, end])
    assert pages.available == 2
    pages.take()
    pages.take()
    assert pages.take() == 0
    assert pages.root.children == {(1,): shared}
    assert not shared.children


def test_using_a_page_again_saves_it_from_eviction() -> None:
    pages = Pages(3)
    first, second = put(pages, pages.root, (1,)), put(pages, pages.root, (2,))
    pages.enter(first)
    pages.leave([first])
    assert pages.take() == second.page


def test_a_newer_page_takes_the_place_of_an_older_one_that_is_still_read() -> None:
    pages = Pages(6)
    above, below = path(pages, (1,), (2,))
    old = above.page
    pages.hold(old)  # the request that leads through it reads it
    assert put(pages, pages.root, (1,), version=2, step=7) is above
    assert above.page != old
    assert (above.version, above.step, above.users) == (2, 7, 1)
    assert above.children == {(2,): below}
    assert pages.available == 2, "the old page is not free while it is read"
    pages.drop(old)
    assert pages.available == 3
    pages.leave([above, below])
    assert pages.available == 5


def test_closest_has_most_in_common() -> None:
    pages = Pages(10)
    put(pages, pages.root, (1, 2, 9, 9))
    best = put(pages, pages.root, (1, 2, 3, 9))
    put(pages, pages.root, (2, 2, 3, 4))
    put(pages, pages.root, (1,))
    found = pages.closest(pages.root, (1, 2, 3, 4), oldest=0, before=1)
    assert found is not None
    assert (found.node, found.common) == (best, 3)
    assert pages.closest(pages.root, (5, 2, 3, 4), oldest=0, before=1) is None


def test_closest_is_not_too_old_and_not_of_the_step_in_the_making() -> None:
    pages = Pages(10)
    put(pages, pages.root, (1, 2, 3), version=1, step=1)
    put(pages, pages.root, (1, 2, 4), version=5, step=5)
    usable = put(pages, pages.root, (1, 9, 9), version=5, step=4)
    found = pages.closest(pages.root, (1, 2, 3, 4), oldest=2, before=5)
    assert found is not None
    assert (found.node, found.common) == (usable, 1)


def test_closest_looks_only_at_the_newest() -> None:
    pages = Pages(2 * NEAR + 2)
    put(pages, pages.root, (1, 2, 3))
    for other in range(NEAR):
        put(pages, pages.root, (1, 5, other))
    found = pages.closest(pages.root, (1, 2, 3), oldest=0, before=1)
    assert found is not None
    assert found.common == 1


def test_a_beginning_is_superseded_by_a_longer_page_but_nothing_else_is() -> None:
    pages = Pages(10)
    tail = put(pages, pages.root, (1, 2))
    other = put(pages, pages.root, (1, 3))
    full = put(pages, pages.root, (1, 2, 3, 4))
    for node in (tail, other, full, tail):
        pages.supersede(node, (1, 2, 3, 4))
    assert set(pages.root.children) == {(1, 3), (1, 2, 3, 4)}
    assert pages.available == 9


def test_clear_frees_what_is_not_led_through() -> None:
    pages = Pages(8)
    used = path(pages, (1,), (2,))
    pages.leave(path(pages, (3,), (4,)))
    pages.clear()
    assert pages.root.children == {(1,): used[0]}
    assert pages.evictions == 0
    pages.leave(used)
    pages.clear()
    assert not pages.root.children
    assert pages.available == 7


def test_what_is_forgotten_is_not_found() -> None:
    pages = Pages(8)
    first, second = path(pages, (1,), (2, 3))
    pages.forget()
    assert pages.find(pages.root, (1,), oldest=-1000) is None
    assert pages.closest(first, (2,), oldest=-1000, before=1) is None
    pages.leave([first, second])
    assert pages.available == 7


def test_random_use_evicts_exactly_by_last_use() -> None:
    """Against a list of all paths, sorted by when they were left."""
    rng = random.Random(0)
    pages, left = Pages(41), []
    for turn in range(300):
        if rng.random() < 0.7:
            nodes: list[Node] = []
            for _ in range(rng.randint(1, 4)):
                parent = nodes[-1] if nodes else pages.root
                key = (rng.randrange(3),)
                node = pages.find(parent, key, oldest=0)
                if node is None:
                    if len(pages._free) == 0:
                        break
                    node = put(pages, parent, key)
                pages.enter(node)
                nodes.append(node)
            pages.leave(nodes)
            for node in reversed(nodes):
                left = [n for n in left if n is not node] + [node]
        elif left and turn > 20:
            pages.remove(next(iter(pages._unused)))
            gone = left.pop(0)
            assert gone not in pages._unused
        assert list(pages._unused) == left
