"""What people see of the streams of ranks: in a pipe, on a terminal, and in the rows at its bottom. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from launcher.output import screen
from launcher.output.lines import without_c1
from launcher.output.screen import BLANK, Cell, Finished, Screen, ScreenRow, cells_of, rendered
from rendezvous.values.late_dataclass import dataclass

# --- in a pipe or a file ---------------------------------------------------------------------------
#
# What people see of one stream of a rank in a pipe or a file: its bytes, as they are. Pure.
#
# Lines are passed on when they end, so that lines of several ranks are not mixed. There are three exceptions, after
# which a line is shown in parts. If another stream writes between two parts, the second one begins a new line with
# its label.
#
# * A line that is longer than HELD_LIMIT.
# * A line that is redrawn, as a progress bar: what there is of it is passed on once a second.
# * On a terminal that cannot redraw, a line that does not change is passed on, because it may be a prompt.

HELD_LIMIT = 256 * 1024
_BAR_EVERY_S = 1.0
_PROMPT_AFTER_S = 0.2


class PlainView(NamedTuple):
    shows_prompts: bool = False
    held: bytes = b""  # the line that has not ended yet, as far as it is not shown
    due_at: float | None = None  # when to call `update`


def feed_plain(view: PlainView, chunk: bytes, now: float) -> tuple[PlainView, bytes]:
    """Return what is to be shown now. It may end within a line."""
    end = chunk.rfind(b"\n") + 1
    shown, held = (view.held + chunk[:end], chunk[end:]) if end else (b"", view.held + chunk)
    if len(held) > HELD_LIMIT:
        shown, held = shown + held, b""
    due_at = None if end else view.due_at
    if held and view.shows_prompts:
        due_at = now + _PROMPT_AFTER_S
    elif held and due_at is None and b"\r" in held:
        due_at = now + _BAR_EVERY_S
    return PlainView(view.shows_prompts, held, due_at if held else None), shown


def update_plain(view: PlainView, now: float) -> tuple[PlainView, bytes]:
    if view.due_at is None or now < view.due_at:
        return view, b""
    return PlainView(view.shows_prompts), view.held


# --- on a terminal ---------------------------------------------------------------------------------
#
# What people see of one stream of a rank on a terminal, and what its log gets. Pure.
#
# `feed` interprets the bytes (`screen`) and returns two texts, both of whole lines:
#
# * `lines`: what scrolls on the terminal. Rows that can still change are drawn below it (`launcher.output.live_area`).
# * `record`: the same for the log of a rank that has a terminal. There a line may have any length.
#
# A person cannot read more than INTERPRETED bytes a second. Of a stream that writes more, and of binary data, lines
# are shown without what moves the cursor, so that the rank does not wait for the interpretation.

INTERPRETED = 512 * 1024  # bytes a second, and at most half of it at once


@dataclass(frozen=True, slots=True)
class StreamView:
    is_recorded: bool = True
    screen: Screen = Screen()
    credit: float = INTERPRETED / 2  # bytes that may be interpreted
    fed_at: float = 0.0


class Texts(NamedTuple):
    lines: bytes
    record: bytes


def feed(view: StreamView, chunk: bytes, now: float) -> tuple[StreamView, Texts]:
    if screen.is_plain(chunk):
        after, finished = screen.feed(view.screen, chunk, now)
        return replace(view, screen=after), _texts(view, finished)
    earned = max(0.0, now - view.fed_at) * INTERPRETED
    credit = min(view.credit + earned, INTERPRETED / 2) - len(chunk)
    interpret = screen.feed if credit >= 0 and b"\0" not in chunk else screen.feed_uninterpreted
    after, finished = interpret(view.screen, chunk, now)
    return replace(view, screen=after, credit=max(0.0, credit), fed_at=now), _texts(view, finished)


def due_at(view: StreamView) -> float | None:
    """Return when to call `update` if the stream writes nothing more until then."""
    return screen.due_at(view.screen)


def update(view: StreamView, now: float) -> tuple[StreamView, Texts]:
    after, lines = screen.update(view.screen, now)
    return replace(view, screen=after), _texts(view, Finished(lines, lines))


def answered(view: StreamView) -> tuple[StreamView, Texts]:
    """End the line of the prompt: the terminal itself has moved to the next line after the answer."""
    line = view.screen.cursor_row.line() + b"\n"
    rest, lines = screen.without_cursor_row(view.screen)
    return replace(view, screen=rest), Texts(lines, lines + line if view.is_recorded else b"")


def finish(view: StreamView) -> Texts:
    """Return the last lines of a stream that has ended."""
    lines = screen.finish(view.screen)
    return _texts(view, Finished(lines, lines))


def live_rows(view: StreamView) -> tuple[ScreenRow, ...]:
    return view.screen.live


def prompt(view: StreamView) -> ScreenRow | None:
    """Return the row in which the rank may wait for input."""
    return view.screen.cursor_row if view.screen.is_prompt else None


def column(view: StreamView) -> int:
    """Return the cursor's column in the row of the prompt."""
    return view.screen.column if view.screen.rows else len(view.screen.cursor_row.cells)


def _texts(view: StreamView, finished: Finished) -> Texts:
    return Texts(finished.lines, finished.unbroken if view.is_recorded else b"")


# --- the rows at the bottom ------------------------------------------------------------------------
#
# The rows at the bottom of a terminal that are redrawn: progress bars of ranks, and the status of the job. Pure.
#
# Bars come first, the status last. If a rank shows a prompt, the area gives way to it: the prompt is the only row,
# and the cursor is where the rank has put it. So what a person types appears behind the prompt, and nothing
# overwrites it.

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
        cells = (*prompting.label, *prompting.prompt.cells)
        text = _text(cells, columns, is_colored)
        back = min(len(cells), columns) - (len(prompting.label) + prompting.column)
        return _encoded(text + (f"\x1b[{back}D" if back > 0 else ""))
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
