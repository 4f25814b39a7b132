"""The progress line: how far, how fast, and how long still."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp.telemetry import contracts
from launcher.health import page
from launcher.health.page import progress_in_words
from rendezvous.values.rank_view import Histogram, ProcessView, RankView, Totals

TRAINS = RankView(
    0, known=True, step=120, mean_step_s=0.25, step_s=0.1, totals=Totals(steps=Histogram((119,), 59.5))
)


def with_totals(**more: object) -> RankView:
    return replace(TRAINS, totals=replace(TRAINS.totals, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("views", "words"),
    [
        ([TRAINS], "step 120, 4 steps/s"),
        ([TRAINS, replace(TRAINS, step=118, mean_step_s=0.5)], "step 118, 2 steps/s"),  # the slowest
        ([TRAINS, replace(TRAINS, step=0)], ""),
        ([TRAINS, RankView(1)], "step 120, 4 steps/s"),  # a program without a page
        ([TRAINS, replace(TRAINS, step=3, process=ProcessView(alive=False))], "step 120, 4 steps/s"),
        ([replace(TRAINS, mean_step_s=0.0)], "step 120"),
        ([replace(TRAINS, mean_step_s=4.0)], "step 120, 4 s per step"),
        ([replace(TRAINS, step_s=75.0)], "step 120, no step for 1:15"),
        (
            [with_totals(total_steps=5000)],
            "step 120 of 5000, 4 steps/s, 40:40 left",
        ),  # 0.5 s each, on average
        ([with_totals(total_steps=50_000)], "step 120 of 50000, 4 steps/s, 6:55:40 left"),
        ([with_totals(total_steps=120)], "step 120 of 120, 4 steps/s"),
        ([], ""),
    ],
)
def test_in_words(views: list[RankView], words: str) -> None:
    assert progress_in_words(views) == words


@given(st.integers(0, 10**9))
def test_a_page_full_of_nonsense_has_words_too(seed: int) -> None:
    memory = random.Random(seed).randbytes(contracts.SIZE)
    seen = page.snapshot(lambda at, size: memory[at : at + size])
    assert progress_in_words([page.view(seen, 10**12, 3, ProcessView())]).isprintable()
