"""Tokens: what was signed is what is granted, and nothing else passes."""

from __future__ import annotations

import asyncio
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rendezvous.access.auth import (
    BadToken,
    Denied,
    Grant,
    Identity,
    Key,
    Reason,
    Refusals,
    Right,
    Role,
    sign,
    verify,
)
from rendezvous.metrics import Metrics

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


# --- what is said of those who are refused, and how often ---------------------------------------------


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_flood_is_one_line_and_later_one_more_that_counts_it(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()

    async def story() -> None:
        refusals = Refusals(metrics, quiet_s=0.01)
        for _ in range(1000):
            refusals.note(Reason.BAD_TOKEN, "10.0.0.9", "no token")
        refusals.note(Reason.OTHER_JOB, "10.0.0.9", "another job")
        assert said(caplog) == ["refused 10.0.0.9: no token", "refused 10.0.0.9: another job"]
        while len(said(caplog)) < 3:  # noqa: ASYNC110  # a log tells nobody that it has grown
            await asyncio.sleep(0)
        refusals.note(Reason.BAD_TOKEN, "10.0.0.9", "no token")  # after the quiet, one line again

    with caplog.at_level(logging.INFO, "rendezvous"):
        asyncio.run(story())
    assert said(caplog)[2:] == [
        "refused 10.0.0.9 999 more times in the last 0.01 s: no token",
        "refused 10.0.0.9: no token",
    ]
    assert 'refused_total{reason="bad_token"} 1001' in metrics.text()
    assert 'refused_total{reason="other_job"} 1' in metrics.text()
    assert 'refused_total{reason="stream_aborted"} 0' in metrics.text()


def test_however_many_peers_there_are_the_lines_are_few(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        refusals = Refusals(Metrics())
        for i in range(10_000):
            refusals.note(Reason.NO_TOKEN, f"10.0.{i >> 8}.{i & 255}", "no token")

    with caplog.at_level(logging.INFO, "rendezvous"):
        asyncio.run(story())
    assert len(said(caplog)) == 33
    assert said(caplog)[-1] == "refused other clients: no token"


def test_a_token_gives_the_rights_of_its_role_for_its_jobs_only() -> None:
    holder = Identity("id1", GRANT)
    assert holder.may(Right.JOIN, "team-a-1")
    assert not holder.may(Right.JOIN, "team-b-1")
    assert not holder.may(Right.CONTROL, "team-a-1")
    with pytest.raises(Denied, match="not for job 'team-b-1'"):
        holder.require(Right.JOIN, "team-b-1")
    assert Identity("anyone").may(Right.CONTROL, "team-b-1")  # the service does not use tokens
