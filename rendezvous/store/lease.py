"""How long a replica may believe that its lease still stands, by its own clock alone.

etcd counts a lease's time from when it handled the last renewal, which is no earlier than when that renewal was
sent. So up to `ttl_s` after the sending the lease stands for certain, whatever became of the network since. A
little less is believed, because two clocks do not run at quite the same rate.

After that it is in doubt, not over: etcd alone ends leases, and it ends none while it elects a leader (a new one
even prolongs them all). A renewal that etcd grants says that the lease, and what is owned under it, stood all along.
"""

from __future__ import annotations

from dataclasses import dataclass

_MARGIN = 0.1  # of the time to live


@dataclass(frozen=True, slots=True)
class Lease:
    id: int
    ttl_s: float
    proven_at: float  # when the renewal that etcd last confirmed was sent

    @property
    def certain_until(self) -> float:
        return self.proven_at + self.ttl_s * (1.0 - _MARGIN)

    @property
    def renewal_pause_s(self) -> float:
        """Three renewals fit before certainty ends."""
        return self.ttl_s / 4

    def is_certain(self, now: float) -> bool:
        return now < self.certain_until

    def renewed(self, sent_at: float, ttl_s: float) -> Lease | None:
        """None: over. An answer to an old question leaves it in doubt, perhaps, but does not end it."""
        return Lease(self.id, ttl_s, max(sent_at, self.proven_at)) if ttl_s > 0.0 else None
