"""The examination of a hang: from the first report of a stall to the cause of a failure. Pure.

Theory of operation
-------------------
    RanksStalled --> ASKING: `Examine` to every agent of the world --all answers, or 2 s--> diagnose
       no rank is overdue any more      close the examination
       no problem yet                   PATIENCE: ask again when the rank that others wait for would be overdue
       the finding is not certain, and  ask again: the agent may reconnect; if it does not, its lease expires
       an agent has not answered
       a pending agent reports a stall  send `Examine` to it again: it did not receive the first one
       a rank is blamed                 ACCUSING: send `Accused` to its agent. The agent examines the stacks, then
                                        sends `RankFailed` as for any failure. If it does not within 5 s, the
                                        service itself records the failure of the rank

There is one examination at a time, of the current generation. A stop of that generation ends the examination. It is
not stored: if another replica takes over the job, agents with stalled ranks report them again.
"""

from __future__ import annotations

from dataclasses import replace

from rendezvous.diagnosing.diagnosis import (
    LONGEST_PATIENCE_S,
    BlamedRank,
    Finding,
    Patience,
    diagnose,
)
from rendezvous.rounds.stopping import rank_failed
from rendezvous.values.contracts import NO_PROGRESS
from rendezvous.values.events import Accused, Examine, Tell
from rendezvous.values.frozen_map import FrozenMap
from rendezvous.values.job_state import Examination, JobState, Member, Phase, Result, Stage, world_of
from rendezvous.values.rank_view import RankReport
from rendezvous.values.types import Cause, FailureClass, Placement

ANSWER_WITHIN_S = 2.0
TIMES_ASKED, ASK_AGAIN_S = 4, 0.5  # if an agent does not answer and the finding is not certain
STACKS_WITHIN_S = 5.0  # the agent itself takes 2 s at most
_HINT = "ddp-launch docs hangs explains the verdicts; --hang-timeout sets the time limits"


def ranks_stalled(state: JobState, member: Member, now: float) -> Result:
    """Start an examination, unless one is already running. `member` is in the current world."""
    asked = state.examination
    if state.phase is not Phase.RUNNING:
        return state, ()
    if asked is None:
        return _ask(state, now, times=1)
    # The agent may have been disconnected when the service asked. This may be its first message since then.
    is_pending = asked.stage is Stage.ASKING and member.agent.node in asked.pending
    return state, ((Tell(member.agent, Examine(state.generation)),) if is_pending else ())


def _ask(state: JobState, now: float, times: int) -> Result:
    agents = [m.agent for m in state.members.values() if m.node_rank is not None]
    pending = FrozenMap((agent.node, True) for agent in agents)
    state = _with_examination(state, Examination(Stage.ASKING, times, pending), now + ANSWER_WITHIN_S)
    return state, tuple(Tell(agent, Examine(state.generation)) for agent in agents)


def _with_examination(state: JobState, examination: Examination | None, until: float | None) -> JobState:
    return replace(state, examination=examination, timers=replace(state.timers, examine_at=until))


def examined(state: JobState, member: Member, reports: tuple[RankReport, ...], now: float) -> Result:
    """Add a node's answer to the examination. `member` is in the current world."""
    asked, node = state.examination, member.agent.node
    if asked is None or asked.stage is not Stage.ASKING or node not in asked.pending:
        return state, ()
    assert member.node_rank is not None
    place = world_of(state).placements[member.node_rank]
    own = tuple(report for report in reports if _has(place, report.rank))
    asked = replace(asked, pending=asked.pending.minus(node), reports=asked.reports.plus(node, own))
    state = replace(state, examination=asked)
    return (state, ()) if len(asked.pending) else _conclude(state, asked, now)


def _has(place: Placement, rank: int) -> bool:
    return place.rank_offset <= rank < place.rank_offset + place.facts.nproc


def _conclude(state: JobState, asked: Examination, now: float) -> Result:
    reports = {report.rank: report for answer in asked.reports.values() for report in answer}
    match diagnose(reports, world_of(state).size):
        case None:
            return _with_examination(state, None, None), ()
        case Patience(after_s):
            return _with_examination(state, Examination(Stage.PATIENCE), now + after_s), ()
        case Finding(certain=False) if len(asked.pending) and asked.asked < TIMES_ASKED:
            return _with_examination(state, Examination(Stage.PATIENCE, asked.asked), now + ASK_AGAIN_S), ()
        case Finding() as finding:
            return _accuse(state, finding, reports, now)


def _accuse(state: JobState, finding: Finding, reports: dict[int, RankReport], now: float) -> Result:
    causes = [
        _cause(state, finding, blamed, reports.get(blamed.rank))
        for blamed in finding.blamed
        if blamed.rank not in state.causes  # the failure policy ignored its failure
    ]
    if not causes:
        return _with_examination(state, Examination(Stage.PATIENCE), now + LONGEST_PATIENCE_S), ()
    accused = FrozenMap((cause.rank, cause) for cause in causes)
    state = _with_examination(state, Examination(Stage.ACCUSING, accused=accused), now + STACKS_WITHIN_S)
    to = [(state.members.get(cause.node), cause) for cause in causes]
    return state, tuple(Tell(m.agent, Accused(state.generation, cause)) for m, cause in to if m is not None)


def _cause(state: JobState, finding: Finding, blamed: BlamedRank, report: RankReport | None) -> Cause:
    rank = blamed.rank
    place = next(p for p in world_of(state).placements if _has(p, rank))
    return Cause(
        node=place.agent.node,
        rank=rank,
        local_rank=rank - place.rank_offset,
        failure=FailureClass.HANG,
        reason=blamed.reason,
        exit_code=NO_PROGRESS,
        traceback="\n".join(finding.evidence),
        step=report.step if report is not None and report.known else None,
        ran_s=report.stalled_s if report is not None else 0.0,  # its agent has the exact value
        hint=_HINT,
        doubt=finding.doubt_about(blamed),
        suspects=finding.suspects,
    )


def answered(state: JobState, rank: int, now: float) -> JobState:
    """The agent of an accused rank has reported the failure: remove the rank from the examination.

    This matters only if the failure policy ignored the failure. Otherwise the stop has ended the examination.
    """
    examination = state.examination
    if examination is None or rank not in examination.accused:
        return state
    left = examination.accused.minus(rank)
    if len(left):
        return replace(state, examination=replace(examination, accused=left))
    return _with_examination(state, Examination(Stage.PATIENCE), now + LONGEST_PATIENCE_S)


def due(state: JobState, now: float) -> Result:
    examination = state.examination
    if examination is None or state.phase is not Phase.RUNNING:
        return _with_examination(state, None, None), ()
    match examination.stage:
        case Stage.ASKING:
            return _conclude(state, examination, now)
        case Stage.PATIENCE:
            return _ask(state, now, examination.asked + 1)
        case Stage.ACCUSING:
            return _fail_without_agent(state, examination, now)


def _fail_without_agent(state: JobState, examination: Examination, now: float) -> Result:
    """Record the failure of the first accused rank, since its agent does not answer. One failure stops all ranks."""
    state = _with_examination(state, Examination(Stage.PATIENCE), now + LONGEST_PATIENCE_S)
    cause = next(iter(examination.accused.values()))
    reason = f"{cause.reason} (its agent did not send the stacks)"
    return rank_failed(state, replace(cause, reason=reason), now)
