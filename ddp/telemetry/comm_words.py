"""An error of communication, in words: what was under way, and who is gone. Knows libraries by what they say."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .name_list import listed
from .peers import Peer

if TYPE_CHECKING:
    from .guard import Guard

# Of which every message about a peer, a link or a time limit has one; lower-cased.
_WORDS = (
    "gloo",
    "nccl",
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket closed",
    "timed out waiting",
    "wait timeout",
    "monitoredbarrier",
    "application timeout caused pair closure",
)
_NAMED_RANK = (
    re.compile(r"\brank (\d+)(?: on \S+)? (?:died|has left|has not joined)"),
    re.compile(r"lost its connection to rank (\d+)"),
    re.compile(r"\bRank (\d+) failed to pass monitoredBarrier"),
)
_ABORTED = "aborted the process group"  # on the launcher's order, whose reason is on its way to us as well
_LIMIT = re.compile(r"time(?:d )?out|has not joined|is not done after|failed to pass monitoredBarrier", re.I)


@dataclass(frozen=True, slots=True)
class Doing:
    """What was under way, as far as whoever waited for it knows."""

    collective: str = ""
    group: str = ""
    sequence: int | None = None
    bucket: int | None = None
    n_buckets: int = 0
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = self.collective or "a collective"
        if self.sequence is not None:
            said += f" #{self.sequence}"
        if self.group:
            said += f" of the group {self.group}"
        if self.bucket is not None:
            said += f" (bucket {self.bucket + 1} of {self.n_buckets}: {listed(self.parameters)})"
        return said


@dataclass(frozen=True, slots=True)
class Explanation:
    text: str
    cause: str
    peer: Peer | None


def is_of_communication(error: BaseException) -> bool:
    """Whether an error tells of a peer, a link or a time limit, and not of the script."""
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__):
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in words for word in _WORDS)


def explanation(error: BaseException, doing: Doing, watching: Guard) -> Explanation:
    """Found within moments, or not at all; the launcher is told."""
    text = str(error)
    reason = watching.awaited_reason()
    named_there = _named_rank(text, watching)
    # Whose time is over waited for somebody; who hung up meanwhile may have waited as well.
    peer = named_there if _LIMIT.search(text) else named_there or watching.peers.peer_in(text)
    if reason:
        told = Explanation(f"{doing} was broken off by the launcher: {reason}", reason, peer)
    elif _LIMIT.search(text):
        cause = f"{peer} has not come in time" if peer is not None else "its time limit is over"
        told = Explanation(f"{doing} has failed: {cause}", cause, peer)
    elif peer is not None and _ABORTED not in text:
        cause = f"{peer} is gone: it died, or left before the others"
        told = Explanation(f"{doing} has failed: {cause}", cause, peer)
    else:
        told = Explanation(f"{doing} has failed", first_line(text) or type(error).__name__, peer)
    watching.tell(told.text, str(doing), peer)
    return told


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _named_rank(text: str, watching: Guard) -> Peer | None:
    for pattern in _NAMED_RANK:
        if found := pattern.search(text):
            rank = int(found[1])
            return Peer(rank, watching.peers.host_of(rank))
    return None
