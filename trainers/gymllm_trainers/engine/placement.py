"""Where requests' keys and values are: what they take from the tree of pages, and what they put into it."""

from __future__ import annotations

from collections.abc import Iterable

from gymllm_trainers.engine.config import EngineConfig
from gymllm_trainers.engine.pages import STALE, Node, Pages
from gymllm_trainers.engine.requests import NOTHING_COMPUTED, Request

FEWEST_COMMON = 2
"""Fewest tokens for which a page is copied, or kept when its request ends before it is full."""


class Placement:
    """Gives requests their pages."""

    def __init__(self, config: EngineConfig, *, version: int) -> None:
        """Starts with empty pages; `version` is that of the weights of the first step."""
        self.pages = Pages(config.total_pages)
        self.step = 0
        """Number of the step in the making, or of the last one made."""
        self.version = version
        """Of the weights that this step runs with."""
        self._size, self._lag = config.page_size, config.reuse_lag

    def renew(self, version: int, running: Iterable[Request]) -> None:
        """Says that the steps from now on run with other weights.

        Args:
            version: Theirs. If it is not above the present one, nothing computed so far is found again.
            running: Every request that has pages.
        """
        if version <= self.version:
            self.forget(running)
        self.version = version

    def forget(self, running: Iterable[Request]) -> None:
        """Has nothing that was computed so far be found again; `running` is every request that has pages."""
        self.pages.forget()
        for request in running:
            if request.computed:
                request.oldest = STALE

    def follow(self, request: Request) -> None:
        """Goes on through the tree as far as what comes next is there already."""
        size, computed = self._size, request.computed
        if computed != len(request.nodes) * size:
            return
        # The last token is always computed: its hidden state gives the next one.
        end = len(request.ids) + request.pending - 1
        oldest = max(self.version - self._lag, request.required)
        pages, ids = self.pages, request.ids
        node = self._last(request)
        while computed + size <= end:
            found = pages.find(node, tuple(ids[computed : computed + size]), oldest=oldest)
            if found is None:
                break
            node = found
            pages.enter(node)
            pages.hold(node.page)
            request.nodes.append(node)
            request.pages.append(node.page)
            computed += size
        if computed > request.computed:
            self._found(request, computed, node)

    def branch(self, request: Request) -> tuple[int, int] | None:
        """Goes on with a copy of the page that has the most of what comes next, if one has enough of it.

        Returns:
            What to copy before the step: source and target.
        """
        start = request.computed
        if start != len(request.nodes) * self._size:
            return None
        end = min(start + self._size, len(request.ids) + request.pending - 1)
        if end - start < FEWEST_COMMON:
            return None
        oldest = max(self.version - self._lag, request.required)
        found = self.pages.closest(
            self._last(request), request.ids[start:end], oldest=oldest, before=self.step
        )
        if found is None or found.common < FEWEST_COMMON:
            return None
        self.pages.enter(found.node)  # or it might be evicted for the page it is copied to
        page = self.pages.take()
        self.pages.leave([found.node])
        if not page:
            return None
        request.pages.append(page)
        request.copied = found.node
        self._found(request, start + found.common, found.node)
        return found.node.page, page

    def extend(self, request: Request, end: int) -> int:
        """Gives a request pages of its own up to a position; returns how far they go."""
        while len(request.pages) * self._size < end:
            page = self.pages.take()
            if not page:
                return len(request.pages) * self._size
            request.pages.append(page)
        return end

    def computes(self, request: Request, end: int) -> None:
        """Notes that the step in the making computes a request's tokens up to a position."""
        request.computed = end
        if request.oldest > self.version:
            request.oldest = self.version

    def index(self, request: Request, *, swap: bool = True) -> None:
        """Puts the full pages whose ids are known into the tree.

        Args:
            request: Whose.
            swap: Whether the request may go on with the tree's page where that has the same content; not
                while a step that writes the request's own is being made.
        """
        size = self._size
        known = min(request.computed, len(request.ids))
        if request.oldest < self.version - self._lag:
            return  # nobody would go on from them
        while (index := len(request.nodes)) * size + size <= known:
            parent = self._last(request)
            key = tuple(request.ids[index * size : (index + 1) * size])
            node = self.pages.find(parent, key, oldest=request.oldest)
            if node is None:
                page = request.pages[index]
                node = self._put(request, parent, key, page)
            elif swap:
                request.pages = list(request.pages)
                self.pages.drop(request.pages[index])
                self.pages.hold(node.page)
                request.pages[index] = node.page
            else:
                return
            self.pages.enter(node)
            request.nodes.append(node)

    def release(self, request: Request) -> None:
        """Gives all pages back; the tree keeps what is worth it."""
        self.index(request)
        self._keep_tail(request)
        self.pages.leave(request.nodes)
        for page in request.pages:
            self.pages.drop(page)
        request.pages, request.nodes = [], []
        request.computed, request.copied = 0, None
        request.oldest = NOTHING_COMPUTED
        if len(request.ids) + request.pending == request.prompt_length:
            request.reused = 0  # not yet counted

    def _keep_tail(self, request: Request) -> None:
        """Puts the page that is not full into the tree, so that the next turn can copy it."""
        known = min(request.computed, len(request.ids))
        index = len(request.nodes)
        tail = known - index * self._size
        if not FEWEST_COMMON <= tail < self._size or request.oldest < self.version - self._lag:
            return
        key = tuple(request.ids[known - tail : known])
        parent = self._last(request)
        there = self.pages.closest(parent, key, oldest=request.oldest, before=self.step + 1)
        if there is None or there.common < tail:
            self._put(request, parent, key, request.pages[index])

    def _put(self, request: Request, parent: Node, key: tuple[int, ...], page: int) -> Node:
        node = self.pages.put(parent, key, page, version=request.oldest, step=self.step)
        if request.copied is not None:
            self.pages.supersede(request.copied, key)
            request.copied = None
        return node

    def _found(self, request: Request, computed: int, node: Node) -> None:
        if len(request.ids) + request.pending == request.prompt_length:
            request.reused += computed - request.computed
        request.computed = computed
        request.oldest = min(request.oldest, node.version)

    def _last(self, request: Request) -> Node:
        return request.nodes[-1] if request.nodes else self.pages.root
