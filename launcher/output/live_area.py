"""The rows at the bottom of a terminal that are redrawn: progress bars of ranks, and the status of the job. Pure.

Bars come first, the status last. If a rank shows a prompt, the area gives way to it: the prompt is the only row, and
the cursor is where the rank has put it. So what a person types appears behind the prompt, and nothing overwrites it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from launcher.output.lines import without_c1
from launcher.output.screen import BLANK, Cell, ScreenRow, cells_of, rendered
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Mapping

_ECHO_COLUMNS = 4  # in the last row: the terminal writes "^C" behind the cursor, also twice
_SEQUENCE = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")
_MOST_OF_HEIGHT = 2  # bars take at most the height of the terminal divided by this


@dataclass(frozen=True, slots=True)
class LiveBlock:
    """The live rows of one stream of a rank."""

    label: tuple[Cell, ...]
    rows: tuple[ScreenRow, ...]
    prompt: ScreenRow | None = None
    column: int = 0  # of the cursor in the prompt


@dataclass(frozen=True, slots=True)
class Size:
    columns: int
    rows: int


def drawn(blocks: tuple[LiveBlock, ...], status: str, size: Size, is_colored: bool) -> bytes:
    """Return the bytes that draw the area below the last line, and leave the cursor in its last row."""
    # The last column stays empty: a terminal wraps when it is written to.
    columns = max(1, size.columns - 1)
    prompting = next((block for block in blocks if block.prompt is not None), None)
    if prompting is not None and prompting.prompt is not None:
        return _prompt(prompting, prompting.prompt, columns, is_colored)
    last = max(1, columns - _ECHO_COLUMNS)
    rows = [(*block.label, *row.cells) for block in blocks for row in block.rows if not row.is_blank]
    rows = rows[: max(1, size.rows // _MOST_OF_HEIGHT)]
    widths = [columns] * len(rows) if status else [*[columns] * (len(rows) - 1), last]
    texts = [_text(row, width, is_colored) for row, width in zip(rows, widths, strict=False)]
    if status:
        texts.append(status.replace("\n", " ")[:last])
    return _encoded("\n".join(texts))


def erased(area: bytes, columns: int = 0) -> bytes:
    """Return the bytes that erase the area, and leave the cursor where it began.

    `columns`: the window has become that narrow, and the terminal has wrapped the rows again. Row by row: to erase the
    rest of the screen makes tmux keep a copy if the area begins at its top.
    """
    if not area:
        return b""
    rows = area.split(b"\n")
    above = len(rows) - 1
    if columns:
        above = sum(max(1, -(-_width(row) // columns)) for row in rows) - 1
    return b"\r\x1b[K" + b"\x1b[A\x1b[K" * above


def wraps_anew(environ: Mapping[str, str]) -> bool:
    """Return whether the terminal wraps its rows again when the window gets narrower. Some cut them instead."""
    if environ.get("TMUX"):
        return True
    return not (environ.get("XTERM_VERSION") or environ.get("STY")) and not environ.get(
        "TERM", ""
    ).startswith(("rxvt", "screen", "linux"))


def _width(row: bytes) -> int:
    return len(cells_of(_SEQUENCE.sub(b"", row).decode("utf-8", "replace"), "", 0))


def _prompt(block: LiveBlock, prompt: ScreenRow, columns: int, is_colored: bool) -> bytes:
    cells = (*block.label, *prompt.cells)
    text = _text(cells, columns, is_colored)
    back = min(len(cells), columns) - (len(block.label) + block.column)
    return _encoded(text + (f"\x1b[{back}D" if back > 0 else ""))


def _text(cells: tuple[Cell, ...], columns: int, is_colored: bool) -> str:
    """Return the part of a row that fits, with tabs as blanks. A wide character is shown whole or not at all."""
    shown = [BLANK if char == "\t" else (style, char) for style, char in cells[:columns]]
    for at, (style, char) in enumerate(cells[:columns]):
        if not char and not _is_wide(cells, at):
            shown[at] = (style, " ")
    if len(cells) > columns and not cells[columns][1] and shown:
        shown[-1] = BLANK
    return rendered(tuple(shown if is_colored else (("", char) for _, char in shown)))


def _is_wide(cells: tuple[Cell, ...], at: int) -> bool:
    """Whether the continuation at this place belongs to a wide character, not to a tab."""
    while at and not cells[at][1]:
        at -= 1
    return cells[at][1] != "\t"


def _encoded(text: str) -> bytes:
    return without_c1(text.encode("utf-8", "surrogateescape").decode("utf-8", "replace").encode())
