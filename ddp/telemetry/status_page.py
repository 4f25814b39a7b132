"""The status page of this rank: 4096 bytes that the launcher reads when it likes, also when the rank hangs or is dead.

The launcher names the page in DDP_STATUS_PAGE. The first process that asks for it is its one writer, for as long as it
lives; everybody else, a loader's worker or a tool that the script starts, is given a page that swallows what is
written. So is a process that no launcher has started. A child that is forked from the writer writes nothing either.

A write costs about a tenth of a microsecond and calls nobody: the page is memory, the clock is read without the
kernel. docs/status-page.md says what lies where; nothing here knows torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from . import page_writer
from .page_writer import (
    BACKWARD,
    CHECKPOINT,
    COMMUNICATE,
    DATA,
    EVALUATION,
    EXITING,
    FORWARD,
    IDLE,
    OPTIMIZER,
    SECTION,
    STARTING,
)

_compiled: ModuleType | None
try:
    from . import _page as _compiled
except ImportError:
    _compiled = None

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

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

VARIABLE = "DDP_STATUS_PAGE"
SIZE = 4096
_MAGIC = b"ddp-page" + (1).to_bytes(4, sys.byteorder) + SIZE.to_bytes(4, sys.byteorder)
_WISHES, _PID = 16, 20  # what the launcher wants to see; who writes
_TRACE_COLLECTIVES = 1


class Page(Protocol):
    """What a rank can say. The calls of `enter` and `leave` are made by `ddp.telemetry.torch_marks`."""

    def phase(self, number: int, /) -> int:
        """What the rank does from now on; returns what it did before."""

    def mark(self, number: int, /) -> int:
        """The same, unless the script has named what it does: by a section, or as a checkpoint."""

    def back(self, before: int, /) -> None:
        """What mark() has begun is over; `before` is what it returned."""

    def step(self) -> None:
        """A step is over. The second call counts only if something has happened since the first."""

    def number(self, steps: int, /) -> None:
        """How many steps are over, as the script counts them."""

    def buckets(self, of: int, launched: int, finished: int, /) -> None:
        """Of the backward that is running."""

    def patience(self, timeout_s: float, /) -> None:
        """A process group waits so long for its ranks; the longest counts."""

    def group(self, name: str, size: int, members: str, /) -> int:
        """Announces a process group; returns its number for `enter`."""

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
        """A collective begins; returns its ticket. `sequence`: of a send or receive to this peer; 0 for all others."""

    def leave(self, ticket: int, /) -> None:
        """It is over."""

    def section(self, name: str, timeout_s: float, since: int, /) -> int:
        """A part of the script with a name and a budget (0: none), since when (0: now). "" ends it."""

    def say(self, text: str, /) -> None:
        """For people."""

    def error(self, text: str, /) -> None:
        """What went wrong, for the launcher."""


class _Swallowing:
    """Where nobody reads."""

    def phase(self, _number: int, /) -> int:
        return STARTING

    def mark(self, _number: int, /) -> int:
        return STARTING

    def back(self, _before: int, /) -> None:
        pass

    def step(self) -> None:
        pass

    def number(self, _steps: int, /) -> None:
        pass

    def buckets(self, _of: int, _launched: int, _finished: int, /) -> None:
        pass

    def patience(self, _timeout_s: float, /) -> None:
        pass

    def group(self, _name: str, _size: int, _members: str, /) -> int:
        return 0

    def enter(self, *_said: Any) -> int:
        return 0

    def leave(self, _ticket: int, /) -> None:
        pass

    def section(self, _name: str, _timeout_s: float, _since: int, /) -> int:
        return 0

    def say(self, _text: str, /) -> None:
        pass

    def error(self, _text: str, /) -> None:
        pass


_opened: Page | None = None
_wishes = 0
_kept: dict[str, Any] = {}
# The launcher's own start of a rank may have loaded this file before, under another name: there is one page.
_first = sys.modules.setdefault("_ddp_status_page", sys.modules[__name__])


def page() -> Page:
    """The page of this process."""
    opened: Page = _first._opened or _first._open()
    return opened


def is_read() -> bool:
    """Whether what this process writes gets anywhere."""
    return not isinstance(page(), _first._Swallowing)


def traces_collectives() -> bool:
    """Whether the launcher wants to see what is called of torch.distributed."""
    page()
    return bool(_first._wishes & _TRACE_COLLECTIVES)


def once(what: str) -> bool:
    """True the first time in this process, whichever of the files that are loaded twice asks."""
    return kept(what) is None and keep(what, True)


def keep(what: str, value: T) -> T:
    """For those who write here: what there must be one of in this process."""
    _first._kept[what] = value
    return value


def kept(what: str) -> Any:
    return _first._kept.get(what)


def _open() -> Page:
    global _opened, _wishes
    _opened = _Swallowing()
    path = os.environ.get(VARIABLE)
    if path:
        with contextlib.suppress(OSError):  # the launcher is gone, or in another container
            _opened = _claimed(path) or _opened
    return _opened


def _claimed(path: str) -> Page | None:
    """None where another process writes. No descriptor stays open."""
    global _wishes
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # who comes a moment too late is not the writer
        head = os.pread(file, _PID + 4, 0)
        if not head.startswith(_MAGIC) or _is_anothers(int.from_bytes(head[_PID:], sys.byteorder)):
            return None
        _wishes = int.from_bytes(head[_WISHES:_PID], sys.byteorder)
        return _writer()(file)
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # the mapping would keep it, also when the descriptor is closed
        os.close(file)


def _is_anothers(pid: int) -> bool:
    if pid in (0, os.getpid()):  # our own: this process has executed another program
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _writer() -> Callable[[int], Page]:
    compiled = _compiled if os.environ.get("DDP_NATIVE", "1") != "0" else None
    return page_writer.Page if compiled is None else compiled.Page
