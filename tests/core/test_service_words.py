"""The pure parts of the service: what is said again, what is noted, what is bounded, what is shortened."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rendezvous.access.secret import NAME
from rendezvous.client.credential_files import OptionsUnusable, client_options
from rendezvous.machine import step
from rendezvous.rounds.admission import join_problem
from rendezvous.rounds.event_log import lines
from rendezvous.rounds.sealing import ENDED_BYTES, fitted
from rendezvous.rounds.snapshot import SnapshotUnreadable, decode_state, encode_state
from rendezvous.rounds.view import view_of
from rendezvous.service.agent_stream import Allowance, Counts, LimitReached, Rates
from rendezvous.service.operations import reason_text
from rendezvous.session_replay import SessionReplay
from rendezvous.values.events import (
    AgentHeard,
    AgentJoined,
    AgentLeft,
    AgentStopped,
    Assigned,
    CheckpointTaken,
    DeadlineReached,
    Ended,
    Event,
    JobAborted,
    NodeDrained,
    RankFailed,
    RanksFinished,
    RefusalKind,
    Refused,
    Stop,
    StoreAt,
    StoreOpened,
    Tell,
)
from rendezvous.values.job_state import JobState
from rendezvous.values.types import (
    AgentId,
    Assignment,
    Cause,
    Decision,
    DecisionKind,
    FailureClass,
    JobSpec,
    NodeFacts,
    Outcome,
    RestartBudget,
    StoreAddress,
)

A = AgentId("a", "1")
SPEC = JobSpec("job", 1, 1, budget=RestartBudget(1))
FACTS = NodeFacts("a", "10.0.0.1", 2)
JOIN = AgentJoined(A, SPEC, FACTS)
CAUSE = Cause(
    "a", 0, 0, FailureClass.USER_EXCEPTION, "ValueError: no", 1, traceback="Traceback ...", ran_s=9.0
)
STOP = Stop(1, Decision(DecisionKind.RESTART, "because", 1))


def assigned(generation: int) -> Assigned:
    return Assigned(Assignment(generation, 0, 1, 0, 2, 2, "default", 0, 2, 0, 0, "10.0.0.1"))


def in_generation(generation: int, *, runs: bool) -> AgentJoined:
    place = assigned(generation).assignment if runs else None
    return replace(JOIN, generation=generation, running=place)


# --- what is said again ------------------------------------------------------------------------------------


def test_the_join_comes_first_then_the_reports_of_the_present_generation() -> None:
    opened = StoreOpened(A, 1, StoreAddress("a", 1))
    replay = SessionReplay().sent(JOIN).received(assigned(1)).sent(opened).sent(RankFailed(A, 1, CAUSE))
    reports = (opened, RankFailed(A, 1, CAUSE))
    assert replay.messages() == (in_generation(1, runs=True), *reports)
    assert replay.received(assigned(1)).received(STOP).messages() == (in_generation(1, runs=False), *reports)
    assert replay.received(assigned(2)).messages() == (in_generation(2, runs=True),)


def test_where_it_stands_told_again_asks_for_the_reports() -> None:
    """From a service that has lost the job's state, and did not take them when they came."""
    replay = SessionReplay().sent(JOIN).received(assigned(1)).sent(RanksFinished(A, 1))
    for again in (assigned(1), StoreAt(1, StoreAddress("a", 1))):
        assert replay.reports_for(again) == (RanksFinished(A, 1),)
    assert replay.reports_for(assigned(2)) == ()


def test_the_answer_to_a_stop_is_kept_until_the_next_generation() -> None:
    replay = SessionReplay().sent(JOIN).received(assigned(1)).received(STOP).sent(AgentStopped(A, 1))
    assert replay.messages() == (in_generation(1, runs=False), AgentStopped(A, 1))


def test_passing_moments_are_not_said_again() -> None:
    replay = SessionReplay().sent(JOIN).received(assigned(1)).sent(AgentHeard(A)).sent(CheckpointTaken(A, 1))
    assert replay.messages() == (in_generation(1, runs=True),)


def test_who_was_given_up_begins_anew_and_who_left_says_so_last() -> None:
    replay = SessionReplay().sent(JOIN).received(assigned(1)).sent(RanksFinished(A, 1))
    assert replay.received(Refused("given up", 75, retryable=True)).messages() == (
        in_generation(1, runs=False),
    )
    left = replay.sent(AgentLeft(A, "bye"))
    assert left.messages() == (in_generation(1, runs=True), RanksFinished(A, 1), AgentLeft(A, "bye"))


def test_the_last_words_of_an_older_generation_take_nothing_from_the_present_one() -> None:
    """The order to stop was lost on its way: ranks of the older one are still reaped when the newer is assigned."""
    present = SessionReplay().sent(JOIN).received(assigned(2))
    assert present.sent(AgentStopped(A, 1)).messages() == present.messages()


def test_nothing_is_said_before_the_join() -> None:
    assert SessionReplay().sent(RanksFinished(A, 1)).messages() == ()


# --- what is noted -----------------------------------------------------------------------------------------


def told(*events: Event) -> tuple[list[tuple[str, str]], JobState]:
    state, found = JobState(), []
    for at, event in enumerate(events):
        after, _ = step(state, event, float(at))
        found += [(line.kind, line.text) for line in lines(event, state, after)]
        state = after
    return found, state


def test_a_life_in_lines() -> None:
    found, state = told(
        JOIN,
        AgentHeard(A),
        StoreOpened(A, 1, StoreAddress("10.0.0.1", 1)),
        RankFailed(A, 1, CAUSE),
        AgentStopped(A, 1),
        AgentJoined(AgentId("b", "1"), SPEC, NodeFacts("b", "10.0.0.2", 2)),
        NodeDrained("b", "disk"),
        JobAborted("enough"),
        AgentStopped(A, 2),
    )
    assert [kind for kind, _ in found] == [
        *("joined", "sealed", "running", "decision", "stopping", "stopped", "sealed", "joined", "excluded"),
        *("decision", "stopping", "stopped", "ended"),
    ]
    assert ("sealed", "generation 1: 2 ranks on 1 node") in found
    assert ("decision", "fail: aborted by an operator: enough") in found
    view = view_of("job", state, 9.0)
    assert view.summary.reason == "aborted by an operator: enough"
    assert [node.node for node in view.nodes] == ["a", "b"]
    assert decode_state(encode_state(state)) == state


@pytest.mark.parametrize(
    ("words", "who", "shown"),
    [
        ("enough", "token ann", "enough (ordered by token ann)"),
        ("x (ordered by token bob)", "token ann", "x (ordered by token bob) (ordered by token ann)"),
        ("", "token ann", "no reason given (ordered by token ann)"),
        ("", "a user of this machine", "no reason given (ordered by a user of this machine)"),
        ("", f"certificate {NAME}", "no reason given (ordered by a holder of the job secret)"),
        ("", "certificate ann", "no reason given (ordered by certificate ann)"),
    ],
)
def test_an_order_says_last_who_gave_it(words: str, who: str, shown: str) -> None:
    assert reason_text(words, who) == shown


def test_who_is_given_up_for_what_it_did_not_do_hears_of_that() -> None:
    """It is a member no more, so these words are all that it learns of the outcome."""
    spec = replace(SPEC, min_nodes=2, max_nodes=2, budget=RestartBudget(0))
    state, _ = step(JobState(), replace(JOIN, spec=spec), 0.0)
    other = AgentId("b", "1")
    state, _ = step(state, replace(JOIN, agent=other, spec=spec), 0.0)
    for each in (A, other):
        state, _ = step(state, AgentHeard(each), 600.0)
    lost, _ = step(state, DeadlineReached(), 600.0)
    after, _ = step(lost, AgentStopped(other, 1), 600.5)
    (answer,) = [e.message for e in step(after, AgentHeard(A), 601.0)[1] if isinstance(e, Tell)]
    assert isinstance(answer, Refused)
    ended = (
        "node a did not open its TCPStore within 600 s (see the log of its agent); "
        "no restarts are allowed (--max-restarts 0)"
    )
    assert answer.kind is RefusalKind.JOB_OVER
    assert ended in answer.reason
    noted = [(line.kind, line.text) for line in lines(DeadlineReached(), state, lost)]
    assert ("lost", "node a did not open its TCPStore within 600 s (see the log of its agent)") in noted
    noted = [(line.kind, line.text) for line in lines(AgentStopped(other, 1), lost, after)]
    assert ("ended", ended) in noted


@pytest.mark.parametrize("token", ["two\nlines", "gr\u00fcn", "a b", "\x7f"])
def test_what_cannot_be_a_token_is_told_before_it_is_sent(token: str) -> None:
    with pytest.raises(OptionsUnusable, match="invalid token in DDP_RENDEZVOUS_TOKEN"):
        client_options({"DDP_RENDEZVOUS_TOKEN": token})
    assert client_options({"DDP_RENDEZVOUS_TOKEN": "k.p.s\n"}).token == "k.p.s"


@pytest.mark.parametrize(
    ("said", "meant"),
    [("", False), ("0", False), ("off", False), ("False", False), ("1", True), ("TRUE", True)],
)
def test_what_says_no_switches_no_protection_off(said: str, meant: bool) -> None:
    assert client_options({"DDP_RENDEZVOUS_INSECURE": said}).insecure is meant


def test_what_says_neither_yes_nor_no_is_refused() -> None:
    for name in ("INSECURE", "TLS"):
        with pytest.raises(OptionsUnusable, match=f"invalid DDP_RENDEZVOUS_{name} 'perhaps'"):
            client_options({f"DDP_RENDEZVOUS_{name}": "perhaps"})


# --- what is kept ------------------------------------------------------------------------------------------


@given(st.binary(max_size=60))
def test_bytes_that_are_no_snapshot_are_refused_in_words(data: bytes) -> None:
    good = encode_state(JobState())
    for broken in (data, good[:-3], good[: len(good) // 2] + data, b"ddp-job 2\n" + data):
        if broken != good:
            with pytest.raises(SnapshotUnreadable):
                decode_state(broken)


def test_a_snapshot_of_another_format_is_refused_and_both_formats_are_named() -> None:
    other = encode_state(JobState()).replace(b"ddp-job 2\n", b"ddp-job 1\n")
    with pytest.raises(SnapshotUnreadable, match=r"format 1\b.*format 2\b"):
        decode_state(other)


# --- what is bounded ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"lease_s": 0.0}, "the lease is 0:"),
        ({"min_nodes": 0}, "--nnodes 0:1"),
        ({"max_nodes": 10**6}, "--nnodes 1:1000000"),
        ({"budget": RestartBudget(-1)}, "--max-restarts is -1"),
        ({"budget": RestartBudget(1, 0.0)}, "the window of --max-restarts is 0"),
        ({"job_id": "x" * 129}, "the job id (--rdzv-id) has 129 characters"),
        ({"job_id": "a\x1b[31m"}, "control characters"),
    ],
)
def test_what_a_spec_may_not_ask_for(changed: dict[str, object], words: str) -> None:
    assert join_problem(A, SPEC, FACTS) == ""
    assert words in join_problem(A, replace(SPEC, **changed), FACTS)  # type: ignore[arg-type]


def test_what_a_node_may_not_bring() -> None:
    assert "--nproc-per-node 0" in join_problem(A, SPEC, replace(FACTS, nproc=0))
    assert "the node name has 0" in join_problem(AgentId("", "1"), SPEC, FACTS)


def test_an_allowance_fills_up_again() -> None:
    allowance = Allowance(10.0, 5.0, at=0.0)
    assert [allowance.take(0.0) for _ in range(5)] == [0.0] * 5
    assert allowance.take(0.0) == pytest.approx(0.1)
    assert allowance.take(0.0) == pytest.approx(0.2)
    assert allowance.take(0.3) == 0.0
    assert allowance.is_full(1.0)


def test_rates_forget_who_has_been_quiet() -> None:
    rates = Rates(1.0, 1)
    for i in range(Rates._KEPT + 1):
        assert rates.take(f"someone {i}", 10.0 * i) == 0.0
    assert len(rates._known) <= 2


def test_counts_are_per_identity_and_overall() -> None:
    counts = Counts("streams", 2, 3)
    for identity in ("a", "a", "b"):
        counts.enter(identity)
    with pytest.raises(LimitReached, match="a already has 2 streams"):
        counts.enter("a")
    with pytest.raises(LimitReached, match="the service already has 3 streams"):
        counts.enter("c")
    counts.leave("a")
    counts.enter("c")
    assert counts.total == 3


# --- what is shortened -------------------------------------------------------------------------------------


def size_of(message: object) -> int:
    return len(repr(message))


def test_a_long_outcome_keeps_its_first_cause_whole() -> None:
    causes = tuple(replace(CAUSE, rank=r, traceback=f"{r} " * 4000) for r in range(256))
    decisions = tuple(Decision(DecisionKind.RESTART, "why", g, causes[0]) for g in range(200))
    long = Ended(Outcome(False, "failed", 1, causes[0], causes, 3, decisions))
    short = fitted(long, size_of)
    assert isinstance(short, Ended)
    assert size_of(short) <= ENDED_BYTES < size_of(long)
    assert short.outcome.first_cause == causes[0]
    assert short.outcome.causes[0] == causes[0]
    assert (short.outcome.reason, short.outcome.exit_code, short.outcome.restarts) == ("failed", 1, 3)


def test_what_fits_is_left_alone() -> None:
    message = Ended(Outcome(False, "failed", 1, CAUSE, (CAUSE,)))
    assert fitted(message, size_of) == message
    assert fitted(STOP, size_of) is STOP
