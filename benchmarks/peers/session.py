"""A peer's process that stays, so that what is ours and what is theirs can be measured by turns."""

from __future__ import annotations

import json
import select
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from peers.in_venv import command_in_venv

ANSWER_LIMIT_S = 1800
"""A step of a large model, compiled first, takes many minutes on two cores."""


class PeerError(Exception):
    """The peer can't be installed or started, or has ended; the message is its last line."""


class PeerSession:
    """Asks a peer's script, which calls `peers.answering.answer`. A context manager."""

    def __init__(
        self,
        venvs: Path,
        name: str,
        *args: object,
        script: str = "",
        command: list[str] | None = None,
    ) -> None:
        """Starts it; installs it first if need be. `command` starts one that is installed already.

        Raises:
            PeerError: It can't be installed.
        """
        try:
            command = command or command_in_venv(venvs, name, *args, script=script)
        except (subprocess.SubprocessError, OSError) as error:
            raise PeerError(str(getattr(error, "stderr", "") or error).splitlines()[-1]) from error
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def ask(self, call: str, **arguments: object) -> dict[str, Any]:
        """What it answers.

        Raises:
            PeerError: It ended, or took too long.
        """
        process = self._process
        assert process.stdin is not None, "it was started with pipes"
        assert process.stdout is not None, "it was started with pipes"
        try:
            print(json.dumps({"call": call, **arguments}), file=process.stdin, flush=True)
        except BrokenPipeError:
            raise PeerError(self._last_words()) from None
        if not select.select([process.stdout], [], [], ANSWER_LIMIT_S)[0]:
            raise PeerError(f"no answer to {call} in {ANSWER_LIMIT_S} s")
        line = process.stdout.readline()
        if not line:
            raise PeerError(self._last_words())
        return json.loads(line)

    def __enter__(self) -> PeerSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _last_words(self) -> str:
        self._process.wait(10)
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else f"ended with {self._process.returncode}"
