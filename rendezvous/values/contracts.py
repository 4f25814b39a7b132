"""What processes must agree on: both ends of a connection, and a command and whoever started it."""

from __future__ import annotations

from collections.abc import Iterable

# --- what processes agree on -----------------------------------------------------------------------

PROTOCOL = "rendezvous.v1"  # the package of the schema, and the first part of every path on the wire
PORT = 29400  # where a service listens unless it is configured otherwise
OWNER_METADATA = "rendezvous-owner"  # the address of the replica that decides about the job of a refused call
TIME_METADATA = (
    "rendezvous-time"  # the service's clock in seconds since the epoch; a client computes its own offset
)

# --- exit codes (docs/exit-codes.md) -----------------------------------------------------------------
#
# A job that failed ends with the code of the rank that failed first.

INVALID_USAGE = 2  # nothing was started
CANNOT_RUN = 71  # this node cannot run a rank
TRY_AGAIN = 75
NOT_ALLOWED = 77
UNUSABLE = 78  # options that disagree between nodes, or a credential
CRASH_LOOP = 79  # of --crash-loop: another start would fail in the same way, so do not requeue
CONDITION_MET = 123  # of --stop-when
NO_PROGRESS = 124  # as timeout(1)
INTERRUPTED = 130  # as Ctrl-C
READER_LEFT = 141  # as SIGPIPE
ENDED_BY_ORDER = 143  # as SIGTERM


# --- releases --------------------------------------------------------------------------------------
#
# The release of this installation, and how two releases that cannot understand each other are reported.
#
# A client sends its version with each call, and a refused call is answered with that of the service. No decision uses
# them: agents of one job compare the `version` of their `JobSpec`, and on the wire fields are only ever added.

VERSION = "0.2.0.dev0"
VERSION_METADATA = "ddp-launch-version"
_MOST_CHARS = 40
_KEPT = frozenset("0123456789.abcdefghijklmnopqrstuvwxyz+-")


def version_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The version of the other end; "" if it did not send one."""
    sent = next((str(value) for key, value in metadata or () if key == VERSION_METADATA), "")
    return "".join(char for char in sent if char in _KEPT)[:_MOST_CHARS]


def with_releases(words: str, service: str, client: str) -> str:
    """Add to the words of a refusal that the two ends are of different releases, and what to do."""
    if service == client:
        return words
    return (
        f"{words} (the service has {_release(service)}, the client has {_release(client)}: "
        "install the same release on both, on the service first)"
    )


def _release(version: str) -> str:
    return f"ddp-launch {version}" if version else "an unknown release of ddp-launch"
