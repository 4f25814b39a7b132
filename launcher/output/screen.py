"""The screen that a rank writes to, as far as it can still change: bytes in, finished lines and live rows out. Pure.

A program that sees a terminal redraws its progress bars: with carriage returns (tqdm), or by moving up over several
rows (rich). Here the bytes are interpreted as a terminal does it. A row that the program can no longer reach is a
finished line. The rows that it may still redraw are live. Every text becomes a finished line, unless the program
erases it.

When is a row finished? While nothing was redrawn: at its newline. This is the usual case and needs no cells: a stream
without carriage returns and escape sequences stays `text`. Otherwise three rules apply:

* Rows above those to which the program goes back are finished (`launcher.output.redrawn_rows`).
* A redrawn row that the cursor has left downwards is kept for SETTLE_S: a nested bar follows and then goes back up.
* If a program that goes back does not do so for FORGET_S, its display is finished.

At most ROWS_LIMIT rows are kept, with LINE_LIMIT columns each. The rows have no width: a program that knows the size of
its terminal does not write beyond it.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import replace
from typing import NamedTuple

from launcher.output.canvas import Canvas
from launcher.output.hidden_states import without_hidden_states
from launcher.output.lines import LINE_LIMIT, cut_to_pieces
from launcher.output.redrawn_rows import RedrawnRows
from launcher.output.screen_row import Row, cells_of
from rendezvous.values.late_dataclass import dataclass

SETTLE_S = 0.1
FORGET_S = 2.0
PROMPT_AFTER_S = 0.2

_PLAIN_LINE_END = re.compile(rb"\r+\n")
# In lines that match neither, every colour ends in its line, and nothing else happens. (A pattern that begins with one
# certain byte is searched for ten times faster than one that begins with a set.)
_SEQUENCE = re.compile(rb"\x1b(?!\[[0-9;:]*m)")
_COLOR_GOES_ON = re.compile(rb"\x1b\[(?!0?m)[^\x1b\n]*\n")
_CUT_LIMIT = 4096
_CUT_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b\n]*|[ -/]*)")


@dataclass(frozen=True, slots=True)
class Screen:
    text: bytes = b""  # while nothing was redrawn or coloured: the line without its newline yet
    rows: tuple[Row, ...] = ()  # empty until then
    at: int = 0  # the cursor's row and column
    column: int = 0
    style: str = ""
    redrawn: RedrawnRows = RedrawnRows()
    cut: bytes = b""  # an incomplete character or escape sequence
    late_at: float | None = None  # from then on it is late for the program to go back above the cursor
    prompt_at: float | None = None  # when unfinished text counts as a prompt
    is_prompt: bool = False

    @property
    def is_redrawn(self) -> bool:
        return self.redrawn.exist or any(row.is_redrawn for row in self.rows)

    @property
    def live(self) -> tuple[Row, ...]:
        """The rows that the program redraws, without blank ones at the end."""
        if not self.is_redrawn:
            return ()
        rows = self.rows
        while rows and (rows[-1].is_blank or not (self.redrawn.exist or rows[-1].is_redrawn)):
            rows = rows[:-1]
        return rows

    @property
    def settles_at(self) -> float | None:
        """When rows above the cursor are finished if the program does not go back."""
        return None if self.redrawn.hides_cursor else self.late_at

    @property
    def cursor_is_redrawn(self) -> bool:
        return bool(self.rows) and self.rows[self.at].is_redrawn

    @property
    def cursor_row(self) -> Row:
        if self.rows:
            return self.rows[self.at]
        return Row(tuple(cells_of(_without_controls(self.text), "", 0)))


class Finished(NamedTuple):
    lines: bytes  # each with its newline; a line without end in pieces of LINE_LIMIT
    unbroken: bytes  # the same without the newlines between these pieces


def feed(screen: Screen, chunk: bytes, now: float) -> tuple[Screen, Finished]:
    """Return the screen after `chunk`, and the lines that are finished."""
    was_prompt, lines, pieces = screen.is_prompt, b"", b""
    if len(screen.rows) == 1 and not screen.is_redrawn and (end := chunk.find(b"\n") + 1):
        screen, lines = _feed_cells(screen, chunk[:end], now)
        chunk = chunk[end:]
    if not screen.rows:
        screen, chunk = replace(screen, cut=b""), screen.cut + chunk
        chunk = _with_plain_line_ends(chunk)
        if end := _end_of_finished(chunk):
            screen, more, pieces = _feed_text(screen, chunk[:end])
            lines, chunk = lines + more, chunk[end:]
    unbroken = lines + pieces.replace(b"\n", b"")
    lines += pieces
    if chunk:
        screen, more = _feed_cells(screen, chunk, now)
        lines, unbroken = lines + more, unbroken + more
    has_text = _has_text(screen)
    is_prompt = was_prompt and has_text and not lines
    waits = has_text and not is_prompt and not screen.redrawn.hides_cursor and not screen.cursor_is_redrawn
    screen = replace(screen, prompt_at=now + PROMPT_AFTER_S if waits else None, is_prompt=is_prompt)
    return screen, Finished(lines, unbroken)


def is_plain(chunk: bytes) -> bool:
    """Whether the chunk has only text and ends of lines."""
    return not (b"\x1b" in chunk or b"\r" in chunk or b"\x08" in chunk or b"\0" in chunk)


def feed_uninterpreted(screen: Screen, chunk: bytes, _now: float) -> tuple[Screen, Finished]:
    """The same as `feed`, without cells: what moves the cursor is left in the lines, for the caller to remove."""
    before = finish(screen) if screen.rows else b""
    begun = Screen(text=b"" if screen.rows else screen.text)
    data = without_hidden_states(_with_plain_line_ends(screen.cut + chunk))
    after, lines, pieces = _feed_text(begun, data)
    return after, Finished(before + lines + pieces, before + lines + pieces.replace(b"\n", b""))


def due_at(screen: Screen) -> float | None:
    """Return when to call `update` if the stream writes nothing more until then."""
    times = [at for at in (screen.settles_at, screen.prompt_at) if at is not None]
    return min(times) if times else None


def update(screen: Screen, now: float) -> tuple[Screen, bytes]:
    """Finish the rows that the program has not gone back to, and recognize a prompt."""
    lines = b""
    if screen.prompt_at is not None and screen.prompt_at <= now:
        screen = replace(screen, prompt_at=None, is_prompt=True)
    if screen.settles_at is not None and screen.settles_at <= now:
        canvas = _canvas_of(screen)
        canvas.display = canvas.display.forgotten()
        canvas.take_off(canvas.at)
        lines = canvas.lines
        before, screen = screen, _screen_of(canvas, None, screen.cut)
        screen = replace(screen, prompt_at=before.prompt_at, is_prompt=before.is_prompt)
    return screen, lines


def without_cursor_row(screen: Screen) -> tuple[Screen, bytes]:
    """Return an empty screen, and the lines above the cursor."""
    return Screen(cut=screen.cut), b"".join(row.line() + b"\n" for row in screen.rows[: screen.at])


def finish(screen: Screen) -> bytes:
    """Return what is left on the screen of a stream that has ended."""
    if not screen.rows:
        return screen.text + b"\n" if screen.text else b""
    rows = screen.rows
    while len(rows) > screen.at and rows[-1].is_blank:
        rows = rows[:-1]
    return b"".join(row.line() + b"\n" for row in rows)


def _has_text(screen: Screen) -> bool:
    return bool(screen.text) or bool(screen.rows and not screen.rows[screen.at].is_blank)


def _end_of_finished(chunk: bytes) -> int:
    """Return how much of the chunk can be taken as it is: all of it without escape sequences, or coloured lines."""
    if b"\x1b" not in chunk and b"\x08" not in chunk and b"\r" not in chunk:
        return len(chunk)
    end = chunk.rfind(b"\n") + 1
    if chunk.find(b"\r", 0, end) >= 0 or chunk.find(b"\x08", 0, end) >= 0:
        return 0
    return 0 if _SEQUENCE.search(chunk, 0, end) or _COLOR_GOES_ON.search(chunk, 0, end) else end


def _with_plain_line_ends(data: bytes) -> bytes:
    if b"\r\n" not in data:
        return data
    return _PLAIN_LINE_END.sub(b"\n", data) if b"\r\r\n" in data else data.replace(b"\r\n", b"\n")


def _without_controls(text: bytes) -> str:
    return "".join(c for c in text.decode("utf-8", "surrogateescape") if c >= " " or c == "\t")


def _feed_text(screen: Screen, chunk: bytes) -> tuple[Screen, bytes, bytes]:
    """Return the screen, finished lines, and after them pieces of a line that is too long."""
    cut = chunk.rfind(b"\n") + 1
    lines = screen.text + chunk[:cut] if cut else b""
    text, pieces = chunk[cut:] if cut else screen.text + chunk, b""
    if len(text) > LINE_LIMIT:
        text, pieces = cut_to_pieces(text)
    return replace(screen, text=text), lines, pieces


def _feed_cells(screen: Screen, chunk: bytes, now: float) -> tuple[Screen, bytes]:
    canvas = _canvas_of(screen)
    data = without_hidden_states(_with_plain_line_ends(screen.cut + chunk))
    text, used = codecs.utf_8_decode(data, "surrogateescape", False)
    cut = data[used:]
    last = text.rfind("\x1b", max(0, len(text) - _CUT_LIMIT))
    if last >= 0 and _CUT_SEQUENCE.fullmatch(text, last):
        text, cut = text[:last], text[last:].encode("utf-8", "surrogateescape") + cut
    canvas.write(text)
    is_late = screen.late_at is not None and now >= screen.late_at
    canvas.take_off(canvas.first_kept(is_late))
    return _screen_of(canvas, _late_at(canvas, screen.late_at, now), cut), canvas.lines


def _canvas_of(screen: Screen) -> Canvas:
    if screen.rows:
        return Canvas(screen.rows, screen.at, screen.column, screen.style, screen.redrawn)
    row = Row(tuple(cells_of(_without_controls(screen.text), "", 0)))
    return Canvas((row,), 0, len(row.cells), screen.style, screen.redrawn)


def _screen_of(canvas: Canvas, late_at: float | None, cut: bytes) -> Screen:
    is_empty = len(canvas.rows) == 1 and not canvas.rows[0]
    if is_empty and not (canvas.display.exist or canvas.style or canvas.column):
        return Screen(cut=cut)
    rows = tuple(Row(tuple(cells), how) for cells, how in zip(canvas.rows, canvas.redrawn, strict=True))
    return Screen(b"", rows, canvas.at, canvas.column, canvas.style, canvas.display, cut, late_at)


def _late_at(canvas: Canvas, before: float | None, now: float) -> float | None:
    if not canvas.at:
        return None
    if before is None or canvas.went_back:
        return now + (FORGET_S if canvas.display.reach else SETTLE_S)
    return before
