"""Tokens: what was signed is what is granted, and nothing else passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rendezvous.access.auth import BadToken, Grant, Key, Role, sign, verify

OLD, NEW = Key("k1", b"o" * 32), Key("k2", b"n" * 32)
GRANT = Grant("id1", "team-a-*", Role.AGENT, 1000.0)


@given(st.text(max_size=20), st.text(max_size=20), st.sampled_from(Role), st.floats(1.0, 1e12))
def test_what_is_signed_is_granted(grant_id: str, job: str, role: Role, until: float) -> None:
    grant = Grant(grant_id, job, role, until)
    assert verify(sign(grant, NEW), (OLD, NEW), 0.0) == grant


def test_every_key_of_the_file_verifies() -> None:
    assert verify(sign(GRANT, OLD), (OLD, NEW), 0.0) == GRANT
    with pytest.raises(BadToken, match="a key that this service does not have"):
        verify(sign(GRANT, OLD), (NEW,), 0.0)


def test_a_token_runs_out() -> None:
    assert verify(sign(GRANT, OLD), (OLD,), 999.0) == GRANT
    with pytest.raises(BadToken, match="the token expired 5 s ago"):
        verify(sign(GRANT, OLD), (OLD,), 1005.0)


@given(st.data())
def test_a_token_with_any_character_changed_is_no_token(data: st.DataObject) -> None:
    token = sign(GRANT, OLD)
    at = data.draw(st.integers(0, len(token) - 1))
    other = data.draw(st.characters(codec="ascii", categories=["L", "N"]).filter(lambda c: c != token[at]))
    changed = token[:at] + other + token[at + 1 :]
    with pytest.raises(BadToken):
        verify(changed, (OLD,), 0.0)


@given(st.text(max_size=200))
def test_nonsense_raises_bad_token_and_nothing_else(text: str) -> None:
    with pytest.raises(BadToken):
        verify(text, (OLD, NEW), 0.0)


def test_another_keys_signature_does_not_fit() -> None:
    with pytest.raises(BadToken, match="signed with another key"):
        verify(sign(GRANT, Key("k1", b"x" * 32)), (OLD,), 0.0)


def test_a_grant_covers_its_jobs_only() -> None:
    assert GRANT.covers("team-a-7")
    assert not GRANT.covers("team-b-7")
    assert not GRANT.covers("Team-A-7")


def test_a_grant_of_one_job_covers_its_preflight() -> None:
    one = Grant("g", "train", Role.AGENT, 1e9)
    assert one.covers("train.preflight")
    assert not one.covers("train.other")
    assert not one.covers(".preflight")
    assert "o" * 8 not in repr(OLD)
