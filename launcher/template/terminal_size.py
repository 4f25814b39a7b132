"""The size of its terminal in a rank: that of the output, where rich asks the input first.

A rank reads from the terminal of the command, and writes to a terminal of its own. That one is narrower, because each
row has a label. Of a rank without this, the rows that rich fills would be wrapped.
"""

from __future__ import annotations

import os

_STDIN, _STDOUT, _STDERR = 0, 1, 2


def follow_output() -> None:
    """Return the size of the output for stdin too, if both are terminals and differ."""
    if not os.isatty(_STDIN):
        return
    shown = next((fd for fd in (_STDOUT, _STDERR) if _is_another_terminal(fd)), None)
    if shown is None:
        return
    size_of = os.get_terminal_size

    def get_terminal_size(fd: int = _STDOUT, /) -> os.terminal_size:
        size = size_of(fd)
        try:
            return size_of(shown) if fd == _STDIN else size
        except OSError:  # the script has redirected its output
            return size

    os.get_terminal_size = get_terminal_size


def _is_another_terminal(fd: int) -> bool:
    return os.isatty(fd) and os.fstat(fd).st_rdev != os.fstat(_STDIN).st_rdev
