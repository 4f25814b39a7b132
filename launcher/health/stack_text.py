"""Reorders the stacks written by faulthandler, and decides whether the main thread waits for other ranks."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.values.types import Doubt

if TYPE_CHECKING:
    from rendezvous.values.types import Cause

_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line \d+ in ')
_LIBRARIES = ("/torch/", "/ddp/")


def main_thread_first(text: str) -> str:
    """Put the main thread first: faulthandler prints the newest thread first, without thread names."""
    blocks = [block.strip("\n") for block in text.split("\n\n") if block.strip()]
    return "\n\n".join(reversed(blocks))


def is_local_work(text: str) -> bool:
    """Whether the first thread of `text` is in the script, or in a library that does not communicate with other ranks.

    A thread inside torch may be waiting in C++ code that the stack does not show, so it does not count.
    """
    first = next((line for line in text.splitlines() if line.startswith("  ")), "")
    frame = _FRAME.match(first)
    return frame is not None and not any(library in frame["file"] for library in _LIBRARIES)


def without_doubt(cause: Cause, text: str) -> Cause:
    """Remove the doubt about a rank that may be waiting for others, if its stack shows that it does not wait."""
    if cause.doubt is Doubt.MAY_WAIT and is_local_work(text):
        return replace(cause, doubt=None, suspects=())
    return cause
