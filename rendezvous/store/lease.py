"""How long a replica can be certain that its lease is valid, by its own clock alone.

etcd counts the time of a lease from when it handled the last renewal, which is after the renewal was sent. So for
`ttl_s` after sending, the lease is certainly valid, even if the network has failed since. We use a little less, because
two clocks do not run at exactly the same rate.

After that time the lease may or may not be valid. Only etcd ends leases. It never ends them during a leader election,
and a new leader extends them. If etcd grants a renewal, the lease was valid all the time.
"""

from __future__ import annotations

from rendezvous.values.late_dataclass import dataclass

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
        """The interval between renewals, so that three of them fit into the time for which the lease is certain."""
        return self.ttl_s / 4

    def is_certain(self, now: float) -> bool:
        return now < self.certain_until

    def renewed(self, sent_at: float, ttl_s: float) -> Lease | None:
        """The lease after a renewal; None if it has ended. After a late answer it may be uncertain."""
        return Lease(self.id, ttl_s, max(sent_at, self.proven_at)) if ttl_s > 0.0 else None
