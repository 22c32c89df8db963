"""How observations are shown: as text, on a terminal, and as frames of one size for videos.

A frame is a page of monospaced text, 70 characters wide and 24 lines high. It is drawn character by
character on a grid, because only so do lines stay aligned in any font: a wide character (Chinese, emoji)
takes two places and a combining mark none. Scripts that run from right to left are drawn as they are stored.
What is too long shows its end, where the news is.
"""

from __future__ import annotations

import functools
import re
import sys
import unicodedata
from typing import TYPE_CHECKING

import numpy as np

from gymllm.errors import MissingExtraError
from gymllm.spaces import Image, TextOrMessage, text_of

if TYPE_CHECKING:
    from PIL import Image as pillow
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

    Font = FreeTypeFont | ImageFont

WIDTH, HEIGHT = 640, 480
"""Size of a frame in pixels; even, as video codecs want it."""
COLUMNS, ROWS = 70, 24
MARGIN = 24
CELL_WIDTH = (WIDTH - 2 * MARGIN) / COLUMNS
LINE_HEIGHT = (HEIGHT - 2 * MARGIN) // ROWS
FONT_SIZE = 14
PAPER, INK, DIM = (250, 250, 247), (32, 34, 38), (140, 142, 148)
CUT = "..."
"""First line of a frame whose observation does not fit."""
MOST_CHARACTERS = 4 * COLUMNS * ROWS
"""Characters at the end of a text that are looked at; more would only be above the frame."""
FONTS = (
    "DejaVuSansMono.ttf",
    "LiberationMono-Regular.ttf",
    "NotoSansMono-Regular.ttf",
    "Menlo.ttc",
    "consola.ttf",
    "cour.ttf",
    # For what those lack; a font that isn't there is passed over.
    "DejaVuSans.ttf",
    "NotoSansCJK-Regular.ttc",
    "wqy-microhei.ttc",
    "PingFang.ttc",
    "msgothic.ttc",
    "NotoEmoji-Regular.ttf",
    "NotoSansSymbols2-Regular.ttf",
    "seguisym.ttf",
)
_COLOURS = re.compile(r"\x1b\[[\d;]*m")
_BLANK_OR_NOT = re.compile(r"\s+|\S+")


def show(observation: TextOrMessage) -> None:
    """Writes an observation's text and a line break to standard output.

    Characters that its encoding lacks are written as question marks.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = f"{text_of(observation)}\n".encode(encoding, "replace").decode(encoding)
    sys.stdout.write(text)
    sys.stdout.flush()


def draw(observation: TextOrMessage) -> Image:
    """An observation as a frame: uint8, shape [480, 640, 3].

    Long lines are wrapped between words. The images of a message stand between its texts, made smaller
    where they don't fit. A character that no font of the system has is drawn as that font's box.

    Raises:
        MissingExtraError: Pillow is not installed.
    """
    try:
        from PIL import Image as pillow
        from PIL import ImageDraw
    except ImportError as error:
        raise MissingExtraError(
            'render_mode "rgb_array" draws with Pillow; install it by pip install "gymllm[render]".'
        ) from error
    frame = pillow.new("RGB", (WIDTH, HEIGHT), PAPER)
    blocks = _blocks(observation)
    room, first = HEIGHT - 2 * MARGIN, len(blocks)
    while first > 0 and _height(blocks[first - 1]) <= room:
        first -= 1
        room -= _height(blocks[first])
    if first > 0 and room < LINE_HEIGHT:  # the mark takes the place of what is highest
        room += _height(blocks[first])
        first += 1
    pen, top = ImageDraw.Draw(frame), MARGIN
    if first > 0:
        _draw_line(pen, top, CUT, DIM)
        top += LINE_HEIGHT
    for block in blocks[first:]:
        if isinstance(block, str):
            _draw_line(pen, top, block, INK)
        else:
            frame.paste(block, (MARGIN, top))
        top += _height(block)
    return np.array(frame)


def wrap(text: str, columns: int = COLUMNS) -> list[str]:
    """The lines of a text, those that are wider than `columns` broken, between words where possible.

    Indents stay; the blanks at a break go. Tabs become blanks, terminal colours and the carriage return
    of a line's end go, and other characters that can't be shown become U+FFFD.
    """
    return [
        row
        for line in _COLOURS.sub("", text).replace("\r\n", "\n").split("\n")
        for row in _wrap_line(_showable(line.expandtabs(4)), columns)
    ]


def width_of(text: str) -> int:
    """Places that a text takes on the grid."""
    return len(text) if text.isascii() else sum(_places(character) for character in text)


def _blocks(observation: TextOrMessage) -> list[str | pillow.Image]:
    if isinstance(observation, str):
        return [*wrap(observation[-MOST_CHARACTERS:])]
    blocks: list[str | pillow.Image] = []
    for part in observation["content"]:
        if part["type"] == "text":
            blocks += wrap(part["text"][-MOST_CHARACTERS:])
        else:
            blocks.append(_fitted(part["image"]))
    return blocks


def _fitted(image: Image) -> pillow.Image:
    """An image that leaves room for some lines of text."""
    from PIL import Image as pillow

    fitted = pillow.fromarray(image)
    fitted.thumbnail((WIDTH - 2 * MARGIN, (HEIGHT - 2 * MARGIN) * 3 // 4))
    return fitted


def _height(block: str | pillow.Image) -> int:
    return LINE_HEIGHT if isinstance(block, str) else block.height + LINE_HEIGHT // 4


def _draw_line(pen: ImageDraw, top: int, line: str, colour: tuple[int, int, int]) -> None:
    column = 0
    for cluster in _clusters(line):
        if not cluster.isspace():
            at = (MARGIN + column * CELL_WIDTH, top)
            pen.text(at, cluster, fill=colour, font=_font_for(cluster[0]))
        column += width_of(cluster)


def _clusters(line: str) -> list[str]:
    """The characters of a line, each with the combining marks that follow it."""
    clusters: list[str] = []
    for character in line:
        if clusters and _places(character) == 0:
            clusters[-1] += character
        else:
            clusters.append(character)
    return clusters


def _wrap_line(line: str, columns: int) -> list[str]:
    if width_of(line) <= columns:
        return [line]
    rows, row, used = list[str](), "", 0
    for piece in _BLANK_OR_NOT.findall(line):
        width = width_of(piece)
        if used + width > columns and row.strip():
            rows.append(row.rstrip())
            row, used = "", 0
            if piece.isspace():
                continue
        for cluster in _clusters(piece) if used + width > columns else [piece]:
            places = width_of(cluster)
            if used + places > columns:
                rows.append(row)
                row, used = "", 0
            row, used = row + cluster, used + places
    return [*rows, row] if row.strip() or not rows else rows


def _showable(line: str) -> str:
    return "".join(c if c.isprintable() or _places(c) == 0 else "\ufffd" for c in line)


def _places(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


@functools.lru_cache(maxsize=4096)
def _font_for(character: str) -> Font:
    """The first font that has the character, else the first of all."""
    fonts = _fonts()
    return next((font for font in fonts if _has(font, character)), fonts[0])


def _has(font: Font, character: str) -> bool:
    try:
        return _drawn(font, character) != _drawn(font, "\uffff")
    except UnicodeError:  # Pillow's own bitmap font knows Latin letters only
        return False


def _drawn(font: Font, character: str) -> bytes:
    from PIL import Image as pillow
    from PIL import ImageDraw

    canvas = pillow.new("L", (2 * FONT_SIZE, 2 * FONT_SIZE))
    ImageDraw.Draw(canvas).text((0, 0), character, fill=255, font=font)
    return canvas.tobytes()


@functools.cache
def _fonts() -> list[Font]:
    from PIL import ImageFont

    found: list[Font] = []
    for name in FONTS:
        try:
            found.append(ImageFont.truetype(name, FONT_SIZE))
        except OSError:
            continue
    return [*found, ImageFont.load_default(FONT_SIZE)]
