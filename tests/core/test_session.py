"""The rules of an agent's session: what each stream begins with, where the next one goes, when it gives up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rendezvous.client.session_rules import (
    CONNECT_S,
    PATIENCE_S,
    CloseRequested,
    ContactChanged,
    Deliver,
    MessageSent,
    OpenStream,
    Pause,
    PauseEnded,
    ReceivedMessage,
    SessionEvent,
    SessionState,
    StreamEnded,
    StreamFailed,
    StreamState,
    Write,
    patience,
    step,
)
from rendezvous.session_replay import Redirect
from rendezvous.values.events import (
    AgentJoined,
    AgentStopped,
    Assigned,
    HealReady,
    RanksFinished,
    Refused,
    Stop,
    Waiting,
)
from rendezvous.values.types import AgentId, Assignment, Decision, DecisionKind, JobSpec, NodeFacts

AGENT = AgentId("a", "1")
JOIN = AgentJoined(AGENT, JobSpec("job", 2, 2), NodeFacts("a", "10.0.0.1", 1))
MINE = Assignment(3, 0, 2, 0, 1, 2, "default", 0, 2, 0, 3, "a")
DONE = RanksFinished(AGENT, 3)
WAITING = Waiting("for others", 1, 2)
REFUSED = Refused("not you", 77)
NEW = SessionState(("x:1", "y:1"), give_up_s=60.0, started_at=0.0)


def after(state: SessionState, *events: SessionEvent, at: float = 0.0) -> tuple[SessionState, tuple]:
    """The state, and the effects of the last event."""
    effects: tuple = ()
    for event in events:
        state, effects = step(state, event, at)
    return state, effects


JOINED = after(NEW, MessageSent(JOIN))[0]
RUNNING = after(JOINED, ReceivedMessage(Assigned(MINE)))[0]


def opened(effects: tuple) -> OpenStream:
    (stream,) = effects
    assert isinstance(stream, OpenStream)
    return stream


def test_the_first_stream_opens_with_the_join_and_not_before() -> None:
    assert after(NEW, MessageSent(DONE)) == (replace(NEW, replay=NEW.replay.sent(DONE)), ())
    assert opened(after(NEW, MessageSent(JOIN))[1]).messages == (JOIN,)


def test_a_stream_repeats_the_place_and_the_reports_of_its_generation() -> None:
    state, effects = after(RUNNING, MessageSent(DONE))
    assert effects == (Write((DONE,)),)
    _, effects = after(state, StreamFailed("reset"), PauseEnded())
    assert opened(effects).messages == (replace(JOIN, generation=3, running=MINE), DONE)


def test_what_is_said_between_streams_is_kept_for_the_next_one() -> None:
    state, effects = after(RUNNING, StreamFailed("reset"), MessageSent(DONE))
    assert effects == ()
    assert opened(after(state, PauseEnded())[1]).messages[-1] == DONE


def test_a_service_that_repeats_an_assignment_gets_the_reports_again() -> None:
    _, effects = after(RUNNING, MessageSent(DONE), ReceivedMessage(Assigned(MINE)))
    assert effects == (Write((DONE,)), Deliver(Assigned(MINE)))


def test_a_stopped_node_no_longer_claims_its_place() -> None:
    _, effects = after(RUNNING, MessageSent(AgentStopped(AGENT, 3)), StreamEnded(), PauseEnded())
    assert opened(effects).messages[0] == replace(JOIN, generation=3)


def test_a_stop_of_an_older_generation_takes_no_place_away() -> None:
    """As a replica says it that was deposed and has not noticed."""
    stale = ReceivedMessage(Stop(2, Decision(DecisionKind.RESTART, "again", 2)))
    _, effects = after(RUNNING, stale, StreamEnded(), PauseEnded())
    assert opened(effects).messages == (replace(JOIN, generation=3, running=MINE),)


def test_contact_is_reported_once_per_stream_that_worked() -> None:
    state, effects = after(JOINED, ReceivedMessage(WAITING))
    assert effects == (ContactChanged(True), Deliver(WAITING))
    assert after(state, ReceivedMessage(WAITING))[1] == (Deliver(WAITING),)
    assert after(state, StreamEnded())[1][0] == ContactChanged(False)
    assert not [e for e in after(JOINED, StreamEnded())[1] if isinstance(e, ContactChanged)]


def test_a_redirect_is_followed_unless_its_address_fell_silent() -> None:
    redirect = ReceivedMessage(Redirect("y:1", 0.2, "the job lives there"))
    state, effects = after(JOINED, redirect, StreamEnded())
    assert effects == (Pause(0.2, pytest.approx(0.3)),)
    state, effects = after(state, PauseEnded())
    assert opened(effects).endpoint == "y:1"
    state, _ = after(state, StreamFailed("no answer", silent=True), PauseEnded())
    assert state.endpoint == "x:1"
    state, _ = after(state, redirect, StreamEnded(), PauseEnded(), at=5.0)
    assert state.endpoint == "x:1"
    state, _ = after(state, redirect, StreamEnded(), PauseEnded(), at=15.0)
    assert state.endpoint == "y:1"


def test_pauses_grow_with_each_round_of_failures_and_start_over_after_a_success() -> None:
    state, pauses = JOINED, []
    for _ in range(40):
        state, effects = after(state, StreamFailed("refused"))
        pauses += [e.most_s for e in effects if isinstance(e, Pause)]
        state, _ = after(state, PauseEnded())
    assert pauses[:5] == [0.05, 0.1, 0.1, 0.2, 0.2]
    assert pauses[-1] == 5.0
    assert after(state, ReceivedMessage(WAITING), StreamEnded())[1][-1] == Pause(pytest.approx(0.01), 0.05)


def test_patience_doubles_with_streams_that_stay_silent_and_recovers_within_a_minute() -> None:
    patient = replace(JOINED, give_up_s=600.0)
    state, _ = after(patient, StreamFailed("no answer", silent=True), PauseEnded())
    assert patience(state) == 2 * PATIENCE_S
    state, _ = after(state, StreamEnded(), PauseEnded(), at=61.0)
    assert patience(state) == PATIENCE_S


@pytest.mark.parametrize(("nodes", "after_s"), [(2, 0.1), (50, 0.1), (1024, 2.048), (10_000, 10.0)])
def test_the_joins_of_a_large_job_come_before_its_streams_of_questions(nodes: int, after_s: float) -> None:
    join = replace(JOIN, spec=JobSpec("job", nodes, nodes))
    assert opened(after(NEW, MessageSent(join))[1]).questions_after_s == pytest.approx(after_s)


def test_an_elastic_job_that_may_grow_can_be_asked_at_once() -> None:
    join = replace(JOIN, spec=JobSpec("job", 2, 10_000))
    assert opened(after(NEW, MessageSent(join))[1]).questions_after_s == pytest.approx(0.1)


def test_a_link_that_worked_and_fell_silent_is_tried_again_quickly() -> None:
    state, effects = after(
        JOINED, ReceivedMessage(WAITING), StreamFailed("ping timeout", silent=True), PauseEnded()
    )
    assert opened(effects).connect_s < CONNECT_S
    assert patience(state) == PATIENCE_S


@pytest.mark.parametrize(("nodes", "patience_s"), [(2, 1.6), (400, 1.6), (1600, 6.4), (16000, 20.0)])
def test_agents_of_a_large_job_wait_longer_for_the_answer_to_a_ping(nodes: int, patience_s: float) -> None:
    _, effects = after(NEW, MessageSent(replace(JOIN, spec=JobSpec("job", nodes, nodes))))
    assert opened(effects).patience_s == pytest.approx(patience_s)


@pytest.mark.parametrize(
    ("nodes", "connect_s"), [(2, 3.0), (400, 3.0), (1600, 12.0), (4000, 30.0), (16000, 30.0)]
)
def test_agents_of_a_large_job_wait_longer_for_a_connection(nodes: int, connect_s: float) -> None:
    """As they all connect at once, none would get one if all of them gave up before the service has accepted them."""
    join = replace(JOIN, spec=JobSpec("job", nodes, nodes))
    state, effects = after(NEW, MessageSent(join))
    assert opened(effects).connect_s == connect_s
    _, effects = after(state, StreamFailed("failed to connect"), PauseEnded())
    assert opened(effects).connect_s == connect_s


def test_an_unreachable_service_is_mentioned_early_and_given_up_late() -> None:
    refused = StreamFailed("connection refused")
    state, effects = after(JOINED, refused, at=5.0)
    early = effects[0]
    assert isinstance(early, Deliver)
    assert isinstance(early.message, Waiting)
    state, effects = after(state, PauseEnded(), refused, at=20.0)
    assert [type(e) for e in effects] == [Pause]
    state, effects = after(state, PauseEnded(), refused, at=61.0)
    assert [e.message.exit_code for e in effects] == [75]
    assert state.link is StreamState.OVER


def test_a_tls_problem_at_every_endpoint_is_given_up_sooner() -> None:
    tls = StreamFailed("unavailable", tls_problem="it does not speak TLS")
    state, effects = after(JOINED, tls, PauseEnded(), tls, at=21.0)
    assert effects == (Deliver(Refused("it does not speak TLS", 77)),)
    state, _ = after(JOINED, tls, PauseEnded(), StreamFailed("unavailable"), at=21.0)
    assert state.link is StreamState.PAUSING


def test_who_was_reached_once_is_never_given_up() -> None:
    state, _ = after(RUNNING, StreamFailed("connection refused"), at=1e6)
    assert state.link is StreamState.PAUSING


@pytest.mark.parametrize("may_recover", [False, True])
def test_a_refusal_ends_the_session_unless_it_may_be_cured_later(may_recover: bool) -> None:
    refusal = StreamFailed("no", refused=REFUSED, may_recover=may_recover)
    assert after(JOINED, refusal)[1] == (Deliver(REFUSED),)
    state, _ = after(RUNNING, refusal)
    assert state.link is (StreamState.PAUSING if may_recover else StreamState.OVER)


def test_closing_delivers_what_was_said_and_opens_no_stream_after_that() -> None:
    assert after(NEW, CloseRequested())[0].link is StreamState.OVER
    state, effects = after(RUNNING, CloseRequested())
    assert (state.link, effects) == (StreamState.STREAMING, ())
    assert after(state, StreamEnded())[0].link is StreamState.OVER
    state, effects = after(RUNNING, StreamFailed("reset"), CloseRequested(), PauseEnded())
    assert isinstance(effects[0], OpenStream)


def test_events_of_another_state_change_nothing() -> None:
    over = replace(RUNNING, link=StreamState.OVER)
    pausing = replace(RUNNING, link=StreamState.PAUSING)
    for event in (
        MessageSent(DONE),
        ReceivedMessage(WAITING),
        StreamEnded(),
        StreamFailed("x"),
        PauseEnded(),
    ):
        assert step(over, event, 0.0) == (over, ())
    for event in (ReceivedMessage(WAITING), StreamEnded(), StreamFailed("x")):
        assert step(pausing, event, 0.0) == (pausing, ())
    assert step(RUNNING, PauseEnded(), 0.0) == (RUNNING, ())


HEALING = after(JOINED, ReceivedMessage(Assigned(replace(MINE, can_heal=True))))[0]


def test_a_service_of_the_release_before_does_not_get_a_message_that_it_would_reject() -> None:
    """It sends assignments without `can_heal`, and a message that it does not know would end the stream."""
    ready = HealReady(AGENT, 3, True)
    state, effects = after(RUNNING, MessageSent(ready))
    assert effects == ()
    _, effects = after(state, StreamFailed("reset"), PauseEnded())
    assert opened(effects).messages == (replace(JOIN, generation=3, running=MINE),)


def test_a_stream_repeats_the_last_word_on_whether_ranks_can_be_paused() -> None:
    ready, not_ready = HealReady(AGENT, 3, True), HealReady(AGENT, 3, False)
    state, effects = after(HEALING, MessageSent(ready), MessageSent(DONE), MessageSent(not_ready))
    assert effects == (Write((not_ready,)),)
    _, effects = after(state, StreamFailed("reset"), PauseEnded())
    assert opened(effects).messages[1:] == (DONE, not_ready)


@pytest.mark.parametrize("generation", [2, 4])
def test_whether_ranks_of_another_generation_can_be_paused_is_not_sent(generation: int) -> None:
    state, effects = after(HEALING, MessageSent(HealReady(AGENT, generation, True)))
    assert (state, effects) == (HEALING, ())


def test_the_last_answer_to_a_stop_replaces_an_earlier_one() -> None:
    """The earlier one names paused ranks. Read first, it would seal a world that counts on them."""
    paused, none_left = AgentStopped(AGENT, 3, parked=(0, 1)), AgentStopped(AGENT, 3)
    state, _ = after(RUNNING, MessageSent(DONE), MessageSent(paused), MessageSent(none_left))
    _, effects = after(state, StreamFailed("reset"), PauseEnded())
    assert opened(effects).messages[1:] == (DONE, none_left)
