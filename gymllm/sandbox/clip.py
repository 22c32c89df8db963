"""What commands write and files hold, made fit to be shown to a model or a person."""

from __future__ import annotations

import re

from gymllm.clip import clip as clip

_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*+[ -/]*+[@-~]"  # CSI: colours, cursor
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x00-\x1f\x7f-\x9f]*+(?:\x07|\x1b\\|\x9c)"  # OSC, DCS, ...
    r"|\x1b[ -/]++[0-~]"  # character sets
    r"|\x1b[0-OQ-WYZ\\`-~]"  # all others that are closed by their second character
)
_ERASES = re.compile(r"(?:\x1b\[|\x9b)[0-2]?K")
_ERASES_BEFORE = re.compile(r"(?:\x1b\[|\x9b)[12]K")
_UNSEEN = re.compile(
    # Controls but for tab and line feed; marks that reorder text or break lines; tags, which nobody sees.
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb]"
    r"|[\U000e0000-\U000e007f]"
)


def clean(data: bytes) -> str:
    r"""What a terminal would show of an output, as text that does nothing to a terminal.

    Escape sequences go. Of a line that was written over again and again (`\r`, progress bars) the last
    state stays. Bytes that aren't UTF-8 are U+FFFD; other characters that control something, or that nobody
    sees, are spelt out: `\x07`, `\u202e`. Cursor movements between lines are not followed. Takes time in
    proportion to the data.
    """
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    if "\r" in text:
        text = "\n".join(_last_state(line) if "\r" in line else line for line in text.split("\n"))
    return spell_out(_ESCAPES.sub("", text))


def spell_out(text: str) -> str:
    r"""The text with what nobody sees, but for tabs and line feeds, written as `\x1b` or `\u202e`."""
    return _UNSEEN.sub(_spelt, text)


def _last_state(line: str) -> str:
    """A line as it looks once all was written over its beginning; from the last write to the first.

    What is written last hides as much of what came before as it is long, or all if it erases.
    """
    shown: list[str] = []
    width = 0
    for written in reversed(line.split("\r")):
        seen = _ESCAPES.sub("", _ERASES_BEFORE.split(written)[-1])
        if len(seen) > width:
            shown.append(seen[width:])
            width = len(seen)
        if _ERASES.search(written):
            break
    return "".join(shown)


def _spelt(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
