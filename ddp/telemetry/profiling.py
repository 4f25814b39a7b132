"""Records some steps of this rank with torch's profiler, when the launcher asks for it (`ddpctl profile`).

The guard's thread takes the request. The profiler starts and stops in the thread that trains, before an optimizer step,
because torch records the operators of the thread that has started it, with the backward pass that belongs to them. The
file is written by a thread of its own. An error ends the recording, and never the training.

Nothing here imports torch at load time: a script that does not import it has no steps.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# The launcher may have loaded this file before, under another name. Both copies share one recording.
_first: Any = sys.modules.setdefault("_ddp_profiling", sys.modules[__name__])
_open: _Recording | None = None


@dataclass(slots=True)
class _Recording:
    seconds: float
    path: str
    report: Callable[[str, int], None]  # why there is no trace ("" if there is), and how many steps it has
    profiler: Any = None
    until: float = 0.0
    steps: int = 0


def request(seconds: float, path: str, report: Callable[[str, int], None]) -> None:
    """Record from the next optimizer step on. For any thread."""
    if _first._open is not None:
        report("this rank is already being profiled", 0)
        return
    _first._open = _Recording(seconds, path, report)


def withdraw() -> None:
    """Forget a request that has not begun: its client has left."""
    if _first._open is not None and _first._open.profiler is None:
        _first._open = None


def at_step() -> None:
    """Called before each optimizer step, by the thread that trains."""
    recording: _Recording | None = _first._open
    if recording is None:
        return
    try:
        _advance(recording)
    except Exception as error:  # of torch's profiler, for example because the script profiles itself
        _first._open = None
        with contextlib.suppress(Exception):
            recording.report(f"{type(error).__name__}: {error}", 0)


def _advance(recording: _Recording) -> None:
    if recording.profiler is None:
        from torch.profiler import profile

        profiler = profile()
        profiler.start()
        recording.profiler, recording.until = profiler, time.monotonic() + recording.seconds
        return
    recording.steps += 1
    if time.monotonic() >= recording.until:
        recording.profiler.stop()
        _first._open = None
        threading.Thread(target=_write, args=(recording,), name="ddp-profile", daemon=True).start()


def _write(recording: _Recording) -> None:
    problem, partial = "", f"{recording.path}.partial.json.gz"  # the suffix selects the compression
    try:
        recording.profiler.export_chrome_trace(partial)
        os.replace(partial, recording.path)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    recording.report(problem, recording.steps)
