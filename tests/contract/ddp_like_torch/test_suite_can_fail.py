"""The suite tells a faulty class from torch's, a dead rank from a wrong answer, and goes on after either."""

from __future__ import annotations

import compare
import pytest
import torch
from pool import RanksLost, Task, pool_of
from transcript import Transcript, differences, disagreements, frozen, same

CASES = {case.name: case for case in compare.load_cases()[0]}

FAULTS = {
    "AveragesNothing": "options-plain",
    "Sums": "one_dtype-fp32",
    "OffByTheLastBit": "options-plain",
    "DiffersByRank": "average_is_the_mean-plain",
    "LeavesBuffersAlone": "sent_before_each_forward-synced",
    "AlwaysViews": "a_view_cannot_be_detached-plain",
    "NeverViews": "a_view_cannot_be_detached-view",
    "SendsNoState": "state_of_rank_0_is_everybodys",
    "ForgivesUnused": "unused_without_the_flag-plain",
    "SyncsInNoSync": "accumulation_under_no_sync-second",
    "AnotherError": "refused-two_device_ids",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    assert compare.compare(CASES[FAULTS[fault]], 2, f"mutants:{fault}")


def test_torchs_class_is_like_itself() -> None:
    assert not compare.compare(CASES["options-plain"], 2, "torch")


@pytest.mark.parametrize("how", ["dies", "waits_for_ever"])
def test_a_lost_rank_costs_one_case(how: str) -> None:
    with pytest.raises(RanksLost, match=how):
        pool_of(2).run(Task("lost", how), timeout_s=5)
    assert not compare.compare(CASES["options-plain"], 2, "torch")


def test_an_error_in_one_rank_is_told() -> None:
    told = pool_of(2).run(Task("lost", "raises_on_one_rank"))
    assert [each.remarked("the case ended in") != "" for each in told] == [False, True]


def test_comparison_of_tensors() -> None:
    one = torch.tensor([1.0, 2.0])
    bit = torch.nextafter(one, one + 1)
    assert same(frozen(one), frozen(one.clone()), exact=True)
    assert not same(frozen(one), frozen(bit), exact=True)
    assert same(frozen(one), frozen(bit), exact=False)
    assert not same(frozen(one), frozen(one + 0.1), exact=False)
    assert not same(frozen(one), frozen(one.double()), exact=False)
    assert not same(frozen(torch.zeros(2, 3)), frozen(torch.zeros(3, 2).t()), exact=False)
    assert not same(frozen(one), frozen(one.to_sparse()), exact=False)
    assert not same(frozen(one), None, exact=False)
    for each in (
        torch.tensor(3.5),
        torch.zeros(0, 4),
        torch.ones(2, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
    ):
        assert torch.equal(frozen(each).thawed(), each)


def test_comparison_of_transcripts() -> None:
    def seen(*notes: tuple[str, object], alike: tuple[str, ...] = ()) -> Transcript:
        return Transcript(notes, frozenset(alike))

    assert not differences(seen(("a", 1)), seen(("a", 1)), exact=True)
    assert differences(seen(("a", 1)), seen(("a", 2)), exact=True)
    assert differences(seen(("a", 1)), seen(("a", True)), exact=True)
    assert differences(seen(("a", 1)), seen(("a", 1), ("b", 1)), exact=True)
    assert differences(seen(("a", 1), ("b", 1)), seen(("b", 1), ("a", 1)), exact=True)
    assert not disagreements([seen(("a", 1)), seen(("a", 2))])
    assert disagreements([seen(("a", 1), alike=("a",)), seen(("a", 2), alike=("a",))])
