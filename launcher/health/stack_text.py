"""Decides by the stacks of a rank whether its main thread waits for other ranks."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.values.types import Doubt

if TYPE_CHECKING:
    from rendezvous.values.types import Cause

MAIN_THREAD = "Main thread"
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line \d+ in ')
_LIBRARIES = ("/torch/", "/ddp/")


def is_local_work(text: str) -> bool:
    """Whether the main thread is in the script, or in a library that does not communicate with other ranks.

    A thread inside torch may be waiting in C++ code that the stack does not show, so it does not count.
    """
    if not text.startswith(MAIN_THREAD):
        return False
    first = next((line for line in text.splitlines() if line.startswith("  ")), "")
    frame = _FRAME.match(first)
    return frame is not None and not any(library in frame["file"] for library in _LIBRARIES)


def without_doubt(cause: Cause, text: str) -> Cause:
    """Remove the doubt about a rank that may be waiting for others, if its stack shows that it does not wait."""
    if cause.doubt is Doubt.MAY_WAIT and is_local_work(text):
        return replace(cause, doubt=None, suspects=())
    return cause
