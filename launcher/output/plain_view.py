"""What people see of one stream of a rank in a pipe or a file: its bytes, as they are. Pure.

Lines are passed on when they end, so that lines of several ranks are not mixed. There are three exceptions, after which
a line is shown in parts. If another stream writes between two parts, the second one begins a new line with its label.

* A line that is longer than HELD_LIMIT.
* A line that is redrawn, as a progress bar: what there is of it is passed on once a second.
* On a terminal that cannot redraw, a line that does not change is passed on, because it may be a prompt.
"""

from __future__ import annotations

from typing import NamedTuple

HELD_LIMIT = 256 * 1024
_BAR_EVERY_S = 1.0
_PROMPT_AFTER_S = 0.2


class PlainView(NamedTuple):
    shows_prompts: bool = False
    held: bytes = b""  # the line that has not ended yet, as far as it is not shown
    due_at: float | None = None  # when to call `update`


def feed(view: PlainView, chunk: bytes, now: float) -> tuple[PlainView, bytes]:
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


def update(view: PlainView, now: float) -> tuple[PlainView, bytes]:
    if view.due_at is None or now < view.due_at:
        return view, b""
    return PlainView(view.shows_prompts), view.held
