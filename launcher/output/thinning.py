"""Which states of a progress bar become lines, where nothing can be redrawn: in pipes and files. Pure.

The first state is shown at once. The pause before the next one doubles each time, from FIRST_PAUSE_S to
LONGEST_PAUSE_S, so that hours of training leave few lines. The last state is always shown: it is a finished line.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0


@dataclass(frozen=True, slots=True)
class Thinning:
    shown: bytes = b""  # the last state, to avoid showing it again
    next_at: float = float("-inf")
    pause_s: float = FIRST_PAUSE_S


def add(thinning: Thinning, finished: bytes, live: bytes, now: float) -> tuple[Thinning, bytes]:
    """Return what to show of finished lines and of the live rows, all of them whole lines."""
    if finished:
        finished = _without(finished, thinning.shown)
        thinning = Thinning(b"", thinning.next_at, thinning.pause_s)
    thinning, state = update(thinning, live, now)
    return thinning, finished + state


def due_at(thinning: Thinning, live: bytes) -> float | None:
    """Return when to call `update` if nothing else happens until then."""
    return thinning.next_at if live and live != thinning.shown else None


def update(thinning: Thinning, live: bytes, now: float) -> tuple[Thinning, bytes]:
    due = due_at(thinning, live)
    if due is None or due > now:
        return thinning, b""
    return Thinning(live, now + thinning.pause_s, min(2 * thinning.pause_s, LONGEST_PAUSE_S)), live


def _without(finished: bytes, shown: bytes) -> bytes:
    return finished[len(shown) :] if shown and finished.startswith(shown) else finished
