"""`ddp.section` and `ddp.status`: what a script says of itself, for people and for whoever watches it for hangs."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from ddp.telemetry.status_page import CHECKPOINT, EVALUATION, SECTION, keep, kept, page

if TYPE_CHECKING:
    from collections.abc import Iterator

_EVALUATION = ("eval", "evaluation", "evaluate", "validation", "validate")


@contextmanager
def section(name: str, timeout: float | timedelta | None = None) -> Iterator[None]:
    """A part of the script that is no training step: `with ddp.section("eval", timeout=600): ...`, or over a function.

    Within it only its own `timeout` (seconds) says when this rank hangs; without one, what the launcher grants
    sections, or evaluation where it is called "eval". Sections may lie in each other: the innermost counts.
    """
    if not name:
        raise ValueError("a section needs a name")
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout or 0)
    if not seconds >= 0 or (timeout is not None and not seconds):  # not >=: no NaN either
        raise ValueError(f"the timeout of a section is a time, not {timeout!r}; leave it out for none")
    it = page()
    around: tuple[str, float, int] = kept("section") or ("", 0.0, 0)
    before = it.phase(EVALUATION if name.lower() in _EVALUATION else SECTION)
    keep("section", (name, seconds, it.section(name, seconds, 0)))
    try:
        yield
    finally:
        keep("section", around)
        it.section(*around)
        it.phase(before)


@contextmanager
def checkpointing() -> Iterator[None]:
    it = page()
    before = it.phase(CHECKPOINT)
    try:
        yield
    finally:
        it.phase(before)


def status(text: str, *, step: int | None = None) -> None:
    """Says what this rank is at, in a line for people; `step`: the number of steps done, as the script counts them."""
    it = page()
    it.say(text)
    if step is not None:
        it.number(step)
