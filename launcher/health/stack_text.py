"""What stacks of a rank show: whether its main thread waits for other ranks; and the stacks without our own code."""

from __future__ import annotations

import re
from dataclasses import replace

from rendezvous.values.types import Cause, Doubt

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


_OUR_FILES = re.compile(r"/(?:ddp/telemetry|launcher/template)/[a-z_/]+\.py$")
_LIBRARY = re.compile(r"/lib/python[\d.]+/(?!site-packages|dist-packages)|^<frozen ")
_THREAD = re.compile(r"Thread (\d+) |thread (\d+) \(")


def without_ours(text: str) -> str:
    """For people: without our frames, and without threads that run nothing but our code, also in the kernel's list."""
    kept: list[str] = []
    ours: set[str] = set()
    for part in text.split("\n\n"):
        if (found := _THREAD.match(part)) and found[1] and _is_ours(part):
            ours.add(found[1])
        elif found is not None and found[2]:
            kept.append(_without_threads(part, ours))
        else:
            kept.append("\n".join(line for line in part.split("\n") if not _is_our_frame(line)))
    return "\n\n".join(part for part in kept if part)


def _is_our_frame(line: str) -> bool:
    frame = _FRAME.match(line)
    return frame is not None and _OUR_FILES.search(frame["file"]) is not None


def _is_ours(thread: str) -> bool:
    """Whether all frames but those of Python's library are ours, and there are some."""
    frames = [
        line
        for line in thread.split("\n")
        if (found := _FRAME.match(line)) and not _LIBRARY.search(found["file"])
    ]
    return bool(frames) and all(map(_is_our_frame, frames))


def _without_threads(kernel: str, numbers: set[str]) -> str:
    kept, is_left_out = [], False
    for line in kernel.split("\n"):
        if found := _THREAD.match(line):
            is_left_out = found[2] in numbers
        if not is_left_out:
            kept.append(line)
    return "\n".join(kept)


def without_doubt(cause: Cause, text: str) -> Cause:
    """Remove the doubt about a rank that may be waiting for others, if its stack shows that it does not wait."""
    if cause.doubt is Doubt.MAY_WAIT and is_local_work(text):
        return replace(cause, doubt=None, suspects=())
    return cause
