"""Handshakes that fail, as gRPC's core tells of them: nothing else does.

Theory of operation
-------------------
A connection that fails in its TLS handshake never comes to any code of ours: the core refuses it by itself, and says so
on standard error if it is asked to (GRPC_TRACE=handshaker). So standard error becomes a pipe: a thread reads it, takes
from the core's lines what it is after and drops them, and passes all others to where standard error led before. A
dozen lines for each connection is what it costs, and nothing on the way of the data. The words may change with gRPC: a
failure that is not understood counts as one of the handshake. Last words of a process that dies at once could be lost
in the pipe, so Python's own (faulthandler's) go to the real standard error.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote

from rendezvous.access.refusals import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

_OF_CORE = re.compile(rb"([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+\s+\d+ [\w.]+:\d+\] ")
_FAILED = re.compile(rb"CallNextHandshakerLocked: error=(?!OK )(.*)")
_MORE = re.compile(rb"=== Source Location Trace|src/core/| shutdown=|$")  # of a line that tells of an error
_PEER = re.compile(rb"endpoint_peer_address=(?:ipv[46]:)?([^,}]*)")
_SERVING = b"grpc.internal.server_credentials"  # not a connection that this process has opened
_LONGEST = 1 << 16
_PIPE_BYTES = 1 << 20

# In the core's words; the first that is found.
_MEANINGS = (
    (rb"PEER_DID_NOT_RETURN_A_CERTIFICATE", Reason.NO_CERTIFICATE, "it has no client certificate"),
    (
        rb"CERTIFICATE_VERIFY_FAILED.*expired",
        Reason.EXPIRED_CERTIFICATE,
        "its client certificate has expired",
    ),
    (
        rb"CERTIFICATE_VERIFY_FAILED",
        Reason.UNKNOWN_CERTIFICATE,
        "its client certificate was not signed by a CA of --client-ca",
    ),
    (rb"WRONG_VERSION_NUMBER|HTTP_REQUEST", Reason.PLAINTEXT, "it speaks without TLS to a port with TLS"),
    (
        rb"ALERT_(UNKNOWN_CA|BAD_CERTIFICATE|CERTIFICATE|UNSUPPORTED_CERTIFICATE)|BAD_PACKET_LENGTH",
        Reason.DISTRUSTED,
        "it does not trust the certificate of this service (--tls-cert); which CA was it given?",
    ),
    (
        rb"Socket closed|reset by peer",
        Reason.HUNG_UP,
        "it hung up during the TLS handshake: it does not trust the certificate of this service (which CA was it "
        "given?), or only tried whether the port is open",
    ),
)


@dataclass(frozen=True, slots=True)
class Failed:
    reason: Reason
    peer: str
    words: str


class CoreLines:
    """Tells the core's lines from all others, one after the other."""

    def __init__(self) -> None:
        self._error: bytes | None = (
            None  # of the core's latest record, whose further lines may follow; b"": none
        )

    def take(self, line: bytes) -> tuple[bool, Failed | None]:
        """Is it one for people? And the failed handshake that it tells of."""
        begins = _OF_CORE.match(line)
        if begins is not None:
            told = _FAILED.search(line)
            self._error = told[1] if told is not None else b""
            return begins[1] == b"F", self._understood(line)
        if self._error is None or not _MORE.match(line):
            self._error = None
            return True, None
        return False, self._understood(line)

    def _understood(self, line: bytes) -> Failed | None:
        """Once the line with the peer's address is there, which as a rule is a later one."""
        if not self._error or b" shutdown=" not in line or _SERVING not in line:
            return None
        error, self._error = self._error, b""
        peer = _PEER.search(line)
        reason, words = _meaning(error)
        return Failed(reason, _host(peer[1]) if peer is not None else "a client", words)


def _meaning(error: bytes) -> tuple[Reason, str]:
    for pattern, reason, words in _MEANINGS:
        if re.search(pattern, error):
            return reason, words
    said = error[:200].decode(errors="replace")
    return Reason.TLS_HANDSHAKE, f"the TLS handshake failed: {said}"


def _host(address: bytes) -> str:
    return unquote(address.decode(errors="replace")).rpartition(":")[0]


def ask_core() -> bool:
    """Before anything imports grpc. False: somebody asked for the core's log himself, and is to see all of it."""
    if os.environ.get("GRPC_VERBOSITY", "NONE") != "NONE" or "GRPC_TRACE" in os.environ:
        return False
    os.environ |= {"GRPC_VERBOSITY": "INFO", "GRPC_TRACE": "handshaker"}
    return True


def follow(tell: Callable[[Failed], None]) -> None:
    """`tell` hears of each failed handshake, in a thread of its own. For the rest of the process; once."""
    reader, writer = os.pipe()
    with contextlib.suppress(OSError):  # a thousand clients at once must not wait for our turn to read
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    before = os.dup(2)
    os.dup2(writer, 2)
    os.close(writer)
    # What Python writes needs no detour, and loses nothing at the end.
    sys.stderr = open(before, "w", buffering=1, errors="backslashreplace", closefd=False)
    faulthandler.enable(before)
    threading.Thread(target=_read, args=(reader, before, tell), name="core log", daemon=True).start()


def _read(reader: int, before: int, tell: Callable[[Failed], None]) -> None:
    rest, core = b"", CoreLines()
    while chunk := os.read(reader, _LONGEST):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _LONGEST:
            lines, rest = [*lines, rest], b""
        shown = []
        for line in lines:
            for_people, failed = core.take(line)
            if for_people:
                shown.append(line + b"\n")
            if failed is not None:
                tell(failed)
        if shown:
            with contextlib.suppress(OSError):
                os.write(before, b"".join(shown))
