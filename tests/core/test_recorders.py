"""Flight recorders in the reports of ranks: on dumps that torch has written, and on what nobody should write."""

from __future__ import annotations

import json

from test_flight_recorder import RECORDED, entry, plain

from launcher.health.dumps import parsed
from launcher.health.flight_recorder import Dump, dump_of, with_members, with_recorded
from rendezvous.codec import encode
from rendezvous.values.rank_view import MAX_CALLS, MAX_GROUPS, GroupView, RankReport

NOW = 10**18


def of(dump: Dump) -> RankReport:
    (report,) = with_recorded((RankReport(dump.rank),), [dump], NOW)
    return report


def test_a_dump_of_torchs_tells_where_its_rank_is() -> None:
    """Three ranks over Gloo; the last has not entered the fourth all-reduce."""
    dumps = [parsed((RECORDED / f"behind.rank{rank}.pickle").read_bytes(), rank) for rank in range(3)]
    reports = with_recorded(tuple(map(RankReport, range(3))), dumps, NOW)
    assert [report.recorder[0].entered for report in reports] == [4, 4, 3]
    waits = [
        [(call.op, call.seq, call.dtype, call.numel) for call in s.recorded if call.finished_s is None]
        for s in reports
    ]
    assert waits == [[("all_reduce", 4, "float32", 10)]] * 2 + [[]]


def test_what_the_guard_says_of_its_groups_goes_along() -> None:
    told = with_members(dump_of(0, plain(entry(3))), {"0": (8, "0-7"), "another": (2, "0,1")})
    assert of(told).recorder == (GroupView("0", 8, "0-7", 3, 2),)


def test_a_rank_without_a_dump_stays_as_it_was() -> None:
    assert with_recorded((RankReport(1),), [dump_of(0, plain(entry(3)))], NOW) == (RankReport(1),)


def test_the_collectives_that_a_rank_waits_in_come_before_those_it_is_done_with() -> None:
    entries = [entry(seq, time_created_ns=seq, retired=seq != 2) for seq in range(1, 40)]
    report = of(dump_of(0, plain(*entries)))
    assert len(report.recorded) == MAX_CALLS
    assert [call.seq for call in report.recorded] == [2, *range(33, 40)]
    assert report.recorder[0].entered == 39


def test_the_groups_that_matter_are_told() -> None:
    many = [entry(1, process_group=(str(n), "g"), time_created_ns=n, retired=n != 3) for n in range(20)]
    names = [group.name for group in of(dump_of(0, plain(*many))).recorder]
    assert len(names) == MAX_GROUPS
    assert names[0] == "3"


def test_what_no_rank_should_write_can_be_sent_all_the_same() -> None:
    strange = entry(
        -5,
        op="x" * 5000,
        sizes=[[1 << 62, 1 << 62]],
        process_group=("g" * 5000, ""),
        input_dtypes=["F" * 5000],
        time_created_ns=-(1 << 62),
    )
    odd = of(dump_of(0, json.loads(json.dumps(plain(strange, entry(1 << 62, sizes=[[1 << 62]]))))))
    assert len(odd.recorded) == 2
    encode(odd)
