"""The pure parts of the page: streams that catch up, figures over time, bodies of requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ddp_launch_wings.web.feed import point_view
from ddp_launch_wings.web.requests import Backlog, BadRequest, logs_request, order_request, wire
from rendezvous.rounds.event_log import TimePoint
from rendezvous.values.rank_time import CLASSES, JobTime, TimeSpent

REPLACING = frozenset({"job"})


def told(backlog: Backlog, last_id: str) -> list[tuple[str, Any]] | None:
    missed = backlog.since(last_id)
    return None if missed is None else [(each.kind, json.loads(each.text)) for each in missed]


def test_a_client_gets_what_it_has_missed() -> None:
    backlog = Backlog("a", REPLACING)
    for number in range(5):
        backlog.add("note", number)
    assert told(backlog, "a.3") == [("note", 3), ("note", 4)]
    assert told(backlog, "a.5") == []


def test_of_a_state_only_the_last_one_is_told() -> None:
    backlog = Backlog("a", REPLACING)
    backlog.add("job", "old")
    backlog.add("note", 1)
    backlog.add("job", "new")
    assert told(backlog, "a.0") == [("note", 1), ("job", "new")]
    assert told(backlog, "a.3") == []


@pytest.mark.parametrize("last_id", ["b.1", "a.7", "a.x", "a.", "", "a.-1", "a.²"])
def test_an_id_that_is_not_of_this_stream_is_a_gap(last_id: str) -> None:
    backlog = Backlog("a", REPLACING)
    backlog.add("note", 1)
    assert told(backlog, last_id) is None


def test_what_is_no_longer_kept_is_a_gap() -> None:
    backlog = Backlog("a", REPLACING, kept=3)
    for number in range(1, 6):
        backlog.add("note", number)
    assert told(backlog, "a.1") is None
    assert told(backlog, "a.2") == [("note", 3), ("note", 4), ("note", 5)]


def test_an_event_is_one_line_of_data() -> None:
    backlog = Backlog("a", REPLACING)
    text = wire(backlog.add("note", {"text": "two\nlines\r\n\u2028"}), backlog.name).decode()
    assert text.startswith("id: a.1\nevent: note\ndata: ")
    assert text.endswith("\n\n")
    assert text.count("\n") == 4


# --- requests ------------------------------------------------------------------------------------------------


def body(**fields: Any) -> bytes:
    return json.dumps({"job": "a", **fields}).encode()


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b"\xff",
        body(action="explode"),
        body(action="drain"),
        body(action="abort", node="n"),
        body(action="abort", reason="x" * 401),
        body(action="abort", reason=3),
        b'{"action": "abort"}',
    ],
)
def test_an_order_that_is_not_one_is_refused(bad: bytes) -> None:
    with pytest.raises(BadRequest):
        order_request(bad)


@pytest.mark.parametrize(
    "bad",
    [
        body(ranks="1"),
        body(ranks=[-1]),
        body(ranks=[True]),
        body(ranks=list(range(1001))),
        body(wait_s="1"),
        body(wait_s=1e9),
        body(tail=10**9),
        body(places=[[1, 2, "stdin", 3]]),
        body(places=[[1, 2, "stdout"]]),
        body(places=[[1, 2, "stdout", -3]]),
    ],
)
def test_a_question_for_output_that_is_not_one_is_refused(bad: bytes) -> None:
    with pytest.raises(BadRequest):
        logs_request(bad)


def test_a_point_has_all_classes_and_ends_with_the_hidden_communication() -> None:
    point = TimePoint(1.0, 1, 3.0, JobTime(2, TimeSpent(start=4.0, idle=8.0), hidden=2.5))
    assert point_view(point) == [1.0, 1, 2, 3.0, 4.0, *(0.0 for _ in CLASSES[2:]), 8.0, 2.5]


def test_requests_are_read() -> None:
    order = order_request(body(action="drain", node="n", reason=" fan "))
    assert (order.job, order.action, order.node, order.reason) == ("a", "drain", "n", "fan")
    logs = logs_request(body(ranks=[3], tail=10, places=[[1, 3, "stderr", 5]], wait_s=2))
    assert (logs.ranks, logs.tail, logs.places, logs.wait_s) == ((3,), 10, ((1, 3, "stderr", 5),), 2.0)
