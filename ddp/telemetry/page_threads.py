"""The threads that write the status page, and the one whose phase it shows: the rule of `_core/page.c`, in Python."""

from __future__ import annotations

import threading
import weakref

from .page_layout import BACKWARD, EXITING, IDLE, OPTIMIZER, STARTING


class Thread:
    """A thread that writes, with the phase that it is in."""

    def __init__(self) -> None:
        self.phase = IDLE
        self.trains = False  # it has begun a backward pass
        self.saves_step = 0  # finished steps when its checkpoint began


class Threads(threading.local):
    def __init__(self) -> None:
        self.own = Thread()


class ShownThread:
    """The page shows the thread that opened it, until another one trains while this one does not."""

    def __init__(self, opener: Thread) -> None:
        opener.phase = STARTING
        self._opener = self._shown = weakref.ref(opener)
        self._trains = False

    def shows(self, thread: Thread) -> bool:
        return self._shown() is thread

    def takes_over(self, thread: Thread, phase: int) -> bool:
        """Whether another thread than before is shown from now on, because it enters this phase."""
        part_of_training, other = phase in (BACKWARD, OPTIMIZER), self._shown()
        is_free = other is None or phase == EXITING or (part_of_training and not self._trains)
        may = is_free or part_of_training if thread is self._opener() else is_free and part_of_training
        if other is not thread and may:
            self._shown, self._trains = weakref.ref(thread), False
        if self.shows(thread):
            self._trains |= part_of_training
        return other is not thread and may
