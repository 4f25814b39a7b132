"""The same cases with ours over shared memory, torch's over Gloo: some in every run, all of them nightly."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import compare
import pytest

if TYPE_CHECKING:
    from register import Case, Divergence

CASES, DIVERGENCES = compare.load_cases()
# One variant of each function in these: steps, graphs, uneven ends.
ALWAYS = ("cases_training", "cases_graphs", "cases_join")
# Half-precision numbers are summed in float32 and rounded once, where Gloo rounds with each rank.
ROUNDED_OFTENER_BY_GLOO = ("one_dtype-bf16", "one_dtype-fp16", "torchs_own-fp16", "torchs_own-bf16")
# A zero may have another sign; matrices lie elsewhere in memory, and BLAS adds them up in another order.
CLOSE_ENOUGH = ("mixed_dtypes-complex", "mixed_dtypes-double_complex", "torchs_own-power")
NAMES_ITS_BACKEND = ("logging_data",)


def over_shared_memory(case: Case, world_size: int) -> Case | None:
    """None: it cannot be the same."""
    if case.name in NAMES_ITS_BACKEND or (world_size > 2 and case.name.startswith(ROUNDED_OFTENER_BY_GLOO)):
        return None
    return replace(case, exact=False) if case.name.startswith(CLOSE_ENOUGH) else case


def parameters() -> list[object]:
    chosen, seen = [], set()
    for case in CASES:
        always = case.module in ALWAYS and case.function not in seen and not case.nightly
        seen.add(case.function)
        for size in case.world_sizes:
            if (here := over_shared_memory(case, size)) is not None:
                marks = [] if always and size == case.world_sizes[0] else [pytest.mark.nightly]
                chosen.append(pytest.param(here, size, id=f"{case.name}-{size}", marks=marks))
    return chosen


@pytest.mark.parametrize(("case", "world_size"), parameters())
def test_the_two_cannot_be_told_apart(case: Case, world_size: int) -> None:
    found = compare.compare(case, world_size, over="shm")
    assert not found, "\n".join(found[:12])


@pytest.mark.nightly(instead="::test_the_two_cannot_be_told_apart")
@pytest.mark.parametrize("divergence", DIVERGENCES, ids=[each.case.name for each in DIVERGENCES])
def test_we_promise_more(divergence: Divergence) -> None:
    ours, remarks = compare.outcome(divergence.case, compare.SECOND, "shm")
    assert ours <= set(divergence.ours), "\n".join(remarks)
    assert not [each for each in remarks if "nothing about" in each]
