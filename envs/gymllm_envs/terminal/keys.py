"""Names of keys, as tmux's send-keys has them, and the bytes that an xterm sends for each."""

from __future__ import annotations

import re

_PLAIN = {
    "Enter": "\r",
    "Return": "\r",
    "Escape": "\x1b",
    "Esc": "\x1b",
    "Tab": "\t",
    "BTab": "\x1b[Z",
    "Space": " ",
    "BSpace": "\x7f",
    "Backspace": "\x7f",
}
_ARROWS = {"Up": "A", "Down": "B", "Right": "C", "Left": "D", "End": "F", "Home": "H"}
_NUMBERED = {
    **dict.fromkeys(("IC", "Insert"), 2),
    **dict.fromkeys(("DC", "Delete"), 3),
    **dict.fromkeys(("PPage", "PageUp", "PgUp"), 5),
    **dict.fromkeys(("NPage", "PageDown", "PgDn"), 6),
    **dict(zip((f"F{n}" for n in range(5, 13)), (15, 17, 18, 19, 20, 21, 23, 24), strict=True)),
}
_FUNCTION = {"F1": "P", "F2": "Q", "F3": "R", "F4": "S"}
_MODIFIED = re.compile(r"((?:[CMS]-|\^)+)(.+)", re.DOTALL)
KEY_NAMES = (*_PLAIN, *_ARROWS, *_NUMBERED, *_FUNCTION)
"""All but those with C-, M- or S- before them."""


def key_bytes(key: str, *, application_keys: bool = False) -> bytes:
    """What a key sends. Anything that names none is typed as it is, its line feeds as Enter.

    Args:
        key: "Enter", "C-c", "M-x", "S-Up", "F1", or text.
        application_keys: The program asked for the arrow keys' other form.
    """
    named = _named(key, 0, application_keys)
    if named is None and (match := _MODIFIED.fullmatch(key)):
        marks, rest = match.groups()
        control, meta, shift = "C-" in marks or "^" in marks, "M-" in marks, "S-" in marks
        named = _named(rest, shift + 2 * meta + 4 * control, application_keys)
        if named is None and len(rest) == 1 and not shift:
            char = _control(rest) if control else rest
            named = None if char is None else ("\x1b" if meta else "") + char
        elif rest in _PLAIN:
            named = "\x1b[Z" if shift and rest == "Tab" else ("\x1b" if meta else "") + _PLAIN[rest]
            named = "\0" if control and rest == "Space" else named
    text = named if named is not None else key.replace("\r\n", "\r").replace("\n", "\r")
    return text.encode(errors="replace")


def _named(key: str, modifiers: int, application_keys: bool) -> str | None:
    """Shift is 1, meta 2, control 4, as xterm adds them up."""
    if modifiers == 0 and key in _PLAIN:
        return _PLAIN[key]
    mark = f";{modifiers + 1}" if modifiers else ""
    if key in _ARROWS:
        if mark:
            return f"\x1b[1{mark}{_ARROWS[key]}"
        return f"\x1b{'O' if application_keys else '['}{_ARROWS[key]}"
    if key in _NUMBERED:
        return f"\x1b[{_NUMBERED[key]}{mark}~"
    if key in _FUNCTION:
        return f"\x1b[1{mark}{_FUNCTION[key]}" if mark else f"\x1bO{_FUNCTION[key]}"
    return None


def _control(char: str) -> str | None:
    if char == "?":
        return "\x7f"
    code = ord(char.upper())
    return chr(code - 64) if 64 <= code < 96 else None
