"""Keep the exit code of a rank that ends while threads of torch are still running.

A Gloo thread needs the GIL to release a tensor. If it asks for the GIL while the interpreter shuts down, Python aborts
the process (ddp/telemetry/_core/ending.c explains how). So the exit handler first waits 2 ms for such threads. A thread
that asks for the GIL after that blocks until the process has ended. Process groups are not destroyed, because their
destructors would wait for these threads.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import time

from . import torch_api

try:
    from . import _ending as _compiled
except ImportError:  # installed without a compiler: the race in torch remains
    _compiled = None  # type: ignore[assignment]

_GRACE_S = 0.002


def install() -> None:
    """Install the exit handlers.

    Call this after torch (and its C++ runtime) was loaded. A second call has no effect.
    """
    # From 3.14 on, Python itself makes such threads wait.
    if _compiled is not None and sys.version_info < (3, 14) and not _compiled.outlive_threads():
        atexit.register(_let_threads_end)


def _let_threads_end() -> None:
    for group in torch_api.groups():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    if torch_api.is_loaded():
        time.sleep(_GRACE_S)  # without the GIL
