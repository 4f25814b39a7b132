"""Why do ranks stand still? From the first agent that says so to the cause of a failure. Pure.

Theory of operation
-------------------
    RanksStalled --> ASKING: `Examine` to every agent of the world --all have answered, or 2 s are over--> diagnose
       nobody is overdue any more       closed
       all is in order, for now         PATIENCE, and ask again when the one that is waited for would be overdue
       not certain, and an agent silent ask again: it may be on its way back, and if not, its lease will tell
       one that owes an answer says it  `Examine` to it once more: what it was told while it was away is lost
       somebody is the reason           ACCUSING: `Accused` to its agent, which looks at its stacks and then sends
                                        `RankFailed` as for any failure; the service says it itself after 5 s

There is one examination at a time, of the present generation; whatever stops that generation ends it. It is not
written down: a service that takes the job over knows nothing of it, and agents whose ranks are still say so again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.diagnosing.diagnosis import LONGEST_PATIENCE_S, diagnose
from rendezvous.diagnosing.finding import TIMED_OUT_EXIT_CODE, Charge, Finding, Patience
from rendezvous.rounds.sealing import Result, world_of
from rendezvous.rounds.stopping import rank_failed
from rendezvous.values.events import Accused, Examine, Tell
from rendezvous.values.frozen_map import FrozenMap
from rendezvous.values.state import Examination, JobState, Phase, Stage
from rendezvous.values.types import Cause, FailureClass

if TYPE_CHECKING:
    from rendezvous.values.rank_report import RankReport
    from rendezvous.values.state import Member
    from rendezvous.values.types import Placement

ANSWER_WITHIN_S = 2.0
TIMES_ASKED, ASK_AGAIN_S = 4, 0.5  # while somebody is silent and nothing is certain
STACKS_WITHIN_S = 5.0  # the agent itself takes 2 s at most
_HINT = "docs/hangs.md says what each verdict means; --hang-timeout sets the limits"


def ranks_stalled(state: JobState, member: Member, now: float) -> Result:
    """`member` is in the present world."""
    asked = state.examination
    if state.phase is not Phase.RUNNING:
        return state, ()
    if asked is None:
        return _ask(state, now, times=1)
    # It may have been out of reach when it was asked, and what it says now is the first that is heard of it again.
    is_pending = asked.stage is Stage.ASKING and member.agent.node in asked.pending
    return state, ((Tell(member.agent, Examine(state.generation)),) if is_pending else ())


def _ask(state: JobState, now: float, times: int) -> Result:
    agents = [m.agent for m in state.members.values() if m.node_rank is not None]
    pending = FrozenMap((agent.node, True) for agent in agents)
    state = _going_on(state, Examination(Stage.ASKING, times, pending), now + ANSWER_WITHIN_S)
    return state, tuple(Tell(agent, Examine(state.generation)) for agent in agents)


def _going_on(state: JobState, examination: Examination | None, until: float | None) -> JobState:
    return replace(state, examination=examination, timers=replace(state.timers, examine_at=until))


def examined(state: JobState, member: Member, reports: tuple[RankReport, ...], now: float) -> Result:
    """`member` is in the present world."""
    asked, node = state.examination, member.agent.node
    if asked is None or asked.stage is not Stage.ASKING or node not in asked.pending:
        return state, ()
    assert member.node_rank is not None
    place = world_of(state).placements[member.node_rank]
    own = tuple(report for report in reports if _has(place, report.rank))
    asked = replace(asked, pending=asked.pending.minus(node), reports=asked.reports.plus(node, own))
    state = replace(state, examination=asked)
    return (state, ()) if len(asked.pending) else _judge(state, asked, now)


def _has(place: Placement, rank: int) -> bool:
    return place.rank_offset <= rank < place.rank_offset + place.facts.nproc


def _judge(state: JobState, asked: Examination, now: float) -> Result:
    reports = {report.rank: report for told in asked.reports.values() for report in told}
    match diagnose(reports, world_of(state).size):
        case None:
            return _going_on(state, None, None), ()
        case Patience(after_s):
            return _going_on(state, Examination(Stage.PATIENCE), now + after_s), ()
        case Finding(certain=False) if len(asked.pending) and asked.asked < TIMES_ASKED:
            return _going_on(state, Examination(Stage.PATIENCE, asked.asked), now + ASK_AGAIN_S), ()
        case Finding() as finding:
            return _accuse(state, finding, reports, now)


def _accuse(state: JobState, finding: Finding, reports: dict[int, RankReport], now: float) -> Result:
    causes = [
        _cause(state, finding, charge, reports.get(charge.rank))
        for charge in finding.charges
        if charge.rank not in state.causes  # its failure was ignored, as asked
    ]
    if not causes:
        return _going_on(state, Examination(Stage.PATIENCE), now + LONGEST_PATIENCE_S), ()
    accused = FrozenMap((cause.rank, cause) for cause in causes)
    state = _going_on(state, Examination(Stage.ACCUSING, accused=accused), now + STACKS_WITHIN_S)
    told = [(state.members.get(cause.node), cause) for cause in causes]
    return state, tuple(Tell(m.agent, Accused(state.generation, cause)) for m, cause in told if m is not None)


def _cause(state: JobState, finding: Finding, charge: Charge, report: RankReport | None) -> Cause:
    rank = charge.rank
    place = next(p for p in world_of(state).placements if _has(p, rank))
    return Cause(
        node=place.agent.node,
        rank=rank,
        local_rank=rank - place.rank_offset,
        failure=FailureClass.HANG,
        reason=charge.reason,
        exit_code=TIMED_OUT_EXIT_CODE,
        traceback="\n".join(finding.evidence),
        step=report.step if report is not None and report.known else None,
        ran_s=report.stalled_s if report is not None else 0.0,  # its agent knows better
        hint=_HINT,
        doubt=finding.doubt_about(charge),
        suspects=finding.suspects,
    )


def answered(state: JobState, rank: int, now: float) -> JobState:
    """An accused rank's agent has told its failure, and nobody was stopped for it: that was asked for."""
    examination = state.examination
    if examination is None or rank not in examination.accused:
        return state
    left = examination.accused.minus(rank)
    if len(left):
        return replace(state, examination=replace(examination, accused=left))
    return _going_on(state, Examination(Stage.PATIENCE), now + LONGEST_PATIENCE_S)


def due(state: JobState, now: float) -> Result:
    examination = state.examination
    if examination is None or state.phase is not Phase.RUNNING:
        return _going_on(state, None, None), ()
    match examination.stage:
        case Stage.ASKING:
            return _judge(state, examination, now)
        case Stage.PATIENCE:
            return _ask(state, now, examination.asked + 1)
        case Stage.ACCUSING:
            return _say_it_ourselves(state, examination, now)


def _say_it_ourselves(state: JobState, examination: Examination, now: float) -> Result:
    """Their agents were told, and do not answer. The first of them is enough to stop everybody."""
    state = _going_on(state, Examination(Stage.PATIENCE), now + LONGEST_PATIENCE_S)
    cause = next(iter(examination.accused.values()))
    words = f"{cause.reason} (its agent does not say where it stands)"
    return rank_failed(state, replace(cause, reason=words), now)
