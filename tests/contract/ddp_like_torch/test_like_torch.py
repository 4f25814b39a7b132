"""Each case runs under torch's DDP and under ours, on the same ranks; what they saw must be the same."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import compare
import pytest

if TYPE_CHECKING:
    from register import Case, Divergence

CASES, DIVERGENCES = compare.load_cases()


def parameters() -> list[object]:
    """One variant of each function in the smallest world always, all of them in all worlds nightly."""
    chosen, seen = [], Counter[str]()
    for case in CASES:
        seen[case.function] += not case.nightly
        later = case.nightly or seen[case.function] > 1
        for size in case.world_sizes:
            marks = [pytest.mark.nightly] if later or size > min(case.world_sizes) else []
            chosen.append(pytest.param(case, size, id=f"{case.name}-{size}", marks=marks))
    return chosen


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
