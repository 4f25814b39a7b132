from __future__ import annotations

from ddp_launch_wings.etcd.owner import Lease


def test_certainty_counts_from_the_sending_and_ends_before_the_lease() -> None:
    lease = Lease(7, 2.0, proven_at=10.0)
    assert lease.is_certain(10.0)
    assert lease.is_certain(11.7)
    assert not lease.is_certain(11.9)
    assert not lease.is_certain(12.0)
    assert 3 * lease.renewal_pause_s < lease.certain_until - lease.proven_at


def test_a_renewal_moves_it_on_and_ends_a_doubt() -> None:
    lease = Lease(7, 2.0, proven_at=10.0)
    assert lease.renewed(sent_at=11.0, ttl_s=3.0) == Lease(7, 3.0, proven_at=11.0)
    assert not lease.is_certain(14.0)
    later = lease.renewed(sent_at=14.0, ttl_s=2.0)
    assert later is not None
    assert later.is_certain(14.5)


def test_an_answer_to_an_old_question_proves_no_more_than_is_known() -> None:
    lease = Lease(7, 2.0, proven_at=10.0)
    assert lease.renewed(sent_at=9.0, ttl_s=2.0) == lease


def test_what_etcd_has_ended_does_not_come_back() -> None:
    assert Lease(7, 2.0, proven_at=10.0).renewed(sent_at=11.0, ttl_s=0.0) is None
