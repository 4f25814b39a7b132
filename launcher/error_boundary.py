"""The error boundary of diagnostics: it logs an error and returns a substitute for the result.

Stacks, dumps, health checks and pre-flight checks read data that ranks, drivers and the Linux kernel wrote. An error in
them must not end the agent, because that ends the job. Decisions do not run inside the boundary: an error in a decision
must be visible.
"""

from __future__ import annotations

import os
import traceback
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")
S = TypeVar("S")
_SHOWN_CHARS = 300


class ErrorBoundary:
    """`log` writes one line and can be called from any thread. The same error of a diagnostic is logged once."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log_line = log
        self._logged: set[tuple[str, str]] = set()

    async def awaited(self, what: str, work: Awaitable[T], otherwise: S) -> T | S:
        try:
            return await work
        except Exception as error:
            self._log(what, error)
            return otherwise

    def called(self, what: str, work: Callable[[], T], otherwise: S) -> T | S:
        try:
            return work()
        except Exception as error:
            self._log(what, error)
            return otherwise

    def _log(self, what: str, error: Exception) -> None:
        where = _where(error)
        if (what, where) not in self._logged:
            self._logged.add((what, where))
            text = " ".join(str(error).split())[:_SHOWN_CHARS]
            self._log_line(
                f"ddp-launch: {what} failed and was skipped ({type(error).__name__} at {where}: {text}); "
                "the job is not affected"
            )


def _where(error: Exception) -> str:
    """Return the innermost frame, because a bug report needs it."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "unknown"
