"""When an agent mentions again what its job waits for, and when it announces a restart."""

import os
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from job_story import agent, running, spec

from launcher.exchange import AgentEvent, AgentPhase, AgentStep, Finish, StoreReached, Supervision
from launcher.failure.ending import tell
from launcher.output.log_file import LogFolder
from launcher.settings.spec import EntryKind, EntryPoint, LaunchSpec
from launcher.wiring import UserMessages, next_message_s
from rendezvous.values.events import AgentStopped, Assigned, RankFailed, Stop, Waiting
from rendezvous.values.job_state import Phase as ServicePhase
from rendezvous.values.types import (
    AgentId,
    Cause,
    Decision,
    DecisionKind,
    FailureClass,
    JobSpec,
    PolicyAction,
    PolicyRule,
    Recover,
)

SPEC = LaunchSpec(EntryPoint(EntryKind.SCRIPT, "train.py"), JobSpec("run-1"))


def test_the_first_message_comes_soon_and_the_others_are_ever_rarer() -> None:
    moments = [0.0]
    while len(moments) < 12:
        moments.append(next_message_s(moments[-1]))
    assert moments[1:] == [2.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1240.0, 1840.0, 2440.0]
    assert all(after - before <= 600.0 for before, after in pairwise(moments))


def report(messages: UserMessages, event: AgentEvent, state: Supervision, before: AgentPhase) -> None:
    messages.observe(AgentStep(event, replace(state, phase=before), state, ()))


def test_a_restart_is_not_announced_before_all_ranks_have_reported() -> None:
    """A later report may be the first cause. Then --failure-policy can end the job, or a heal becomes a restart."""
    lost = Cause("a", 0, 0, FailureClass.CONSEQUENCE, "Connection closed by peer", 1)
    lines = list[str]()
    state = Supervision(AgentId("a", "1"))
    messages = UserMessages(SPEC, lines.append)
    order = Stop(1, Decision(DecisionKind.RESTART, "restarting (restart 1 of 3)", 1, lost))
    report(messages, order, state, AgentPhase.RUNNING)
    assert not lines
    report(messages, Waiting("waiting for 1 more node", 1, 2), state, AgentPhase.JOINING)
    assert lines == ["ddp-launch: restarting (restart 1 of 3)"]


@dataclass(frozen=True, slots=True)
class Late:
    """What a rank of a world of two nodes reports, in this order of arrival."""

    failure: FailureClass
    rank: int
    lost_peer: bool


REPORTS = st.lists(
    st.builds(
        Late,
        st.sampled_from([each for each in FailureClass if each is not FailureClass.NODE_LOST]),
        st.integers(0, 3),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda each: each.rank,
)
POLICIES = st.lists(
    st.builds(PolicyRule, st.sampled_from(FailureClass), st.sampled_from(PolicyAction)), max_size=3
)


def test_a_heal_is_two_lines_and_its_end_says_who_is_back() -> None:
    """A consequence of the same event gets no line of its own."""
    story = (
        running(spec(2, recover=Recover.AUTO), "a", "b").ready("a", "b").fails("b", 3, FailureClass.SIGNAL)
    )
    lines, state = list[str](), Supervision(AgentId("b", "1"))
    messages = UserMessages(SPEC, lines.append)
    for order in story.told("b"):
        report(messages, order, state, AgentPhase.RUNNING)
    for message in story.park("a", "b").told("b"):
        if isinstance(message, Assigned):
            state = replace(state, assignment=message.assignment)
            report(messages, message, state, AgentPhase.JOINING)
    report(
        messages, StoreReached(2, ""), replace(state, phase=AgentPhase.RUNNING, kept=(0,)), AgentPhase.JOINING
    )
    messages.report_back(1.42, 61)
    killed, healed = lines
    assert killed.endswith("; pausing the other ranks")
    assert healed == "ddp-launch: healed in 1.4 s: rank 3 is back at step 61"


def test_the_end_of_a_restart_is_said_with_the_step_that_the_script_has_set() -> None:
    lines = list[str]()
    messages = UserMessages(SPEC, lines.append)
    messages.report_back(4.0, 61)
    messages.report_back(4.0, None)
    again = "ddp-launch: restarted in 4.0 s: the ranks train again"
    assert lines == [f"{again} at step 61", again]


def test_a_terminal_without_a_size_gets_the_line_about_goodput(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.isatty", lambda _fd: True)
    monkeypatch.setattr("os.get_terminal_size", lambda _fd: os.terminal_size((0, 0)))
    over, words = Finish(0, "all ranks finished"), "goodput 86.3 % of 16 ranks: " + "backward 49.0 %, " * 9
    assert tell(SPEC, LogFolder(SPEC), over, lambda _removes: None, missing="", time_words=words) == 0
    assert max(map(len, capfd.readouterr().err.splitlines())) > 80


@settings(max_examples=300, deadline=None)
@given(REPORTS, POLICIES, st.integers(0, 2), st.sampled_from(Recover), st.data())
def test_what_is_announced_takes_place(
    reports: list[Late], rules: list[PolicyRule], restarts: int, recover: Recover, data: st.DataObject
) -> None:
    """The real service and the messages of one agent: the job does not end after "restarting" or "healing in place"."""
    job = spec(2, restarts=restarts, rules=tuple(rules), recover=recover)
    story = running(job, "a", "b")
    lines, state = list[str](), Supervision(AgentId("a", "1"))
    messages = UserMessages(SPEC, lines.append)

    def hear(phase: AgentPhase) -> None:
        for message in story.told("a"):
            if isinstance(message, Assigned):
                report(messages, message, replace(state, assignment=message.assignment), AgentPhase.JOINING)
            elif isinstance(message, Stop | Waiting):
                report(messages, message, state, phase)

    for at, each in enumerate(reports):
        node = "ab"[each.rank // 2]
        cause = Cause(
            node, each.rank, each.rank % 2, each.failure, "it", 1, ran_s=at, lost_peer=each.lost_peer
        )
        story.happens(RankFailed(agent(node), 1, cause))
        hear(AgentPhase.RUNNING)
        if story.state.phase is not ServicePhase.RUNNING and data.draw(st.booleans()):
            break
    assert not any("restarting" in line or "in place" in line for line in lines)
    if story.state.phase is ServicePhase.STOPPING:
        for node in ("a", "b"):
            story.happens(AgentStopped(agent(node), 1))
            hear(AgentPhase.JOINING)
    announced = any("restarting" in line or "healing in place" in line for line in lines)
    assert not (announced and story.state.phase is ServicePhase.ENDED), lines
