"""The settings of the terminal that ranks read from: who shows what is typed, and what a dying rank leaves changed."""

from __future__ import annotations

import os
import termios
from typing import Any

_STDIN = 0
_LOCAL_FLAGS = 3  # place in what tcgetattr returns


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


def ends_lines() -> bool:
    """Whether the terminal itself edits and shows what is typed, and moves to the next line after it."""
    settings = _settings()
    wanted = termios.ICANON | termios.ECHO
    return settings is not None and settings[_LOCAL_FLAGS] & wanted == wanted


def is_raw() -> bool:
    """Whether a program reads single keys from the terminal."""
    settings = _settings()
    return settings is not None and not settings[_LOCAL_FLAGS] & termios.ICANON


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
