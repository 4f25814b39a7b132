from __future__ import annotations

from rendezvous.store.lease import Lease


def test_certainty_counts_from_the_sending_and_ends_before_the_lease() -> None:
    lease = Lease(7, 2.0, proven_at=10.0)
    assert lease.is_certain(10.0)
    assert lease.is_certain(11.7)
    assert not lease.is_certain(11.9)
    assert not lease.is_certain(12.0)
    assert 3 * lease.renewal_pause_s < lease.certain_until - lease.proven_at


def test_a_renewal_moves_it_on() -> None:
    lease = Lease(7, 2.0, proven_at=10.0)
    later = lease.renewed(sent_at=11.0, answered_at=11.5, ttl_s=3.0)
    assert later == Lease(7, 3.0, proven_at=11.0)


def test_what_was_given_up_does_not_come_back() -> None:
    lease = Lease(7, 2.0, proven_at=10.0)
    assert lease.renewed(sent_at=11.0, answered_at=11.95, ttl_s=2.0) is None
    assert lease.renewed(sent_at=11.0, answered_at=11.1, ttl_s=0.0) is None
