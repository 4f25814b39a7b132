"""The screen that a rank writes to, as far as it can still change: bytes in, finished lines and live rows out. Pure.

A program that sees a terminal redraws its progress bars: with carriage returns (tqdm), or by moving up over several
rows (rich). Here the bytes are interpreted as a terminal does it. A row that the program can no longer reach is a
finished line. The rows that it may still redraw are live. Every text becomes a finished line, unless the program
erases it.

When is a row finished? While nothing was redrawn: at its newline. This is the usual case and needs no cells: a stream
without carriage returns and escape sequences stays `text`. Otherwise four rules apply:

* `reach` is how many rows above the last one the program has gone back. The rows above these are finished.
* A program that hides the cursor is about to redraw all that follows (rich). Its rows are kept until it shows how far
  it goes back, or shows the cursor again.
* A redrawn row that the cursor has left downwards is kept for SETTLE_S: a nested bar follows and then goes back up.
* If a program with a reach does not go back for FORGET_S, its reach is forgotten.

At most ROWS_LIMIT rows are kept, with LINE_LIMIT columns each. The rows have no width: a program that knows the size of
its terminal does not write beyond it.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from launcher.output.lines import LINE_LIMIT, cut_to_pieces
from launcher.output.screen_row import (
    BLANK,
    Cell,
    Row,
    cells_of,
    combine,
    make_blank,
    restyled,
    width_of,
    without_hidden_states,
)

ROWS_LIMIT = 100
SETTLE_S = 0.1
FORGET_S = 2.0
PROMPT_AFTER_S = 0.2

_PLAIN_LINE_END = re.compile(rb"\r+\n")
# In lines that match neither, every colour ends in its line, and nothing else happens.
_MOVES = re.compile(rb"[\r\x08]|\x1b(?!\[[0-9;:]*m)")
_COLOR_GOES_ON = re.compile(rb"\x1b\[(?!0?m)[^\x1b\n]*\n")
_COLUMNS_LIMIT = 1000  # for movements; text may go on to LINE_LIMIT
_CELLS_LIMIT = 4096  # a longer row is no part of a display: it is finished at its newline
_CUT_LIMIT = 4096
_TOKEN = re.compile(
    r"(?P<text>[^\x00-\x1f\x7f]+)"
    r"|\x1b\[(?P<parameters>[0-?]*)[ -/]*(?P<final>[@-~])"
    r"|(?P<control>[\n\r\x08\t])"
    r"|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # titles, links
    r"|\x1b[ -/]*[0-OQ-WYZ\\`-~]"
)
_CUT_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b\n]*|[ -/]*)")


@dataclass(frozen=True, slots=True)
class Screen:
    text: bytes = b""  # while nothing was redrawn or coloured: the line without its newline yet
    rows: tuple[Row, ...] = ()  # empty until then
    at: int = 0  # the cursor's row and column
    column: int = 0
    style: str = ""
    reach: int = 0
    hides_cursor: bool = False
    cut: bytes = b""  # an incomplete character or escape sequence
    settles_at: float | None = None  # when rows above the cursor are finished if the program does not go back
    prompt_at: float | None = None  # when unfinished text counts as a prompt
    is_prompt: bool = False

    @property
    def is_redrawn(self) -> bool:
        return bool(self.reach) or self.hides_cursor or any(row.is_redrawn for row in self.rows)

    @property
    def live(self) -> tuple[Row, ...]:
        """The rows that the program redraws, without blank ones at the end."""
        if not self.is_redrawn:
            return ()
        rows = self.rows
        while rows and (rows[-1].is_blank or not (self.reach or self.hides_cursor or rows[-1].is_redrawn)):
            rows = rows[:-1]
        return rows

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
    if not screen.rows and not screen.cut:
        chunk = _PLAIN_LINE_END.sub(b"\n", chunk) if b"\r" in chunk else chunk
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
    waits = has_text and not is_prompt and not screen.hides_cursor and not screen.cursor_is_redrawn
    screen = replace(screen, prompt_at=now + PROMPT_AFTER_S if waits else None, is_prompt=is_prompt)
    return screen, Finished(lines, unbroken)


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
        canvas = _Canvas(screen)
        canvas.reach = 0
        canvas.take_off(canvas.at)
        lines = canvas.lines
        before, screen = screen, canvas.screen(None, screen.cut)
        screen = replace(screen, prompt_at=before.prompt_at, is_prompt=before.is_prompt)
    return screen, lines


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
    return 0 if _MOVES.search(chunk, 0, end) or _COLOR_GOES_ON.search(chunk, 0, end) else end


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
    canvas = _Canvas(screen)
    data = _PLAIN_LINE_END.sub(b"\n", screen.cut + chunk)
    text, used = codecs.utf_8_decode(data, "surrogateescape", False)
    cut = data[used:]
    last = text.rfind("\x1b", max(0, len(text) - _CUT_LIMIT))
    if last >= 0 and _CUT_SEQUENCE.fullmatch(text, last):
        text, cut = text[:last], text[last:].encode("utf-8", "surrogateescape") + cut
    canvas.write(text)
    canvas.take_off(canvas.first_kept(screen.settles_at, now))
    return canvas.screen(canvas.settles_at(screen.settles_at, now), cut), canvas.lines


class _Canvas:
    """The screen while one chunk is written to it."""

    def __init__(self, screen: Screen) -> None:
        self.rows = [list(row.cells) for row in screen.rows]
        self.redrawn = [row.is_redrawn for row in screen.rows]
        if not self.rows:
            self.rows, self.redrawn = [cells_of(_without_controls(screen.text), "", 0)], [False]
        self.at, self.style = screen.at, screen.style
        self.column = screen.column if screen.rows else len(self.rows[0])
        self.reach, self.hides_cursor = screen.reach, screen.hides_cursor
        self.went_back = False
        self._is_over = False  # the program has ended its display in this chunk
        self._finished: list[bytes] = []

    def screen(self, settles_at: float | None, cut: bytes) -> Screen:
        is_empty = len(self.rows) == 1 and not self.rows[0]
        if is_empty and not (self.reach or self.hides_cursor or self.style or self.column):
            return Screen(cut=cut)
        rows = tuple(Row(tuple(cells), how) for cells, how in zip(self.rows, self.redrawn, strict=True))
        return Screen(
            b"", rows, self.at, self.column, self.style, self.reach, self.hides_cursor, cut, settles_at
        )

    # --- what is finished --------------------------------------------------------------------------

    def first_kept(self, settles_at: float | None, now: float) -> int:
        """Return the first row that the program may still redraw."""
        if self.hides_cursor and not self.reach:
            return 0
        first = max(0, min(self.at, len(self.rows) - 1 - self.reach))
        may_go_back = settles_at is None or now < settles_at or self.went_back
        if not self.reach and may_go_back and not self._is_over:
            first = next((at for at in range(first) if self.redrawn[at]), first)
        return first

    def settles_at(self, before: float | None, now: float) -> float | None:
        if self.hides_cursor or not self.at:
            return None
        if before is None or self.went_back:
            return now + (FORGET_S if self.reach else SETTLE_S)
        return before

    def take_off(self, count: int) -> None:
        """Finish rows at the top."""
        for cells, how in zip(self.rows[:count], self.redrawn[:count], strict=True):
            self._finished.append(Row(tuple(cells), how).line() + b"\n")
        del self.rows[:count], self.redrawn[:count]
        self.at -= count

    @property
    def lines(self) -> bytes:
        return b"".join(self._finished)

    # --- what is written ---------------------------------------------------------------------------

    def write(self, text: str) -> None:
        for token in _TOKEN.finditer(without_hidden_states(text)):
            if (words := token["text"]) is not None:
                self._print(words)
            elif (final := token["final"]) is not None:
                self._control(final, token["parameters"])
            elif (control := token["control"]) is not None:
                self._move(control)

    def _print(self, text: str) -> None:
        row = self.rows[self.at]
        while text and 0 < self.column <= len(row) and not width_of(text[0], self.column):
            combine(row, self.column, text[0])
            text = text[1:]
        while text:
            if self.column >= LINE_LIMIT:
                self._new_line()
            piece, text = text[: LINE_LIMIT - self.column], text[LINE_LIMIT - self.column :]
            self._put(cells_of(piece, self.style, self.column))

    def _put(self, cells: list[Cell]) -> None:
        row, at = self.rows[self.at], self.column
        if at > len(row):
            row += [BLANK] * (at - len(row))
        end = at + len(cells)
        if end < len(row) and not row[end][1]:
            make_blank(row, end)
        if at < len(row) and not row[at][1]:
            make_blank(row, at)
        row[at:end] = cells
        self.column = end

    def _move(self, control: str) -> None:
        match control:
            case "\n":
                self._new_line()
            case "\t" if self.column < len(self.rows[self.at]):
                self.column += width_of("\t", self.column)
            case "\t":
                self._print("\t")
            case _:
                self.redrawn[self.at] = True
                self.column = 0 if control == "\r" else max(0, self.column - 1)

    def _new_line(self) -> None:
        is_too_long = len(self.rows[self.at]) > _CELLS_LIMIT
        self.column = 0
        self._go_to_row(self.at + 1)
        if is_too_long or len(self.rows) > ROWS_LIMIT:
            self.take_off(self.at if is_too_long else len(self.rows) - ROWS_LIMIT)

    def _go_to_row(self, at: int) -> None:
        self.at = max(0, at)
        while len(self.rows) <= self.at:
            self.rows.append([])
            self.redrawn.append(False)

    def _go_back_to(self, at: int) -> None:
        at = max(0, at)
        if at < self.at:
            self.went_back = True
            self.reach = max(self.reach, len(self.rows) - 1 - at)
        self._go_to_row(min(at, ROWS_LIMIT - 1))

    def _control(self, final: str, parameters: str) -> None:
        if final == "m":
            if parameters[:1] not in "<=>?" or not parameters:
                self.style = restyled(self.style, parameters)
            return
        if parameters.startswith("?"):
            if parameters == "?25" and final in "hl":
                self._show_cursor(final == "h")
            return
        numbers = _numbers(parameters)
        if final in "JK":
            self._erase(final, numbers[0] if numbers else 0)
        elif final in "@PX":
            self._shift(final, max(1, numbers[0] if numbers else 1))
        else:
            self._move_by(final, numbers)

    def _show_cursor(self, is_shown: bool) -> None:
        self.hides_cursor = not is_shown
        if is_shown:
            self.reach, self._is_over = 0, True

    def _move_by(self, final: str, numbers: list[int]) -> None:
        count = max(1, numbers[0] if numbers else 1)
        match final:
            case "A" | "F":
                self._go_back_to(self.at - count)
            case "B" | "E":
                self._go_to_row(min(self.at + count, ROWS_LIMIT - 1))
            case "C":
                self.column += count
            case "D":
                self.redrawn[self.at] = True
                self.column -= count
            case "G" | "`":
                self.redrawn[self.at] = True
                self.column = count - 1
            case "H" | "f":
                self._go_back_to(count - 1)
                self.went_back, self.reach = True, ROWS_LIMIT  # a display of the whole screen
                self.column = max(1, numbers[1] if len(numbers) > 1 else 1) - 1
            case "d":
                self._go_back_to(count - 1)
        if final in "EF":
            self.column = 0
        self.column = min(max(0, self.column), max(_COLUMNS_LIMIT, len(self.rows[self.at])))

    def _erase(self, final: str, how: int) -> None:
        row = self.rows[self.at]
        if how == 0:
            del row[self.column :]
        elif how == 1:
            end = min(self.column + 1, len(row))
            row[:end] = [BLANK] * end
        else:
            row.clear()
        if final == "J" and how == 0:
            del self.rows[self.at + 1 :], self.redrawn[self.at + 1 :]
        elif final == "J" and how in (2, 3):
            for cells in self.rows:
                cells.clear()
            self.redrawn = [True] * len(self.rows)

    def _shift(self, final: str, count: int) -> None:
        row, at = self.rows[self.at], self.column
        count = min(count, _COLUMNS_LIMIT)
        self.redrawn[self.at] = True
        if at >= len(row):
            return
        if final == "@":
            row[at:] = ([BLANK] * count + row[at:])[:LINE_LIMIT]
        elif final == "P":
            del row[at : at + count]
        else:
            row[at : at + count] = [BLANK] * len(row[at : at + count])


def _numbers(parameters: str) -> list[int]:
    words = parameters.replace(":", ";").split(";") if parameters else []
    return [int(word[:6]) if word.isascii() and word.isdigit() else 0 for word in words]
