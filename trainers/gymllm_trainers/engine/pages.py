"""The cache's pages: which are free, and a tree of those whose content is known.

A node of the tree is one page with the tokens that it holds; its path from the root is everything before
them. So whoever begins with the same tokens finds their keys and values, whoever computed them. Only a
node without children may hold less than a whole page: the end of something that was let go.

Two counts are kept apart. A *node* has a user for each request whose tokens lead through it; it can be
evicted when it has none. A *page* has a user for each request that reads it and one for the tree; it is
free when it has none. They differ when a page of newer weights takes the place of an older one in the
tree: requests go on reading the older page, and still lead through the node.

No arrays, no clock, no threads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

NEAR = 16
"""Newest children of a node among which a partly common page is looked for. They can be thousands."""

STALE = -(1 << 62)
"""A version older than all others."""


@dataclass(eq=False, slots=True)
class Node:
    """A page of the tree."""

    page: int
    key: tuple[int, ...]
    """Tokens whose keys and values the page holds."""
    parent: Node | None = field(repr=False)
    version: int
    """Oldest weights that these tokens, or any before them, were computed with."""
    step: int
    """Step that wrote the last of them, or a later one."""
    children: dict[tuple[int, ...], Node] = field(default_factory=dict, repr=False)
    users: int = 0
    """Requests that lead through it; those of a node's children are users of it, too."""


@dataclass(frozen=True)
class Likeness:
    """A page that begins as wanted."""

    node: Node
    common: int
    """Tokens that it has in common with what is wanted."""


class Pages:
    """Gives pages out and takes them back. Page 0 is never given out: padding is written to it."""

    def __init__(self, pages: int) -> None:
        """Makes all pages free.

        Args:
            pages: How many there are, page 0 included.
        """
        self.root = Node(page=0, key=(), parent=None, version=0, step=0)
        self.evictions = 0
        """Pages taken from the tree because none was free."""
        self._free = list(range(pages - 1, 0, -1))
        self._users = [0] * pages
        # From the least to the most recently used. A request leaves its nodes from the last to the first,
        # so a node's children are always before it, and the first one has none.
        self._unused: OrderedDict[Node, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that can be given out: free ones, and those of the tree that no request leads through."""
        return len(self._free) + len(self._unused)

    def take(self) -> int:
        """Gives a page to one user, evicting the least recently used if none is free; 0 if none can be."""
        if not self._free:
            if not self._unused:
                return 0
            self.remove(next(iter(self._unused)))
            self.evictions += 1
        page = self._free.pop()
        self._users[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Counts one more user of a page."""
        self._users[page] += 1

    def drop(self, page: int) -> None:
        """Counts one user less; without any, the page is free."""
        self._users[page] -= 1
        if not self._users[page]:
            self._free.append(page)

    def find(self, parent: Node, key: tuple[int, ...], *, oldest: int) -> Node | None:
        """The child with these tokens, if none of its weights are older than `oldest`."""
        node = parent.children.get(key)
        return node if node is not None and node.version >= oldest else None

    def closest(
        self, parent: Node, ids: Sequence[int], *, oldest: int, before: int
    ) -> Likeness | None:
        """The child, whole page or less, that has most tokens in common with the beginning of `ids`.

        Only the newest children are looked at; None if none of them has even the first token.

        Args:
            parent: Whose children.
            ids: What is wanted, not empty.
            oldest: Weights older than these don't count.
            before: The child must have been written by a step before this one.
        """
        best, most = None, 0
        for key, node in islice(reversed(parent.children.items()), NEAR):
            if key[0] == ids[0] and node.version >= oldest and node.step < before:
                common = _common(key, ids)
                if common > most:
                    best, most = node, common
        return Likeness(best, most) if best else None

    def put(
        self, parent: Node, key: tuple[int, ...], page: int, *, version: int, step: int
    ) -> Node:
        """Puts a page into the tree, in place of the one there that holds the same, if any.

        The page there goes on being read by those who read it, and its children stay: what they hold was
        computed with weights at least as new as their own `version`, and still is.

        Returns:
            The page's node, as yet without this user.
        """
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(page, key, parent, version, step)
            self._unused[node] = None
        else:
            self.drop(node.page)
            node.page, node.version, node.step = page, version, step
        self.hold(page)
        return node

    def enter(self, node: Node) -> None:
        """Counts one more user of a node. Its parent must have that user already."""
        if not node.users:
            del self._unused[node]
        node.users += 1

    def leave(self, path: Sequence[Node]) -> None:
        """Counts one user less of each node; they are now the most recently used.

        Args:
            path: From the first node to the last.
        """
        for node in reversed(path):
            node.users -= 1
            if not node.users:
                self._unused[node] = None

    def remove(self, node: Node) -> None:
        """Takes a node that has neither users nor children out of the tree."""
        assert not node.users
        assert not node.children
        assert node.parent is not None
        del self._unused[node]
        del node.parent.children[node.key]
        self.drop(node.page)

    def supersede(self, node: Node, key: Sequence[int]) -> None:
        """Removes a node still in the tree that holds but the beginning of `key`, which a sibling holds."""
        size = len(node.key)
        if node in self._unused and size < len(key) and _common(node.key, key) == size:
            self.remove(node)

    def clear(self) -> None:
        """Frees what no request leads through."""
        while self._unused:
            self.remove(next(iter(self._unused)))

    def forget(self) -> None:
        """Frees what no request leads through; nobody else finds the rest any more."""
        self.clear()
        nodes = [self.root]
        while nodes:
            for node in nodes.pop().children.values():
                node.version = STALE
                nodes.append(node)


def _common(left: Iterable[int], right: Iterable[int]) -> int:
    """Length of the common beginning."""
    size = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        size += 1
    return size
