"""Which states of a progress bar become lines, where nothing can be redrawn: in pipes and files. Pure.

The first state is shown at once. The pause before the next one doubles each time, from FIRST_PAUSE_S to
LONGEST_PAUSE_S, so that hours of training leave few lines. The last state is always shown: it is a finished line.
"""

from __future__ import annotations

import re

from rendezvous.values.late_dataclass import dataclass

# Text in which each character has one column: printable ASCII, and the blocks and lines that bars consist of (three
# bytes each). There, what one state of a bar leaves of the one before is a matter of lengths.
_ASCII = bytes(range(32, 127)) + b"\r\n"
_BLOCKS = re.compile(rb"(?:\xe2[\x94-\x96\xa0-\xa3][\x80-\xbf])*")
_CUT_BLOCK = re.compile(rb"(?:\xe2[\x94-\x96\xa0-\xa3]?)?\Z")
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
