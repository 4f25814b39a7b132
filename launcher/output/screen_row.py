"""One row of a terminal's screen: cells with a style, and the row as text. Pure.

A cell is a style and a character. The style is the list of SGR parameters that are in effect, such as "1;31", and ""
for none. A character that is two columns wide, or a tab, is followed by cells with the character "". A mark that
combines with the character before it (an accent) shares its cell. Text that is not UTF-8 is kept by surrogate escapes.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from itertools import repeat
from operator import itemgetter

from rendezvous.values.late_dataclass import dataclass

Cell = tuple[str, str]
BLANK: Cell = ("", " ")
TAB_STOP = 8
_MARKS_LIMIT = 16  # of a character with all its marks

_RESET = "\x1b[0m"
_style_of, _char_of = itemgetter(0), itemgetter(1)
_ENDED_BY = {"22": "12", "23": "3", "24": "4", "25": "56", "27": "7", "28": "8", "29": "9", "55": "53"}
_SWITCHES = frozenset("1 2 3 4 5 6 7 8 9 53".split())
_FOREGROUND, _BACKGROUND = "foreground", "background"


@dataclass(frozen=True, slots=True)
class Row:
    cells: tuple[Cell, ...] = ()
    is_redrawn: bool = False  # the program has returned to it to write it again, as a progress bar does

    @property
    def is_blank(self) -> bool:
        return all(not style and not char.strip() for style, char in self.cells)

    def line(self) -> bytes:
        """Return the whole row. What a bar has overwritten with blanks is not part of it."""
        cells = trimmed(self.cells) if self.is_redrawn else self.cells
        return rendered(cells).encode("utf-8", "surrogateescape")


def cells_of(text: str, style: str, column: int) -> list[Cell]:
    """Return the cells of printable text and tabs that starts in this column."""
    if text.isascii() and "\t" not in text:
        return list(zip(repeat(style), text))
    cells: list[Cell] = []
    for char in text:
        columns = width_of(char, column + len(cells))
        if columns == 0 and cells:
            combine(cells, len(cells), char)
            continue
        cells.append((style, char))
        cells += [(style, "")] * (columns - 1)
    return cells


def combine(cells: list[Cell], end: int, mark: str) -> None:
    """Add a mark to the character that ends before this column. A character with too many loses the last ones."""
    at = end - 1
    while at and not cells[at][1]:
        at -= 1
    cells[at] = (cells[at][0], (cells[at][1] + mark)[:_MARKS_LIMIT])


def make_blank(row: list[Cell], at: int) -> None:
    """Replace a wide character that is about to be cut by blanks."""
    start = at
    while start and not row[start][1]:
        start -= 1
    end = at + 1
    while end < len(row) and not row[end][1]:
        end += 1
    row[start:end] = [BLANK] * (end - start)


def width_of(char: str, column: int) -> int:
    if char == "\t":
        return TAB_STOP - column % TAB_STOP
    if char.isascii():
        return 1
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def trimmed(cells: tuple[Cell, ...]) -> tuple[Cell, ...]:
    end = len(cells)
    while end and cells[end - 1] == BLANK:
        end -= 1
    return cells[:end]


def rendered(cells: tuple[Cell, ...]) -> str:
    """Return the cells as text whose colours end with it."""
    if not any(map(_style_of, cells)):
        return "".join(map(_char_of, cells))
    pieces: list[str] = []
    current = ""
    for style, char in cells:
        if style != current:
            pieces += (_RESET if current else "", f"\x1b[{style}m" if style else "")
            current = style
        pieces.append(char)
    return "".join(pieces) + (_RESET if current else "")


@lru_cache(maxsize=512)
def restyled(style: str, parameters: str) -> str:
    """Return the style after a sequence CSI `parameters` m."""
    active = {_kind(code): code for code in _codes(style)}
    for code in _codes(parameters) or ["0"]:
        if code == "0":
            active.clear()
        elif code in _ENDED_BY:
            for ended in (*_ENDED_BY[code], _ENDED_BY[code]):
                active.pop(ended, None)
        elif code in ("39", "49"):
            active.pop(_kind(code), None)
        elif kind := _kind(code):
            active[kind] = code
    return ";".join(active.values())


def _codes(parameters: str) -> list[str]:
    """Split parameters; a colour such as 38;5;208 or 48;2;1;2;3 is one code."""
    words = [word.lstrip("0") or "0" for word in parameters.split(";")] if parameters else []
    codes: list[str] = []
    while words:
        code = words.pop(0)
        if code in ("38", "48") and words:
            length = {"5": 2, "2": 4}.get(words[0], 1)
            code = ";".join((code, *words[:length]))
            del words[:length]
        codes.append(code)
    return codes


def _kind(code: str) -> str:
    """Return what the code sets: codes of one kind replace each other. Return "" for a code without an effect."""
    first = code.partition(";")[0].partition(":")[0]
    if first in _SWITCHES:
        return first
    if first == "21":
        return "4"  # a double underline
    number = int(first) if first.isascii() and first.isdigit() and len(first) < 4 else 0
    if 30 <= number <= 39 or 90 <= number <= 97:
        return _FOREGROUND
    if 40 <= number <= 49 or 100 <= number <= 107:
        return _BACKGROUND
    return ""
