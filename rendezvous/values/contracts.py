"""What processes must agree on: both ends of a connection, and a command and whoever started it."""

from __future__ import annotations

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
