"""Hypothesis draws models, bucket sizes and schedules; torch's DDP and ours must leave the same bits behind."""

from __future__ import annotations

import compare
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_models import Description, Piece
from register import Case

SETTINGS = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
    "database": None,
}
SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=3).map(tuple)


@st.composite
def descriptions(draw: st.DrawFn) -> Description:
    number = draw(st.integers(2, 9))
    pieces: list[Piece] = []
    for index in range(number):
        same = draw(st.none() | st.integers(0, index - 1)) if index else None
        root = same is not None and pieces[same].same_as is None
        shared = same if root and draw(st.booleans()) else None
        dtype = draw(st.sampled_from(["fp32", "fp32", "fp64", "bf16"]))
        pieces.append(Piece(draw(SHAPES), dtype, index == 0 or draw(st.integers(0, 3)) > 0, shared))
    steps = draw(st.integers(2, 4))
    # The first piece is trained and used in every step, so that there is something to go backward from.
    used = [(0, *draw(st.lists(st.integers(1, number - 1), max_size=6))) for _ in range(steps)]
    return Description(
        tuple(pieces),
        tuple(used),
        rank_differs=draw(st.booleans()) and all(len(each) > 1 for each in used),
        cap_mb=draw(st.sampled_from([0.00001, 0.00005, 0.0002, 1, 25])),
        as_view=draw(st.booleans()),
        set_to_none=draw(st.booleans()),
        synced=(*(draw(st.integers(0, 3)) > 0 for _ in range(steps - 1)), True),
    )


def check(about: Description, world_size: int) -> None:
    case = Case("random", "random_models", "train_described", (about,))
    found = compare.compare(case, world_size)
    assert not found, "\n".join(found[:8])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_random_models(world_size: int) -> None:
    @settings(max_examples=10, **SETTINGS)
    @given(descriptions())
    def run(about: Description) -> None:
        check(about, world_size)

    run()


@pytest.mark.nightly(instead="::test_random_models")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_many_random_models(world_size: int) -> None:
    @settings(max_examples=1500, **SETTINGS)
    @given(descriptions())
    def run(about: Description) -> None:
        check(about, world_size)

    run()
