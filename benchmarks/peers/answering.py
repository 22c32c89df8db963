"""What a peer's script does that stays and is asked many times; it must import nothing of ours."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def answer(handlers: dict[str, Callable[..., dict[str, Any]]]) -> None:
    """Reads one JSON object a line, {"call": name, ...arguments}, and writes one a line, until the end.

    Whatever else the peer prints goes to the standard error.
    """
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        arguments = json.loads(line)
        reply = handlers[arguments.pop("call")](**arguments)
        print(json.dumps(reply), file=replies, flush=True)
