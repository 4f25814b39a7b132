"""How long a replica may believe that its lease still stands, by its own clock alone.

etcd counts a lease's time from when it handled the last renewal, which is no earlier than when that renewal was
sent. So up to `ttl_s` after the sending the lease stands for certain, whatever became of the network since. A
little less is believed, because two clocks do not run at quite the same rate.
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

    def renewed(self, sent_at: float, answered_at: float, ttl_s: float) -> Lease | None:
        """None: over. An answer that comes after certainty ended does not bring it back: it was given up already."""
        if ttl_s <= 0.0 or not self.is_certain(answered_at):
            return None
        return Lease(self.id, ttl_s, sent_at)
