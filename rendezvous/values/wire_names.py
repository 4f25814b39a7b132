"""Names and numbers that both ends of a connection must agree on."""

from __future__ import annotations

PROTOCOL = "rendezvous.v1"  # the package of the schema, and the first part of every path on the wire
PORT = 29400  # where a service listens unless it is configured otherwise
OWNER_METADATA = "rendezvous-owner"  # the address of the replica that decides about the job of a refused call
TIME_METADATA = (
    "rendezvous-time"  # the service's clock in seconds since the epoch; a client computes its own offset
)
