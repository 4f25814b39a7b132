"""The screen that a rank writes to, as far as it can still change: bytes in, finished lines and live rows out. Pure.

A program that sees a terminal redraws its progress bars: with carriage returns (tqdm), or by moving up over several
rows (rich). Here the bytes are interpreted as a terminal does it. A row that the program can no longer reach is a
finished line. The rows that it may still redraw are live. Every text becomes a finished line, unless the program
erases it.

When is a row finished? While nothing was redrawn: at its newline. This is the usual case and needs no cells: a stream
without carriage returns and escape sequences stays `text`. Otherwise three rules apply:

* Rows above those to which the program goes back are finished (`launcher.output.screen`).
* A redrawn row that the cursor has left downwards is kept for SETTLE_S: a nested bar follows and then goes back up.
* If a program that goes back does not do so for FORGET_S, its display is finished.

At most ROWS_LIMIT rows are kept, with LINE_LIMIT columns each. The rows have no width: a program that knows the size of
its terminal does not write beyond it.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from dataclasses import replace
from functools import lru_cache
from itertools import repeat
from operator import itemgetter
from typing import NamedTuple

from launcher.output.lines import LINE_LIMIT, cut_to_pieces
from rendezvous.values.late_dataclass import dataclass

# --- canvas -----------------------------------------------------------------------------------------
#
# The rows that a program can still change, while a chunk is written to them: text and movements. Pure.

ROWS_LIMIT = 100
_COLUMNS_LIMIT = 1000  # for movements; text may go on to LINE_LIMIT
_CELLS_LIMIT = 4096  # a longer row is no part of a display: it is finished at its newline
_TOKEN = re.compile(
    r"(?P<text>[^\x00-\x1f\x7f]+)"
    r"|\x1b\[(?P<parameters>[0-?]*)[ -/]*(?P<final>[@-~])"
    r"|(?P<control>[\n\r\x08\t])"
    r"|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # titles, links
    r"|\x1b[ -/]*[0-OQ-WYZ\\`-~]"
)


class Canvas:
    """The rows of a screen while one chunk is written to them."""

    def __init__(
        self, rows: tuple[ScreenRow, ...], at: int, column: int, style: str, display: RedrawnRows
    ) -> None:
        self.rows = [list(row.cells) for row in rows]
        self.redrawn = [row.is_redrawn for row in rows]
        self.at, self.column, self.style, self.display = at, column, style, display
        self.went_back = False
        self._began_at = at
        self._is_over = False  # the program has ended its display in this chunk
        self._finished: list[bytes] = []

    # --- what is finished --------------------------------------------------------------------------

    def first_kept(self, is_late: bool) -> int:
        """Return the first row that the program may still redraw."""
        is_late = is_late and not self.went_back
        if self.display.hides_cursor and is_late and self.at > self._began_at:
            self.display = self.display.forgotten()
            return self._began_at
        first = self.display.first(self.at, len(self.rows) - 1)
        if not (self.display.exist or is_late or self._is_over):
            first = next((at for at in range(first) if self.redrawn[at]), first)
        return first

    def take_off(self, count: int) -> None:
        """Finish rows at the top."""
        for cells, how in zip(self.rows[:count], self.redrawn[:count], strict=True):
            self._finished.append(ScreenRow(tuple(cells), how).line() + b"\n")
        del self.rows[:count], self.redrawn[:count]
        self.at -= count
        self._began_at = max(0, self._began_at - count)
        self.display = self.display.without(count)

    @property
    def lines(self) -> bytes:
        return b"".join(self._finished)

    # --- what is written ---------------------------------------------------------------------------

    def write(self, text: str) -> None:
        for token in _TOKEN.finditer(text):
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
        if at > self.at:
            self.display = self.display.went_down()
        self.at = max(0, at)
        while len(self.rows) <= self.at:
            self.rows.append([])
            self.redrawn.append(False)

    def _go_back_to(self, at: int) -> None:
        at = max(0, at)
        if at < self.at:
            self.went_back = True
            self.display = self.display.went_back(at, len(self.rows) - 1)
        self._go_to_row(min(at, ROWS_LIMIT - 1))

    def _control(self, final: str, parameters: str) -> None:
        if final == "m":
            if parameters[:1] not in "<=>?" or not parameters:
                self.style = restyled(self.style, parameters)
            return
        if parameters.startswith("?"):
            if parameters == "?25" and final in "hl":
                is_shown = final == "h"
                if is_shown:
                    self._is_over, self.display = True, RedrawnRows()
                else:
                    self.display = replace(self.display, hides_cursor=True)
            return
        numbers = _numbers(parameters)
        if final in "JK":
            self._erase(final, numbers[0] if numbers else 0)
        elif final in "@PX":
            self._shift(final, max(1, numbers[0] if numbers else 1))
        else:
            self._move_by(final, numbers)

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
                self.went_back = True
                self.display = self.display.went_back(0, ROWS_LIMIT)  # a display of the whole screen
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
            if at + count < len(row) and not row[at + count][1]:
                make_blank(row, at + count)
            del row[at : at + count]
        else:
            row[at : at + count] = [BLANK] * len(row[at : at + count])


def _numbers(parameters: str) -> list[int]:
    words = parameters.replace(":", ";").split(";") if parameters else []
    return [int(word[:6]) if word.isascii() and word.isdigit() else 0 for word in words]


# --- redrawn rows -----------------------------------------------------------------------------------
#
# Which rows of its display a program may still redraw: how far it goes back, and whether it hides the cursor. Pure.
#
# * `reach` is how many rows above the last one the program has gone back. The rows above these are finished.
# * What it has written since it went back may be a display that has grown, or lines above the display. So these rows
#   are kept until it goes back again, and thereby shows where its display begins.
# * A program that hides the cursor redraws all that follows (rich). Its rows are kept until it goes back or shows the
#   cursor again. If it writes below its display instead of going back, the display is finished.
#
# Rows are counted from the first row that is kept.


@dataclass(frozen=True, slots=True)
class RedrawnRows:
    reach: int = 0
    top: int | None = None  # the row to which the program went back the last time
    ascent: int | None = None  # the same while it may still go further back
    hides_cursor: bool = False

    @property
    def exist(self) -> bool:
        return bool(self.reach) or self.hides_cursor

    def went_back(self, at: int, last: int) -> RedrawnRows:
        return replace(self, ascent=at, reach=max(self.reach, last - at))

    def went_down(self) -> RedrawnRows:
        return self if self.ascent is None else replace(self, top=self.ascent, ascent=None)

    def without(self, count: int) -> RedrawnRows:
        """Count the rows again after some at the top are finished."""
        if not count or self.top is self.ascent is None:
            return self
        top, ascent = (None if at is None else max(0, at - count) for at in (self.top, self.ascent))
        return replace(self, top=top, ascent=ascent)

    def forgotten(self) -> RedrawnRows:
        return RedrawnRows(hides_cursor=self.hides_cursor)

    def first(self, at: int, last: int) -> int:
        """Return the first row that the program may still redraw. `at`: the cursor's row, `last`: the last row."""
        if not self.hides_cursor:
            # No more of the ascent follows: tqdm goes back in one write.
            begin = self.top if self.ascent is None else self.ascent
            return max(0, min(at, last - self.reach, at if begin is None else begin))
        if self.top is None:
            return 0
        return min(at, self.top, at if self.ascent is None else self.ascent)


# --- screen -----------------------------------------------------------------------------------------

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
    rows: tuple[ScreenRow, ...] = ()  # empty until then
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
    def live(self) -> tuple[ScreenRow, ...]:
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
    def cursor_row(self) -> ScreenRow:
        if self.rows:
            return self.rows[self.at]
        return ScreenRow(tuple(cells_of(_without_controls(self.text), "", 0)))


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
    has_text = bool(screen.text) or bool(screen.rows and not screen.rows[screen.at].is_blank)
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
    row = ScreenRow(tuple(cells_of(_without_controls(screen.text), "", 0)))
    return Canvas((row,), 0, len(row.cells), screen.style, screen.redrawn)


def _screen_of(canvas: Canvas, late_at: float | None, cut: bytes) -> Screen:
    is_empty = len(canvas.rows) == 1 and not canvas.rows[0]
    if is_empty and not (canvas.display.exist or canvas.style or canvas.column):
        return Screen(cut=cut)
    rows = tuple(ScreenRow(tuple(cells), how) for cells, how in zip(canvas.rows, canvas.redrawn, strict=True))
    return Screen(b"", rows, canvas.at, canvas.column, canvas.style, canvas.display, cut, late_at)


def _late_at(canvas: Canvas, before: float | None, now: float) -> float | None:
    if not canvas.at:
        return None
    if before is None or canvas.went_back:
        return now + (FORGET_S if canvas.display.reach else SETTLE_S)
    return before


# --- hidden states ----------------------------------------------------------------------------------
#
# Leaves out what would not be seen: states of a progress bar that the same write overwrites. Pure.

# Text in which each character has one column: printable ASCII, and the blocks and lines that bars consist of (three
# bytes each). There, what one state of a bar leaves of the one before is a matter of lengths.
_ASCII = bytes(range(32, 127)) + b"\r\n"
_BLOCKS = re.compile(rb"(?:\xe2[\x94-\x96\xa0-\xa3][\x80-\xbf])*")
_CUT_BLOCK = re.compile(rb"(?:\xe2[\x94-\x96\xa0-\xa3]?)?\Z")


def without_hidden_states(data: bytes) -> bytes:
    """Return bytes with the same effect on a screen, without states of a bar that are overwritten at once.

    A rank that redraws its bar all the time would otherwise cost the agent as much time as the rank itself.
    """
    if data.find(b"\r", data.find(b"\r") + 1) < 0:
        return data
    wider = data.translate(None, _ASCII)
    cut: bytes = _CUT_BLOCK.findall(data[-2:])[0]
    if wider and not _BLOCKS.fullmatch(wider, 0, len(wider) - len(cut)):
        return data
    lines = data[: len(data) - len(cut)].split(b"\n")
    return b"\n".join(_newest(line) if b"\r" in line else line for line in lines) + cut


def _newest(line: bytes) -> bytes:
    begun, *states = line.decode().split("\r")
    last = shown = states[-1]
    longest = max(map(len, states))
    for state in reversed(states):
        if len(shown) == longest:
            break
        shown += state[len(shown) :]
    return "\r".join((begun, last) if shown == last else (begun, shown, last)).encode()


# --- one row of a terminal's screen: cells with a style, and the row as text. Pure ------------------
#
# A cell is a style and a character. The style is the list of SGR parameters that are in effect, such as "1;31", and
# "" for none. A character that is two columns wide, or a tab, is followed by cells with the character "". A mark that
# combines with the character before it (an accent) shares its cell. Text that is not UTF-8 is kept by surrogate
# escapes.

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
class ScreenRow:
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
