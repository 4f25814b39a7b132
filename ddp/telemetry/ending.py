"""A rank that has done its work ends as it said it would, whatever threads torch has left behind.

A thread of Gloo that lets go of a tensor wants the GIL, and while the interpreter ends it would abort the process
(ddp/telemetry/_core/ending.c says how). So at the very end such threads are let through; who comes later waits for the
process to be gone; and groups stay as they are, for taking one apart would wait for its threads.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import time

try:
    from . import _ending as _compiled
except ImportError:  # no compiler where this was installed: torch's race stays what it is
    _compiled = None  # type: ignore[assignment]

_LET_THROUGH_S = 0.002


def arrange() -> None:
    """torch, hence C++, is loaded by then. Again is no harm."""
    # Python 3.14 lets such threads wait by itself.
    if _compiled is not None and sys.version_info < (3, 14) and not _compiled.outlive_threads():
        atexit.register(_let_threads_end)


def _let_threads_end() -> None:
    torch = sys.modules.get("torch.distributed.distributed_c10d")
    groups = list(torch._world.pg_map) if torch is not None else []
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    if torch is not None:
        time.sleep(_LET_THROUGH_S)  # without the GIL
