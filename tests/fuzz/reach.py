"""Which lines of ours an input reaches, and the few inputs that together reach what all of them do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_ROOT = Path(__file__).parents[2]
_OURS = (str(_ROOT / "rendezvous"), str(_ROOT / "launcher"))

Step = tuple[str, int, int]  # from one line of a file to the next


def steps(feed: Callable[[bytes], None], data: bytes) -> frozenset[Step]:
    reached: set[Step] = set()

    def enter(frame: Any, _event: str, _argument: object) -> Any:
        file, before = frame.f_code.co_filename, frame.f_lineno
        if not file.startswith(_OURS):
            return None

        def line(frame: Any, event: str, _argument: object) -> Any:
            nonlocal before
            if event == "line":
                reached.add((file, before, frame.f_lineno))
                before = frame.f_lineno
            return line

        return line

    tracing = sys.gettrace()
    sys.settrace(enter)
    try:
        feed(data)
    finally:
        sys.settrace(tracing)
    return frozenset(reached)


def smallest(feed: Callable[[bytes], None], there: Iterable[bytes], new: Iterable[bytes]) -> list[bytes]:
    """Of `new`, short ones first, those that reach something that neither `there` nor those before them do."""
    known: set[Step] = set()
    for data in there:
        known |= steps(feed, data)
    chosen = []
    for data in sorted(set(new), key=lambda each: (len(each), each)):
        reached = steps(feed, data)
        if not reached <= known:
            known |= reached
            chosen.append(data)
    return chosen
