"""The settings of the terminal that ranks read from: a rank that dies while it edits a line leaves them changed."""

from __future__ import annotations

import os
import termios
from typing import Any

_STDIN = 0


class Keyboard:
    def __init__(self) -> None:
        self._before = _settings()

    def restore(self) -> None:
        """Restore what was set at the start, unless another program uses the terminal now."""
        if self._before is None or _settings() in (None, self._before) or not _is_in_foreground():
            return
        try:
            termios.tcsetattr(_STDIN, termios.TCSADRAIN, self._before)
        except termios.error:  # the terminal is gone
            pass


def _settings() -> list[Any] | None:
    try:
        return termios.tcgetattr(_STDIN)
    except termios.error:
        return None


def _is_in_foreground() -> bool:
    try:
        return os.tcgetpgrp(_STDIN) == os.getpgrp()
    except OSError:
        return False
