"""Rank 0 leads the rounds in which commits are protected (`protector`).

A round needs no decision of the training: ranks that train at different speeds are at most two commits apart. If a rank
has already overwritten the commit that was named, the next round names one that is further ahead. If that one does not
come, because the training pauses or has ended, the round is given up, and the next one names the newest commit.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from ddp.elastic.peer_links import PeerError
from ddp.elastic.protector import Stopped

if TYPE_CHECKING:
    from ddp.elastic.peer_links import Words
    from ddp.elastic.protector import Protector

log = logging.getLogger("ddp.elastic")
_FURTHEST_AHEAD = 256
_PATIENCE = 3  # rounds that fail for the same reason before the log says so
_LONGEST_PAUSE_S = 30.0
_NOT_PROTECTED = (
    "ddp.elastic: commit %d is not protected against the loss of a node: %s. Training continues, and later commits "
    "will be tried. If a rank cannot be reached, check the firewall, or set GLOO_SOCKET_IFNAME to an interface that "
    "all nodes can reach. If there is no space, enlarge /dev/shm or use another redundancy"
)


class Leader:
    """Leads the rounds, in a thread of rank 0."""

    def __init__(self, protector: Protector) -> None:
        links = protector.links
        self._protector = protector
        self._peers = [links.peer(rank) for rank in range(len(links.ports))]
        self._ahead = 0
        self._decided: int | None = None  # a commit that is protected, and not all ranks know it
        self._done: int | None = None  # the last one of which all ranks know it
        self._failures: list[str] = []
        self._warned: set[str] = set()

    def start(self) -> None:
        threading.Thread(target=self._lead, name="ddp-protect", daemon=True).start()

    def _lead(self) -> None:
        try:
            while True:
                newest = self._protector.wait_for_commit(self._done)
                began = time.monotonic()
                try:
                    if self._decided is None:
                        self._decided = self._round(newest + self._ahead)
                    self._announce()
                except OSError as error:
                    self._failed(newest, error)
                    self._protector.wait(min(2.0 ** len(self._failures), _LONGEST_PAUSE_S))
                else:
                    self._failures.clear()
                    # A job that commits at each step must not spend all of its time on this.
                    self._protector.wait(min(time.monotonic() - began, _LONGEST_PAUSE_S))
        except Stopped:
            for each in self._peers:
                each.close()

    def _round(self, number: int) -> int | None:
        """Compute the parity of the first commit from this number on. Return its number.

        None: a rank had overwritten it, or nobody makes it now.
        """
        try:
            answers = self._ask_all({"do": "hold", "number": number})
            if any(each["missed"] is not None for each in answers):
                self._ask_all({"do": "give up", "number": number})
                self._ahead = min(max(1, 2 * self._ahead), _FURTHEST_AHEAD)
                return None
            self._ahead = max(0, self._ahead - 1)
            if (encoded := self._wait_until_encoded(number)) is None:
                self._ask_all({"do": "give up", "number": number})
                self._ahead = 0
            return encoded
        except OSError:
            self._give_up(number)
            raise

    def _announce(self) -> None:
        """Say that the commit is protected, until all know it: some may have released the one before."""
        if self._decided is not None:
            self._ask_all({"do": "protected", "number": self._decided})
            self._done, self._decided = self._decided, None

    def _wait_until_encoded(self, number: int) -> int | None:
        numbers: set[int] = set()
        for peer in self._peers:
            answer: Words = {"busy": True}
            while answer.get("busy"):
                answer = peer.ask({"do": "encoded", "number": 0})
                self._protector.wait(0)
                if answer.get("busy") and (self._protector.newest() or 0) < number:
                    return None
            if answer["problem"]:
                raise PeerError(f"rank {peer.rank}: {answer['problem']}")
            numbers.add(answer["number"])
        if len(numbers) > 1:
            raise PeerError(f"the ranks hold different commits: {sorted(numbers)}")
        return numbers.pop()

    def _ask_all(self, words: Words) -> list[Words]:
        try:
            for each in self._peers:
                each.send(words)
            return [each.receive() for each in self._peers]
        except OSError:
            for each in self._peers:
                each.close()  # replies may be under way
            raise

    def _give_up(self, number: int) -> None:
        for each in self._peers:
            try:
                each.ask({"do": "give up", "number": number})
            except OSError as error:
                log.debug("ddp.elastic: %s", error)

    def _failed(self, number: int, error: OSError) -> None:
        reason = error.strerror or str(error)
        self._failures.append(reason)
        log.info("ddp.elastic: commit %d was not protected: %s", number, reason)
        if len(self._failures) >= _PATIENCE and reason not in self._warned:
            self._warned.add(reason)
            log.warning(_NOT_PROTECTED, number, reason)
