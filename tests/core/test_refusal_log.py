"""What is said of those who are refused, and how often."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from rendezvous.access.auth import Reason, Refusals
from rendezvous.metrics import Metrics

if TYPE_CHECKING:
    import pytest


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
