"""Begin the loop of a script again in the same process, after another rank has failed.

Theory of operation
-------------------
A failed rank breaks the collectives of all others, or the launcher aborts them. The error unwinds the script's loop up
to `run`, which is outside of all collectives. There the process *parks*: it waits for the launcher, which stops the
generation everywhere and starts the next one. The launcher sends the environment of the next generation instead of
starting a new process. Then the process groups are formed anew, the state is resumed, and the loop is called again.

An error parks the process in two cases: the launcher has already paused it, or the error is one of communication and
the launcher pauses it within `PAUSE_WITHIN_S`. Any other error is an error of the script, which ends the rank. If the
launcher has paused the process, an error of the script at the same moment is raised again in the repeated step.

A process that cannot go on (`CannotReform`) ends, and the launcher restarts all ranks. The script has no error then.
So the process says why in one line, and ends as by `sys.exit`. A traceback would show only frames of this library, once
per rank.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING, TypeVar

from ddp.groups import reform
from ddp.telemetry import blocked_thread, guard, status_page
from ddp.telemetry.comm_words import is_communication_error, is_fault_of_this_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

# Longer than the lease of an agent: a node that falls silent is noticed only when its lease expires.
PAUSE_WITHIN_S = 15.0


def _nothing() -> None:
    pass


def run(attempt: Callable[[], T], meanwhile: Callable[[], None] = _nothing) -> T:
    """Call `attempt` until it returns: again in each generation in which this process goes on.

    `meanwhile` is called before that, outside of all groups: other processes are just being started.
    """
    watcher = guard.start()
    blocked_thread.show_waits()
    watcher.heals(True)
    is_first = True
    try:
        while True:
            try:
                if not is_first:
                    meanwhile()
                    reform.reform()
                return attempt()
            except reform.CannotReform as error:
                watcher.cannot_heal(str(error))
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
                raise SystemExit(1) from error
            except Exception as error:
                if not _is_paused_after(error, watcher):
                    raise
                _release_frames(error)
            order = watcher.park()
            _start_anew()
            os.environ.update(order.environment)
            watcher.go_on()
            is_first = False
    finally:
        watcher.heals(False)


def _start_anew() -> None:
    """On the status page: until the first part of the repeated step, this process starts as the new ranks do.

    It waits for them most of that time, and repeats nothing.
    """
    page = status_page.page()
    page.phase(status_page.STARTING)
    page.phase(status_page.IDLE)


def _is_paused_after(error: Exception, watcher: guard.Guard) -> bool:
    return watcher.will_pause(PAUSE_WITHIN_S if _is_about_communication(error) else 0.0)


def _is_about_communication(error: BaseException) -> bool:
    """Whether the error, or one that led to it, is a collective that failed because of another rank."""
    chain = list(_chain(error))
    return any(map(is_communication_error, chain)) and not any(map(is_fault_of_this_rank, chain))


def _release_frames(error: BaseException) -> None:
    """Free what the frames of the interrupted loop hold: batches, activations, workers of data loaders."""
    for each in _chain(error):
        traceback.clear_frames(each.__traceback__)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
