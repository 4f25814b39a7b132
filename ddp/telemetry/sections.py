"""What a script reports about itself, for users and for hang detection, and what it asks for: `ddp.exclude_node`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from ddp.telemetry.coded import WrongValue
from ddp.telemetry.contracts import EXCLUDE_NODE, SCRATCH
from ddp.telemetry.status_page import CHECKPOINT, EVALUATION, SECTION, page


class _OfThread(threading.local):
    section: tuple[str, float, int] = ("", 0.0, 0)


_of_thread = _OfThread()
_EVALUATION = ("eval", "evaluation", "evaluate", "validation", "validate")


@contextmanager
def section(name: str, timeout: float | timedelta | None = None) -> Iterator[None]:
    """Mark a part of the script that is not a training step: `with ddp.section("eval", timeout=600): ...`.

    It also works as a decorator of a function. Inside the section, only its `timeout` (in seconds) decides when this
    rank counts as hung. Without `timeout`, the launcher's limit for sections applies, or its limit for evaluation if
    the name is "eval". Sections can be nested: the innermost one counts.
    """
    if not name:
        raise WrongValue('invalid section name "": empty. Give a name, for example ddp.section("eval")')
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout or 0)
    if not seconds >= 0 or (timeout is not None and not seconds):  # `not >=` rejects NaN as well
        raise WrongValue(
            f"invalid timeout {timeout!r} of section {name!r}: not a positive number of seconds. "
            "Leave it out for the launcher's own limit"
        )
    it = page()
    around = _of_thread.section
    before = it.phase(EVALUATION if name.lower() in _EVALUATION else SECTION)
    _of_thread.section = (name, seconds, it.section(name, seconds, 0))
    try:
        yield
    finally:
        _of_thread.section = around
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


def status(text: str, *, step: int | None = None, total: int | None = None) -> None:
    """Set a one-line status text for users.

    `step`: the script's own count of completed steps. `total`: how many steps it will have completed at its end; the
    launcher's progress line then shows the time that is left.
    """
    it = page()
    it.message(text)
    if step is not None:
        it.number(step)
    if total is not None:
        it.total(total)


def exclude_node(reason: str) -> None:
    """Ask to leave the node of this rank out of the job, for example because its GPU computes wrong numbers.

    If another node can take over, all ranks restart without this one, and no restart is counted. Otherwise the job
    continues with it, and the launcher says so. Return at once: raise an exception to end this rank. Without the
    launcher, this has no effect.
    """
    text = " ".join(str(reason).split())
    if not text:
        raise WrongValue('invalid reason "" in ddp.exclude_node: empty. Say what is wrong with the node')
    if (folder := os.environ.get(SCRATCH)) and (rank := os.environ.get("RANK")):
        written = f"{folder}/{EXCLUDE_NODE}.{os.getpid()}-{threading.get_ident()}"
        with suppress(OSError):  # the launcher is gone, or runs in another container
            with open(written, "w", encoding="utf-8", errors="replace") as file:
                file.write(f"rank {rank} asks to leave this node out: {text}")
            os.replace(written, f"{folder}/{EXCLUDE_NODE}")
