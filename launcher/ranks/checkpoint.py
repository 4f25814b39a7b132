"""Asks the ranks of this node for a checkpoint, and learns when all have taken it: by files in the scratch folder.

The contract with the ranks. The file that `DDP_CHECKPOINT_REQUEST` names exists while a checkpoint is asked for, and
holds one line of JSON: {"reason": "...", "deadline_s": 30.0 or null}, counted from the file's time. A rank whose
checkpoint is complete makes the empty file `$DDP_CHECKPOINT_REQUEST.done.$RANK`, and goes on. When every rank that
still runs has, all these files go away, the question first, so that the next request is a new one: a rank that looks
for its answer, then for the question, never takes an old one for new.

Ranks of several nodes agree among themselves when to take it, so one may be through before its own node was asked:
what was taken just before the question counts.

A rank that looks for requests makes `$DDP_CHECKPOINT_REQUEST.watched.$RANK` first. Where one does not, a signal that
was not given this meaning by --checkpoint-signal keeps the one it always had.

The answers are looked for ten times a second, and only while a question is open; ranks answer when their checkpoint is
written, which takes longer than that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from typing import TYPE_CHECKING

from launcher.ranks.worker_env import request_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_LOOK_EVERY_S = 0.1
_JUST_BEFORE_S = 5.0


class CheckpointQuestion:
    """At most one is open. `ranks`: the global ranks of this node that still run."""

    def __init__(
        self, scratch: str, ranks: Callable[[], Iterable[int]], tell: Callable[[int, bool], None]
    ) -> None:
        """`tell` hears the generation, and whether all have taken it or time was up."""
        self._scratch, self._ranks, self._tell = scratch, ranks, tell
        self._loop = asyncio.get_running_loop()
        self._generation = -1
        self._asked_at = 0.0  # by the clock that files' times are of
        self._give_up_at: float | None = None
        self._timer: asyncio.Handle | None = None

    def ask(self, generation: int, reason: str, deadline_s: float | None) -> None:
        """Again, if one is open already: ranks then see the newer reason and deadline."""
        self._generation = generation
        if self._timer is None:
            self._asked_at = time.time()
            self._clear(lambda path: not self._counts(path))
        else:
            self._timer.cancel()
        self._give_up_at = None if deadline_s is None else self._loop.time() + deadline_s
        self._write(json.dumps({"reason": reason, "deadline_s": deadline_s}) + "\n")
        self._timer = self._loop.call_soon(self._look)

    def is_watched(self, generation: int) -> bool:
        """Whether there is anybody to ask, and all of them would answer."""
        path = request_file(self._scratch, generation)
        ranks = tuple(self._ranks())
        return bool(ranks) and all(os.path.exists(f"{path}.watched.{rank}") for rank in ranks)

    def withdraw(self) -> None:
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        self._clear(lambda _path: True)

    def _clear(self, due: Callable[[str], bool]) -> None:
        """The question first: a rank must not find it without its answer. What is not due was answered just before,
        to a question on another node."""
        name = os.path.basename(request_file(self._scratch, self._generation))
        with contextlib.suppress(OSError):
            for found in sorted(os.listdir(self._scratch)):
                path = os.path.join(self._scratch, found)
                if (found == name or found.startswith(f"{name}.done.")) and due(path):
                    os.unlink(path)

    def _write(self, text: str) -> None:
        """Whole or not at all. A folder that is full or gone leaves the question unasked: the deadline answers."""
        path = request_file(self._scratch, self._generation)
        with contextlib.suppress(OSError):
            with open(f"{path}.part", "w", encoding="utf-8") as file:
                file.write(text)
            os.rename(f"{path}.part", path)

    def _look(self) -> None:
        path = request_file(self._scratch, self._generation)
        if all(self._counts(f"{path}.done.{rank}") for rank in self._ranks()):
            self._over(taken=True)
        elif self._give_up_at is not None and self._loop.time() >= self._give_up_at:
            self._over(taken=False)
        else:
            self._timer = self._loop.call_later(_LOOK_EVERY_S, self._look)

    def _counts(self, answer: str) -> bool:
        try:
            return os.stat(answer).st_mtime >= self._asked_at - _JUST_BEFORE_S
        except OSError:
            return False

    def _over(self, taken: bool) -> None:
        generation = self._generation
        self.withdraw()
        self._tell(generation, taken)
