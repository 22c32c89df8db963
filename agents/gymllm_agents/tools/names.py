"""What a name that nothing has was perhaps meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ " Did you mean 'x'?", with a blank before it; empty where nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
