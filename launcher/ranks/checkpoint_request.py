"""Requests a checkpoint from the ranks of this node with files, and detects when all ranks have taken it.

The contract with the ranks: the file that `DDP_CHECKPOINT_REQUEST` names exists while a request is open. It holds one
line of JSON: {"reason": "...", "deadline_s": 30.0 or null}. The deadline counts from the file's modification time. A
rank whose checkpoint is complete creates the empty file `$DDP_CHECKPOINT_REQUEST.done.$RANK`, and continues. When every
rank that still runs has done so, the agent removes all these files, the request first, so that the next request is a
new one. A rank must check its answer file before the request file. Then it cannot mistake an old request for a new one.

The ranks of several nodes agree among themselves when to take it. A rank may be done before its own node receives the
request, so an answer file that is up to 5 s older than the request is accepted.

A rank that watches for requests creates `$DDP_CHECKPOINT_REQUEST.watched.$RANK` first. The default checkpoint signals
request a checkpoint only if all ranks of the node have created this file. Otherwise they have their usual effect.

The agent looks for answers ten times a second, and only while a request is open. Ranks answer after their checkpoint is
written, which takes longer than that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable

from launcher.ranks.worker_env import request_file

_CHECK_EVERY_S = 0.1
_JUST_BEFORE_S = 5.0


class CheckpointRequester:
    """At most one open request. `ranks` returns the global ranks of this node that still run."""

    def __init__(
        self, scratch: str, ranks: Callable[[], Iterable[int]], report: Callable[[int, bool], None]
    ) -> None:
        """`report` receives the generation, and whether all ranks took the checkpoint (False: the deadline passed)."""
        self._scratch, self._ranks, self._report = scratch, ranks, report
        self._loop = asyncio.get_running_loop()
        self._generation = -1
        self._asked_at = 0.0  # in the time of the file system
        self._give_up_at: float | None = None
        self._timer: asyncio.Handle | None = None

    def ask(self, generation: int, reason: str, deadline_s: float | None) -> None:
        """Open a request, or replace the reason and deadline of the open one."""
        self._generation = generation
        if self._timer is None:
            self._asked_at = time.time()
            self._clear(lambda path: not self._counts(path))
        else:
            self._timer.cancel()
        self._give_up_at = None if deadline_s is None else self._loop.time() + deadline_s
        self._write(json.dumps({"reason": reason, "deadline_s": deadline_s}) + "\n")
        self._timer = self._loop.call_soon(self._check)

    def is_watched(self, generation: int) -> bool:
        """Return whether there are ranks to ask, and all of them would answer."""
        path = request_file(self._scratch, generation)
        ranks = tuple(self._ranks())
        return bool(ranks) and all(os.path.exists(f"{path}.watched.{rank}") for rank in ranks)

    @property
    def is_open(self) -> bool:
        return self._timer is not None

    def withdraw(self) -> None:
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        self._clear(lambda _path: True)

    def _clear(self, due: Callable[[str], bool]) -> None:
        """Remove the files that `due` accepts, the request first: a rank must not find it without its answer.

        Answers from shortly before the request are kept: they answer a request on another node.
        """
        name = os.path.basename(request_file(self._scratch, self._generation))
        with contextlib.suppress(OSError):
            for found in sorted(os.listdir(self._scratch)):
                path = os.path.join(self._scratch, found)
                if (found == name or found.startswith(f"{name}.done.")) and due(path):
                    os.unlink(path)

    def _write(self, text: str) -> None:
        """Write the whole file or nothing. If that fails, there is no error; the request ends at its deadline."""
        path = request_file(self._scratch, self._generation)
        with contextlib.suppress(OSError):
            with open(f"{path}.part", "w", encoding="utf-8") as file:
                file.write(text)
            os.rename(f"{path}.part", path)

    def _check(self) -> None:
        path = request_file(self._scratch, self._generation)
        if all(self._counts(f"{path}.done.{rank}") for rank in self._ranks()):
            self._over(taken=True)
        elif self._give_up_at is not None and self._loop.time() >= self._give_up_at:
            self._over(taken=False)
        else:
            self._timer = self._loop.call_later(_CHECK_EVERY_S, self._check)

    def _counts(self, answer: str) -> bool:
        try:
            return os.stat(answer).st_mtime >= self._asked_at - _JUST_BEFORE_S
        except OSError:
            return False

    def _over(self, taken: bool) -> None:
        generation = self._generation
        self.withdraw()
        self._report(generation, taken)
