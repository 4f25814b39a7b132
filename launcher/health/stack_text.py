"""What the interpreter wrote of its threads -> its main thread first; and does that one wait for others? Pure."""

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
    """The interpreter begins with its youngest thread, and gives none of them a name."""
    blocks = [block.strip("\n") for block in text.split("\n\n") if block.strip()]
    return "\n\n".join(reversed(blocks))


def is_own_business(text: str) -> bool:
    """The first thread of `text` is in code of the script, or in a library that talks to no other rank.

    Inside torch it may wait for others where we see nothing of it; so that proves nothing.
    """
    first = next((line for line in text.splitlines() if line.startswith("  ")), "")
    frame = _FRAME.match(first)
    return frame is not None and not any(library in frame["file"] for library in _LIBRARIES)


def known_better(cause: Cause, text: str) -> Cause:
    """A rank that may wait for others is certainly the culprit if its own stack shows that it does not."""
    if cause.doubt is Doubt.MAY_WAIT and is_own_business(text):
        return replace(cause, doubt=None, suspects=())
    return cause
