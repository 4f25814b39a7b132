"""The text of a communication error: which collective failed, and which peer has exited.

Libraries raise plain RuntimeErrors, so their messages are the only way to recognize these errors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .coded import listed
from .peers import Peer

if TYPE_CHECKING:
    from .guard import Guard

# Every message about a peer, a connection or a timeout contains one of these; lower case. The name of a backend is not
# enough: torch names it when it refuses an argument ("Cannot use ReduceOp.PREMUL_SUM with Gloo").
_PHRASES = (
    "gloo/transport",
    "gloo/rendezvous",
    "connectfullmesh failed",
    "distbackenderror",  # torch's reducer quotes the error of a group without its type
    "nccl error",
    "ncclremoteerror",
    "nccl communicator",
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket closed",
    "timed out waiting",
    "wait timeout",
    "monitoredbarrier",
    "application timeout caused pair closure",
)
# How backends refuse the arguments of a call: "ProcessGroupGloo::allgather: invalid tensor size at index 1".
_ARGUMENTS = re.compile(
    r"^(?:\[.*?\]:? )?ProcessGroup\w+::\w+: |MPI_ERR_(?:BUFFER|COUNT|TYPE|TAG|RANK|ROOT|OP|ARG|TRUNCATE)\b"
)
_NCCL_ARGUMENTS = re.compile(r"ncclInvalid(?:Usage|Argument)|NCCL error.*?invalid (?:usage|argument)", re.S)
# What NCCL reports of the rank itself, unless it goes on about a peer.
_OF_ITSELF = re.compile(r"(invalid usage|unhandled system error|unhandled cuda error|invalid argument)", re.I)
_OF_A_PEER = re.compile(r"remote|peer|connection|closed|reset", re.I)
_NAMED_RANK = (
    re.compile(r"\brank (\d+)(?: on \S+)? (?:died|has left|has not joined)"),
    re.compile(r"lost its connection to rank (\d+)"),
    re.compile(r"\bRank (\d+) failed to pass monitoredBarrier"),
)
_ABORTED = (
    "aborted the process group"  # by a peer, on the launcher's request; the same request is on its way here
)
_TIMEOUT = re.compile(
    r"time(?:d )?out|has not joined|did not complete within|failed to pass monitoredBarrier", re.I
)


@dataclass(frozen=True, slots=True)
class Operation:
    """What a rank was doing when the error was caught. Fields may be unknown."""

    collective: str = ""
    group: str = ""
    sequence: int | None = None
    bucket: int | None = None
    n_buckets: int = 0
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = self.collective or "a collective"
        if self.sequence is not None:
            text += f" #{self.sequence}"
        if self.group:
            text += f" of the group {self.group}"
        if self.bucket is not None:
            text += f" (bucket {self.bucket + 1} of {self.n_buckets}: {listed(self.parameters)})"
        return text


@dataclass(frozen=True, slots=True)
class Explanation:
    text: str
    cause: str
    peer: Peer | None


def is_communication_error(error: BaseException) -> bool:
    """Whether an error is about a peer, a connection or a timeout, and not about the script."""
    message = str(error)
    if not isinstance(error, RuntimeError) or _is_about_arguments(message):
        return False
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__):
        return True
    return any(phrase in message.lower() for phrase in _PHRASES) or _is_ours(message)


def is_fault_of_this_rank(error: BaseException) -> bool:
    """Whether an error of communication says what is wrong with this rank: its network card, its devices, its call."""
    message = str(error)
    found = "NCCL error" in message and _OF_ITSELF.search(message)
    return bool(found) and _OF_A_PEER.search(message) is None


def _is_about_arguments(message: str) -> bool:
    of_nccl = _NCCL_ARGUMENTS.search(message) and _OF_A_PEER.search(message) is None
    return bool(of_nccl or _ARGUMENTS.search(message))


def _is_ours(message: str) -> bool:
    """Whether it is an error of our own groups, which torch may have copied into another one."""
    return _ABORTED in message or any(pattern.search(message) for pattern in _NAMED_RANK)


def explain_failure(error: BaseException, doing: Operation, guard: Guard) -> Explanation:
    """Find the cause within a fraction of a second, and report it to the launcher."""
    text = str(error)
    reason = guard.wait_for_reason()
    named_rank = _find_named_rank(text, guard)
    # After a timeout a closed connection proves nothing: that peer may have waited for the missing rank as well.
    peer = named_rank if _TIMEOUT.search(text) else named_rank or guard.peers.peer_in(text)
    if reason:
        explanation = Explanation(f"{doing} was aborted by the launcher: {reason}", reason, peer)
    elif _TIMEOUT.search(text):
        cause = f"{peer} did not take part within the timeout" if peer is not None else "it timed out"
        explanation = Explanation(f"{doing} failed: {cause}", cause, peer)
    elif peer is not None and _ABORTED not in text:
        cause = f"{peer} has exited before the other ranks. See its log"
        explanation = Explanation(f"{doing} failed: {cause}", cause, peer)
    else:
        explanation = Explanation(f"{doing} failed", first_line(text) or type(error).__name__, peer)
    guard.report(explanation.text, str(doing), peer)
    return explanation


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _find_named_rank(text: str, guard: Guard) -> Peer | None:
    for pattern in _NAMED_RANK:
        if found := pattern.search(text):
            rank = int(found[1])
            return Peer(rank, guard.peers.host_of(rank))
    return None
