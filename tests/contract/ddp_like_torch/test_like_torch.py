"""Each case runs under torch's DDP and under ours, on the same ranks; what they saw must be the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import compare
import pytest

if TYPE_CHECKING:
    from register import Case, Divergence

CASES, DIVERGENCES = compare.load_cases()


def parameters() -> list[object]:
    """In the smallest world of each; random models train in larger ones, too."""
    return [
        pytest.param(
            case,
            size,
            id=f"{case.name}-{size}",
            marks=[pytest.mark.nightly] if case.nightly or size > min(case.world_sizes) else [],
        )
        for case in CASES
        for size in case.world_sizes
    ]


@pytest.mark.parametrize(("case", "world_size"), parameters())
def test_the_two_cannot_be_told_apart(case: Case, world_size: int) -> None:
    found = compare.compare(case, world_size)
    assert not found, "\n".join(found[:12])


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=[each.case.name for each in DIVERGENCES])
def test_we_promise_more(divergence: Divergence) -> None:
    """What torch does stands beside what we promise: when torch learns it, this says so."""
    if divergence.torch:  # else it would end the ranks
        torchs, _ = compare.outcome(divergence.case, "torch")
        assert torchs <= set(divergence.torch)
    ours, remarks = compare.outcome(divergence.case, compare.SECOND)
    assert ours <= set(divergence.ours), "\n".join(remarks)
    assert not [each for each in remarks if "nothing about" in each]
