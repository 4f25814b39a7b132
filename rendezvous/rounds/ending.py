"""How a job ends: its outcome, and the messages to its agents. Pure."""

from __future__ import annotations

from dataclasses import replace

from rendezvous.diagnosing import goodput
from rendezvous.rounds.policy import first_cause_order, first_of
from rendezvous.rounds.reading import Result, by_arrival, spec_of
from rendezvous.values.events import Ended, Persist, Tell
from rendezvous.values.frozen_map import EMPTY
from rendezvous.values.state import DECISIONS_KEPT, MAX_CAUSES, JobState, Phase, Timers
from rendezvous.values.types import Cause, Decision, DecisionKind, Outcome

ABORTED_EXIT_CODE = 143  # as if the operator had sent SIGTERM
INTERRUPTED_EXIT_CODE = 130
TRY_AGAIN_EXIT_CODE = 75


def end_incomplete_round(state: JobState) -> Result:
    """End the job: a forming round reached its timeout."""
    spec, names = (
        spec_of(state),
        [m.agent.node for m in by_arrival(state) if m.agent.node not in state.excluded],
    )
    who = f": {', '.join(names[:16])}{', ...' if len(names) > 16 else ''}" if names else ""
    out = "".join(f"; {n} is excluded: {x.reason}" for n, x in state.excluded.items() if n in state.members)
    cause = state.decision.cause if state.decision is not None else None
    if state.generation == 0:
        count = (
            f"only {len(names)} of {state.min_nodes} nodes joined within {spec.join_timeout_s:g} s{who}{out}"
        )
        reason = f"{count}. Start the other nodes, or increase --join-timeout"
    else:
        within = f"within {spec.replacement_timeout_s:g} s"
        count = f"no replacement joined {within}; {len(names)} of {state.min_nodes} nodes are left{who}{out}"
        reason = f"{count}. Start another node, or increase --replacement-timeout"
    if cause is not None:
        return end(state, failed(state, reason, first_of(state, state.causes.values())), _fail(state, reason))
    outcome = Outcome(False, reason, TRY_AGAIN_EXIT_CODE, restarts=state.restarts_used)
    return end(state, outcome, _fail(state, reason))


def _fail(state: JobState, reason: str) -> Decision:
    cause = state.decision.cause if state.decision is not None else None
    return Decision(DecisionKind.FAIL, reason, state.generation, cause)


def aborted(state: JobState, decision: Decision) -> Result:
    causes = tuple(sorted(state.causes.values(), key=first_cause_order))[:MAX_CAUSES]
    code = INTERRUPTED_EXIT_CODE if decision.is_interrupt else ABORTED_EXIT_CODE
    return end(state, Outcome(False, decision.reason, code, None, causes, state.restarts_used))


def failed(state: JobState, reason: str, first: Cause) -> Outcome:
    others = sorted((c for c in state.causes.values() if c is not first), key=first_cause_order)
    causes = (first, *others)[:MAX_CAUSES]
    return Outcome(False, reason, first.exit_code or 1, first, causes, state.restarts_used)


def end(state: JobState, outcome: Outcome, decision: Decision | None = None) -> Result:
    """End the job. `decision`: recorded first, if it is not recorded yet."""
    if decision is not None:
        state = noted(state, decision)
    time = goodput.whole(state.time)
    outcome = replace(outcome, decisions=state.decisions, heals=state.heals_used, time=time)
    state = replace(state, phase=Phase.ENDED, outcome=outcome, pending=EMPTY, timers=Timers(), store=None)
    state = replace(state, examination=None)
    return state, (Persist(), *(Tell(m.agent, Ended(outcome)) for m in by_arrival(state)))


def noted(state: JobState, decision: Decision) -> JobState:
    return replace(state, decisions=(*state.decisions, decision)[-DECISIONS_KEPT:])
