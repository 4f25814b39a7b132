"""Whether a thread stays in a collective that nothing can end any more.

Gloo can forget an operation: if a connection fails while data is still to be sent over it, the thread that waits for
this is never told, and nothing but the timeout of the group ends its wait. A large message to a rank that dies is
enough. From outside the thread cannot be released.

Such a thread has two marks. Its innermost function in Python is one of torch's or ours that communicates. `show_waits`
gives `Work.wait` such a function: without it, the script's own function is the innermost one. And the thread does not
run at all: the kernel has not switched to it for `BLOCKED_S`. A thread that computes, that waits for the interpreter's
lock, or that looks at something at intervals, is switched to many times in a second.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
import time
from types import FrameType
from typing import Any

from . import status_page

BLOCKED_S = 2.0
_COMMUNICATES = re.compile(
    r"(torch\.(_ops|distributed|autograd|nn\.parallel)|ddp(_\w+)?\.(groups|reducer|averaging))(\.|$)"
)
_WRAPPERS = os.path.dirname(__file__)  # the launcher loads what wraps collectives under a name of its own
_SWITCHES = re.compile(r"^(?:non)?voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)


def show_waits() -> None:
    """Let a thread that waits for an asynchronous collective be in a function of ours. The marks do it, if they are on.

    The script calls `wait` itself. Without this, nothing tells its innermost function from one that reads a file.
    """
    import torch.distributed as dist

    if not dist.is_available() or status_page.kept("collectives") or not status_page.once("shown waits"):
        return
    work_class: Any = dist.Work
    original = work_class.wait

    # The name matters: by it torch sees that a class in Python has inherited this, and not defined it.
    @functools.wraps(original)
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        return original(work, *args, **kwargs)

    work_class.wait = wait


class BlockedThread:
    """Looks at the thread that makes it, from another one."""

    def __init__(self) -> None:
        self._ident, self._native_id = threading.get_ident(), threading.get_native_id()
        self._seen: tuple[str, int] | None = None
        self._since = 0.0

    def look(self) -> str:
        """Where the thread has been blocked for `BLOCKED_S`, as far as the calls of this tell; "" if it was not."""
        now, seen = time.monotonic(), self._where()
        if seen is None or seen != self._seen:
            self._seen, self._since = seen, now
            return ""
        return seen[0] if now - self._since >= BLOCKED_S else ""

    def forget(self) -> None:
        self._seen = None

    def _where(self) -> tuple[str, int] | None:
        """The function, and how often the kernel has switched to the thread or from it. None: it is not blocked."""
        frame = sys._current_frames().get(self._ident)
        if frame is None or not _communicates(frame):
            return None
        while _is_wrapper(frame) and frame.f_back is not None:
            frame = frame.f_back
        place = f"{frame.f_code.co_name} in {frame.f_globals.get('__name__')}"
        with contextlib.suppress(OSError), open(f"/proc/self/task/{self._native_id}/status") as file:
            status = file.read()
            if "\nState:\tS" in status:
                return place, sum(map(int, _SWITCHES.findall(status)))
        return None


def _communicates(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return bool(_COMMUNICATES.match(name)) or _is_wrapper(frame)


def _is_wrapper(frame: FrameType) -> bool:
    return os.path.dirname(frame.f_code.co_filename) == _WRAPPERS
