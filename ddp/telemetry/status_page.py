"""The status page of this rank: 4,096 bytes that the launcher can read at any time, even if the rank hangs or is dead.

The launcher names the page in DDP_STATUS_PAGE. The first process that opens it is its only writer, until it exits. Any
other process, for example a DataLoader worker or a tool that the script starts, gets a page that discards all writes.
So does a process that was started without the launcher, and one whose installation has no compiled writer. A child that
is forked from the writer writes nothing either.

A write takes about 0.1 us and makes no system call: the page is shared memory, and the clock is read through the vDSO.
`contracts.py` has the layout. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol, TypeVar

from .contracts import (
    BACKWARD,
    CHECKPOINT,
    COMMUNICATE,
    DATA,
    EVALUATION,
    EXITING,
    FORWARD,
    HEADER_BLOCK,
    IDLE,
    MAGIC,
    NATIVE,
    OPTIMIZER,
    SECTION,
    SIZE,
    STARTING,
    STATUS_PAGE,
    TRACE_COLLECTIVES,
    VERSION,
)

_compiled: ModuleType | None
try:
    from . import _page as _compiled
except ImportError:
    _compiled = None

T = TypeVar("T")

__all__ = [
    "BACKWARD",
    "CHECKPOINT",
    "COMMUNICATE",
    "DATA",
    "EVALUATION",
    "EXITING",
    "FORWARD",
    "IDLE",
    "OPTIMIZER",
    "SECTION",
    "STARTING",
    "Page",
    "page",
    "traces_collectives",
]


class Page(Protocol):
    """The writer's interface. `ddp.telemetry.collective_marks` calls `group`, `enter` and `leave`.

    Each thread has its own phase; the page shows the phase of the thread that trains (`_core/page.c`).
    """

    def phase(self, number: int, /) -> int:
        """Enter a phase; return the phase before."""

    def mark(self, number: int, /) -> int:
        """Enter a phase, unless the script has named the current one, by a section or as a checkpoint."""

    def back(self, before: int, /) -> None:
        """Return to the phase before mark(); `before` is the value that mark() returned."""

    def step(self) -> None:
        """Count a completed step. A second call counts only if part of a step has run since the first."""

    def number(self, steps: int, /) -> None:
        """Set the number of completed steps to the script's own count."""

    def repeats(self, steps: int, /) -> None:
        """The next steps, so many, were lost and are taken again."""

    def evaluates(self, yes: bool, /) -> None:
        """Begin or end an evaluation: gradients are off. The next backward pass ends it too."""

    def awaits(self) -> None:
        """The rest of the running backward pass waits for collectives."""

    def total(self, steps: int, /) -> None:
        """Note how many steps the script will take in all."""

    def buckets(self, of: int, launched: int, finished: int, /) -> None:
        """Set the counts of the running backward's buckets."""

    def group_timeout(self, timeout_s: float, /) -> None:
        """Note the timeout of a process group; the page keeps the longest one."""

    def group(self, name: str, size: int, members: str, /) -> int:
        """Add a process group; return its number for `enter`."""

    def enter(
        self,
        group: int,
        op: str,
        dtype: str,
        numel: int,
        shape: int,
        peer: int,
        is_async: int,
        sequence: int,
        /,
    ) -> int:
        """Start a collective; return its ticket.

        `sequence`: the number of this send or receive among those with this peer; 0 for all other collectives.
        """

    def leave(self, ticket: int, /) -> None:
        """End the collective with this ticket."""

    def forget(self) -> None:
        """The groups so far are gone: none of their collectives runs any more."""

    def section(self, name: str, timeout_s: float, since: int, /) -> int:
        """Start a named section, with a timeout (0: none) and a start time (0: now); return its start. "" ends it."""

    def message(self, text: str, /) -> None:
        """Show a status message to users."""

    def error(self, text: str, /) -> None:
        """Show an error to the launcher."""


class _DiscardingPage:
    """A page without a reader: every method does nothing and returns 0."""

    def _discard(self, *_arguments: Any) -> Any:
        return 0

    phase = mark = back = step = number = buckets = group_timeout = _discard
    evaluates = awaits = total = repeats = _discard
    group = enter = leave = forget = section = message = error = _discard


_opened: Page | None = None
_wishes = 0
_kept: dict[str, Any] = {}
# The launcher may have loaded this file before, under another name. Both copies share one page.
_first = sys.modules.setdefault("_ddp_status_page", sys.modules[__name__])


def page() -> Page:
    """The page of this process."""
    opened: Page = _first._opened or _first._open()
    return opened


def is_read() -> bool:
    """Whether this process writes to a page that the launcher reads."""
    return not isinstance(page(), _first._DiscardingPage)


def traces_collectives() -> bool:
    """Whether the launcher has enabled the tracing of collectives."""
    page()
    return bool(_first._wishes & TRACE_COLLECTIVES)


def once(what: str) -> bool:
    """Return True for the first call in this process, also if this module is imported under two names."""
    return kept(what) is None and keep(what, True)


def keep(what: str, value: T) -> T:
    """Keep an object of which this process must have only one, also if this module is imported under two names."""
    _first._kept[what] = value
    return value


def kept(what: str) -> Any:
    """Return the object that was kept under this name, or None."""
    return _first._kept.get(what)


def _open() -> Page:
    global _opened, _wishes
    _opened = _DiscardingPage()
    path = os.environ.get(STATUS_PAGE)
    if path and _compiled is not None and os.environ.get(NATIVE, "1") != "0":
        with contextlib.suppress(OSError):  # the launcher is gone, or runs in another container
            _opened = _claim(path, _compiled.Page) or _opened
    return _opened


def _claim(path: str, writer: Callable[[int], Page]) -> Page | None:
    """Become the writer of the page; return None if another process is. No descriptor stays open."""
    global _wishes
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        # Of two processes, only the first one becomes the writer.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        head = os.pread(file, HEADER_BLOCK.end, 0)
        if len(head) < HEADER_BLOCK.end:
            return None
        magic, version, size, wishes, pid, *_ = HEADER_BLOCK.packing.unpack(head)
        if (magic, version, size) != (MAGIC, VERSION, SIZE) or _has_other_writer(pid):
            return None
        _wishes = wishes
        return writer(file)
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # the mapping would keep the lock after the descriptor is closed
        os.close(file)


def _has_other_writer(pid: int) -> bool:
    if pid in (0, os.getpid()):  # our own id: this process has executed another program since
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
