"""Leaves out what nobody sees: states of a progress bar that the same write overwrites. Pure."""

from __future__ import annotations

import re

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
