"""What people see of one stream of a rank: on a terminal, in a pipe, in the log of a rank with a terminal. Pure.

`feed` interprets the bytes (`screen`) and returns two texts, both of whole lines:

* `lines`: what scrolls on a terminal. The rows that can still change are drawn below it (`launcher.output.live_area`).
* `record`: the same for a place where nothing can be redrawn. Live rows become lines that grow rarer (`thinning`). A
  stream that is drawn has its record in a file, where a line may have any length.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from launcher.output import screen, thinning
from launcher.output.screen import Finished, Screen
from launcher.output.thinning import Thinning
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from launcher.output.screen_row import Row


@dataclass(frozen=True, slots=True)
class StreamView:
    is_drawn: bool = False  # live rows and prompts are drawn on a terminal
    is_recorded: bool = True
    shows_prompts: bool = False  # as lines, on a terminal that cannot redraw
    screen: Screen = Screen()
    thinning: Thinning = Thinning()


class Texts(NamedTuple):
    lines: bytes
    record: bytes


def feed(view: StreamView, chunk: bytes, now: float) -> tuple[StreamView, Texts]:
    after, finished = screen.feed(view.screen, chunk, now)
    return _recorded(replace(view, screen=after), finished, now)


def due_at(view: StreamView) -> float | None:
    """Return when to call `update` if the stream writes nothing more until then."""
    times = [view.screen.settles_at]
    if view.is_drawn or view.shows_prompts:
        times.append(view.screen.prompt_at)
    if view.is_recorded:
        times.append(thinning.due_at(view.thinning, _as_lines(view.screen.live)))
    known = [at for at in times if at is not None]
    return min(known) if known else None


def update(view: StreamView, now: float) -> tuple[StreamView, Texts]:
    after, lines = screen.update(view.screen, now)
    if view.shows_prompts and after.is_prompt:
        lines += after.cursor_row.line() + b"\n"
        after = Screen()
    return _recorded(replace(view, screen=after), Finished(lines, lines), now)


def answered(view: StreamView, now: float) -> tuple[StreamView, Texts]:
    """End the line of the prompt: the terminal itself has moved to the next line after the answer."""
    line = view.screen.cursor_row.line() + b"\n"
    rest, lines = screen.without_cursor_row(view.screen)
    after, texts = _recorded(replace(view, screen=rest), Finished(lines + line, lines + line), now)
    return after, Texts(lines, texts.record)


def finish(view: StreamView) -> Texts:
    """Return the last lines of a stream that has ended."""
    lines = screen.finish(view.screen)
    return Texts(lines, thinning.add(view.thinning, lines, b"", 0.0)[1] if view.is_recorded else b"")


def live_rows(view: StreamView) -> tuple[Row, ...]:
    return view.screen.live if view.is_drawn else ()


def prompt(view: StreamView) -> Row | None:
    """Return the row in which the rank may wait for input."""
    return view.screen.cursor_row if view.is_drawn and view.screen.is_prompt else None


def column(view: StreamView) -> int:
    """Return the cursor's column in the row of the prompt."""
    return view.screen.column if view.screen.rows else len(view.screen.cursor_row.cells)


def _recorded(view: StreamView, finished: Finished, now: float) -> tuple[StreamView, Texts]:
    if not view.is_recorded:
        return view, Texts(finished.lines, b"")
    text = finished.unbroken if view.is_drawn else finished.lines
    after, record = thinning.add(view.thinning, text, _as_lines(view.screen.live), now)
    return replace(view, thinning=after), Texts(finished.lines, record)


def _as_lines(rows: tuple[Row, ...]) -> bytes:
    return b"".join(row.line() + b"\n" for row in rows)
