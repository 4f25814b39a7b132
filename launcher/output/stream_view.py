"""What people see of one stream of a rank on a terminal, and what its log gets. Pure.

`feed` interprets the bytes (`screen`) and returns two texts, both of whole lines:

* `lines`: what scrolls on the terminal. Rows that can still change are drawn below it (`launcher.output.live_area`).
* `record`: the same for the log of a rank that has a terminal. There a line may have any length.

A person cannot read more than INTERPRETED bytes a second. Of a stream that writes more, and of binary data, lines
are shown without what moves the cursor, so that the rank does not wait for the interpretation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from launcher.output import screen
from launcher.output.screen import Finished, Screen
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from launcher.output.screen import ScreenRow

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
