"""A terminal as an agent sees and uses it: keys in, the screen out once it is quiet.

    keys ──> key_bytes ──> Terminal (in the sandbox)
    screen <── Emulator <── Thinned <──┘

What a program floods out is thinned before it reaches the emulator: of what is read in one wait, both ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import anyio

from gymllm.sandbox import Terminal
from gymllm.sandbox.output import Kept
from gymllm_envs.terminal.emulator import Emulator
from gymllm_envs.terminal.keys import key_bytes

QUIET_S = 0.1
"""A screen that nothing has been written to for so long is done, unless a wait says otherwise."""
MOST_KEPT_BYTES = 32 * 1024
"""Of what is read in one wait; the emulator takes a megabyte or more a second, even of the worst."""
_AFTER_ENTER_S, _AFTER_ENTER_QUIET_S = 0.5, 0.03
_READ_FREELY_BYTES = 1 << 20
_HOLD_BACK_S = 0.005
_LONGEST_LINE = 2048
_CANCELS = b"\x18"  # ends a sequence that was cut in two


class Screen:
    """What a program on a terminal shows. Closes the terminal."""

    def __init__(self, terminal: Terminal, columns: int, rows: int, *, scrollback: int = 1000):
        """Nothing has been shown yet.

        Args:
            terminal: Of the same size.
            columns: Up to `MOST_COLUMNS`.
            rows: Up to `MOST_ROWS`.
            scrollback: Lines kept of what scrolls off.
        """
        self._terminal = terminal
        self.emulator = Emulator(columns, rows, scrollback=scrollback)

    @property
    def alive(self) -> bool:
        return self._terminal.alive

    async def press(self, keys: Sequence[str]) -> bool:
        """Types; False if the program did not take all of it.

        What follows an Enter waits until the screen has been quiet for a moment: keys that come while one
        program gives the terminal to the next may be taken by neither.
        """
        part: list[str] = []
        for number, key in enumerate(keys, 1):
            part.append(key)
            if number < len(keys) and (key not in ("Enter", "Return") or keys[number] == key):
                continue
            data = b"".join(
                key_bytes(name, application_keys=self.emulator.grid.application_keys)
                for name in part
            )
            if await self._terminal.send(data) < len(data):
                return False
            if number < len(keys):
                await self.settle(_AFTER_ENTER_S, quiet_s=_AFTER_ENTER_QUIET_S)
            part = []
        return True

    async def settle(
        self, limit_s: float, *, quiet_s: float = QUIET_S, expected: bool = False
    ) -> bool:
        """Takes in what is written until nothing has come for `quiet_s`; False if `limit_s` came first.

        Args:
            limit_s: Longest wait.
            quiet_s: For how long nothing must come.
            expected: Something will be written: it isn't quiet before that.
        """
        ends = time.monotonic() + limit_s
        kept, read = Kept(MOST_KEPT_BYTES), 0
        try:
            while (left := ends - time.monotonic()) > 0:
                wait_s = left if expected and not read else min(quiet_s, left)
                data = await self._terminal.receive(wait_s)
                if not data:
                    return wait_s >= quiet_s or not self._terminal.alive
                kept.add(data)
                read += len(data)
                if read > _READ_FREELY_BYTES:
                    await anyio.sleep(_HOLD_BACK_S)
                elif read <= MOST_KEPT_BYTES // 2:
                    # At once, for the program may wait for an answer.
                    self.emulator.feed(data)
                    kept = Kept(MOST_KEPT_BYTES - read)
                    await self._answer()
            return False
        finally:
            output = kept.output()
            self.emulator.feed(output.head)
            if output.cut_bytes:
                line = output.tail.find(b"\n", 0, _LONGEST_LINE) + 1
                self.emulator.feed(_CANCELS + output.tail[line:])

    async def _answer(self) -> None:
        if replies := self.emulator.grid.take_replies():
            await self._terminal.send(replies, timeout_s=0.1)

    async def aclose(self) -> None:
        """Kills the program."""
        await self._terminal.aclose()

    def text(self, *, scrollback: int = 0) -> str:
        """The screen in a frame of its own, with the cursor's place, and lines from before on request."""
        grid = self.emulator.grid
        cursor = "hidden" if grid.cursor_hidden else "at"
        head = (
            f"[{grid.columns}x{grid.rows}, cursor {cursor} row {grid.row + 1}, "
            f"column {grid.column + 1}]"
        )
        before = list(grid.scrollback)[-scrollback:] if scrollback else []
        lines = grid.lines
        last = max((n for n, line in enumerate(lines) if line), default=-1)
        shown = "\n".join(lines[: max(last, grid.row) + 1])
        if not before:
            return f"{head}\n{shown}"
        above = "\n".join(before)
        return f"[{len(before)} lines above the screen]\n{above}\n{head}\n{shown}"
