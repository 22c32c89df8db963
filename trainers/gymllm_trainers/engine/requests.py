"""What the scheduler is asked for, and the steps that it makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gymllm_trainers.engine.pages import STALE, Node

NOTHING_COMPUTED = 1 << 62
"""A version newer than all others."""


@dataclass(eq=False, slots=True)
class Request:
    """One request on its way. What comes after `tag` belongs to the scheduler."""

    ids: list[int]
    """Prompt, and what the host knows of what has been generated since."""
    prompt_length: int
    max_new_tokens: int
    lockstep: bool = False
    """Its next token must not be scheduled before its last one is known."""
    bursts: bool = True
    """Whether it can take part in bursts."""
    tag: object = None
    """Whatever else is kept with it: what the device gets of its pages."""

    pages: list[int] = field(default_factory=list)
    """Its pages, in order. The list only grows; where a page changes, it is another list."""
    nodes: list[Node] = field(default_factory=list, repr=False)
    """The tree's nodes of the first of its pages; those after are its own, and the only ones it writes to."""
    computed: int = 0
    """Tokens whose keys and values are in its pages once everything scheduled has run."""
    pending: int = 0
    """Tokens sampled by scheduled steps that the host doesn't know yet."""
    source: int = -1
    """Number of the latest of them among its step's samples."""
    oldest: int = NOTHING_COMPUTED
    """Oldest weights that any of what is computed was computed with."""
    required: int = STALE
    """Oldest weights that it may go on from."""
    copied: Node | None = None
    """Where the beginning of its first own page was copied from."""
    limit: int = 0
    """Tokens, prompt included, at which it ends by length."""
    arrival: int = -1
    reused: int = 0
    """Tokens of the prompt that were found computed."""
    preemptions: int = 0
    """Times that its pages were taken away for another request."""
    running: bool = False
    ended: bool = False

    @property
    def full(self) -> bool:
        """Whether it has reached its limit."""
        return len(self.ids) >= self.limit


class DecodeRow(NamedTuple):
    """The next token after one token of a request."""

    request: Request
    token: int
    """-1 if the host doesn't know it yet."""
    source: int
    """Number of the previous step's sample that it is, or -1 if the host knows it."""
    position: int
    """Where it stands; its keys and values are written there, in the request's own page."""


class PrefillBlock(NamedTuple):
    """A few known tokens of a request."""

    request: Request
    tokens: Sequence[int]
    """At most `page_size`; not always of one page."""
    start: int
    """Where the first stands."""
    samples: bool
    """Whether these are the last ones, so that the sampled token counts."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one call of a compiled program does. A request's page table is `request.pages` right after
    `Scheduler.schedule`; a request can have several blocks, and a row beside them.

    Samples are numbered: decode row i is i, prefill block q is `rows` + q. In a burst, which has no blocks,
    the sample of row i's token j is j * `rows` + i.
    """

    decode: tuple[DecodeRow, ...]
    prefill: tuple[PrefillBlock, ...]
    rows: int
    """Decode rows of the compiled shape."""
    blocks: int
    """Prefill blocks of the compiled shape."""
    copies: tuple[tuple[int, int], ...]
    """Pages to copy before the step, as (source, target), at most `slots`; all at once or one by one."""
    burst: int = 1
    """Tokens of each decode row, one after another."""
