"""The rows that a program can still change, while a chunk is written to them: text and movements. Pure."""

from __future__ import annotations

import re
from dataclasses import replace

from launcher.output.lines import LINE_LIMIT
from launcher.output.redrawn_rows import RedrawnRows
from launcher.output.screen_row import (
    BLANK,
    Cell,
    Row,
    cells_of,
    combine,
    make_blank,
    restyled,
    width_of,
)

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

    def __init__(self, rows: tuple[Row, ...], at: int, column: int, style: str, display: RedrawnRows) -> None:
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
            self._finished.append(Row(tuple(cells), how).line() + b"\n")
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
        if is_shown:
            self._is_over, self.display = True, RedrawnRows()
        else:
            self.display = replace(self.display, hides_cursor=True)

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
