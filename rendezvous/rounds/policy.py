"""The decision after a failure: one for the whole job, with its reason in words.

The service judges each failed generation twice. It judges the first report at once, because the stop order must not
wait for other reports. It judges again when every node has stopped and all reports are in, now by the cause that is
really the first. The second verdict does not depend on the order of the reports. It may only be harsher than the
first verdict: FAIL if the class of the true cause asks for it, or an excluded node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rendezvous.values.cause_text import described
from rendezvous.values.state import JobState, Streak, standing_by, world_nodes
from rendezvous.values.types import Cause, Decision, DecisionKind, FailureClass, PolicyAction, ScaleUp

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rendezvous.values.types import JobSpec, Outcome, RestartBudget

# Failures that count against the node on which they happen. An exception of the script does not.
_NODE_FAULTS = (
    FailureClass.HARDWARE,
    FailureClass.NETWORK,
    FailureClass.NODE_LOST,
    FailureClass.OUT_OF_MEMORY,
    FailureClass.SIGNAL,
    FailureClass.HANG,
)


@dataclass(frozen=True, slots=True)
class Verdict:
    decision: Decision
    exclude: str | None = None  # the node to exclude
    exclude_reason: str = ""


def seriousness(cause: Cause) -> tuple[int, int, int, int, int]:
    """The sort key for the causes of one generation: the first cause comes first, in whatever order they arrived.

    A lost node explains the consequences on its peers, but a rank that reported its own failure explains more. Among
    consequences, a cause that says what was lost comes before that of a rank that was only stopped.
    """
    tier = {FailureClass.CONSEQUENCE: 2, FailureClass.NODE_LOST: 1}.get(cause.failure, 0)
    says_nothing = tier == 2 and not cause.traceback
    no_step = cause.step is None
    return (tier, says_nothing, no_step, 0 if cause.step is None else cause.step, cause.rank)


def first_of(state: JobState, causes: Iterable[Cause]) -> Cause:
    """The first cause. A failure that the policy ignores is the first cause only if there is no other."""
    assert state.spec is not None
    spec = state.spec
    return min(causes, key=lambda c: (_action_for(spec, c) is PolicyAction.IGNORE, seriousness(c)))


def in_words(cause: Cause) -> str:
    if cause.failure is FailureClass.NODE_LOST:
        return cause.reason
    if cause.uncertain:
        return f"{cause.failure}; {described(cause)}"
    if cause.failure is FailureClass.CONSEQUENCE:  # the report of the cause itself may still arrive
        return f"rank {cause.rank} on {cause.node} lost its peers"
    return f"rank {cause.rank} on {cause.node}: {cause.reason}"


def how_it_ended(outcome: Outcome) -> str:
    """The outcome in one sentence: what failed, and why that ended the job."""
    first = outcome.first_cause
    if first is None:
        return outcome.reason
    return f"{in_words(first)}; {outcome.reason}"


# --- the judgement -----------------------------------------------------------------------------------


def judge(state: JobState, cause: Cause, now: float) -> Verdict:
    """Judge a failure. Lost nodes are no longer members in `state`."""
    spec = state.spec
    assert spec is not None, "ranks fail in a world, and a world is sealed from a spec"
    action = _action_for(spec, cause)
    if action is PolicyAction.IGNORE:
        return _verdict(state, DecisionKind.IGNORE, f"{in_words(cause)}; ignored, as asked", cause)
    if action is PolicyAction.FAIL:
        return _verdict(
            state, DecisionKind.FAIL, f"the failure policy ends the job on {cause.failure}", cause
        )
    if loop := crash_loop(state, cause):
        return _verdict(state, DecisionKind.FAIL, loop, cause)
    if spent := _budget_spent(spec.budget, state, now):
        return _verdict(state, DecisionKind.FAIL, spent, cause)
    exclude, exclude_reason = _sits_out(state, cause, action)
    plan = course(state, without=exclude)
    used = f"restart {restarts_in_window(state, now) + 1}{_of(spec.budget)}"
    without = f"{exclude} sits out: {exclude_reason}; " if exclude else ""
    reason = f"{in_words(cause)}; {without}{plan.words} ({used})"
    return Verdict(plan.decision(reason, state.generation, cause), exclude, exclude_reason)


def judge_again(state: JobState, first: Cause, now: float) -> Verdict | None:
    """Judge again when all reports are in and `first` is the first cause. The restart is already counted.

    Return None if the first verdict holds. Return a new one if it is harsher, if the cause is not the one in the stop
    order, or if the job continues with other nodes than planned (more nodes were lost, or came back).
    """
    spec = state.spec
    assert spec is not None
    action = _action_for(spec, first)
    if action is PolicyAction.FAIL:
        return _verdict(
            state, DecisionKind.FAIL, f"the failure policy ends the job on {first.failure}", first
        )
    if loop := _loop_in_words(spec, next_streak(state, first)):
        return _verdict(state, DecisionKind.FAIL, loop, first)
    exclude, exclude_reason = _sits_out(state, first, action)
    plan = course(state, without=exclude)
    if exclude is None:
        told = state.decision
        if told is None or (first, plan.kind, plan.nodes) == (told.cause, told.kind, told.nodes):
            return None
        used = f"restart {restarts_in_window(state, now)}{_of(spec.budget)}"
        reason = f"{in_words(first)}; {plan.words} ({used})"
        return Verdict(plan.decision(reason, state.generation, first))
    reason = f"{exclude} sits out: {exclude_reason}; {plan.words}"
    return Verdict(plan.decision(reason, state.generation, first), exclude, exclude_reason)


def _verdict(state: JobState, kind: DecisionKind, reason: str, cause: Cause) -> Verdict:
    return Verdict(Decision(kind, reason, state.generation, cause))


def _action_for(spec: JobSpec, cause: Cause) -> PolicyAction:
    """The rule for this exit code, else the last rule for the class, else restart."""
    matching = [
        r for r in spec.rules if r.failure is cause.failure and r.exit_code in (None, cause.exit_code)
    ]
    exact = [r for r in matching if r.exit_code is not None]
    chosen = exact or matching
    return chosen[-1].action if chosen else PolicyAction.RESTART


# --- budget and crash loop ---------------------------------------------------------------------------


def restarts_in_window(state: JobState, now: float) -> int:
    assert state.spec is not None
    window_s = state.spec.budget.window_s
    if window_s is None:
        return state.restarts_used
    return sum(1 for at in state.restart_times if at > now - window_s)


def _of(budget: RestartBudget) -> str:
    return ", no limit" if budget.is_unlimited else f" of {budget.limit}"


def _budget_spent(budget: RestartBudget, state: JobState, now: float) -> str:
    if budget.limit <= 0:
        return "no restarts were allowed"
    used = restarts_in_window(state, now)
    if used < budget.limit:
        return ""
    within = "" if budget.window_s is None else f" within {budget.window_s:g} s"
    return f"restart budget used up ({used} of {budget.limit}{within})"


def next_streak(state: JobState, first: Cause) -> Streak:
    """The streak after `first` is settled as the first cause of this generation."""
    assert state.spec is not None
    if first.failure is FailureClass.NODE_LOST or first.ran_s >= state.spec.crash_loop.within_s:
        return Streak()
    again = state.streak.times + 1 if state.streak.rank == first.rank else 1
    return Streak(first.rank, again)


def crash_loop(state: JobState, cause: Cause) -> str:
    assert state.spec is not None
    if cause.failure is FailureClass.CONSEQUENCE:
        return ""  # the report of the cause itself arrives later; judge_again looks at it
    return _loop_in_words(state.spec, next_streak(state, cause))


def _loop_in_words(spec: JobSpec, streak: Streak) -> str:
    rule = spec.crash_loop
    if rule.times <= 0 or streak.times < rule.times:
        return ""
    return (
        f"rank {streak.rank} failed within {rule.within_s:g} s of its start {streak.times} times in a row; "
        "not restarting into a loop"
    )


# --- which nodes go on -------------------------------------------------------------------------------


def _sits_out(state: JobState, cause: Cause, action: PolicyAction) -> tuple[str | None, str]:
    assert state.spec is not None
    node = cause.node
    if node not in state.members or node in state.excluded:
        return None, ""
    if action is PolicyAction.RESTART_WITHOUT_NODE and not cause.uncertain:
        return node, f"the failure policy excludes a node on {cause.failure}"
    failed = state.node_failures.get(node, 0) + (1 if speaks_against_node(cause) else 0)
    limit = state.spec.node_failure_limit
    if 0 < limit <= failed and course(state, without=node).kind is not DecisionKind.WAIT:
        return node, f"{failed} failures of this job were its own"
    return None, ""


def speaks_against_node(cause: Cause) -> bool:
    return cause.failure in _NODE_FAULTS and not cause.uncertain


@dataclass(frozen=True, slots=True)
class Plan:
    """How the job continues after a stop. `nodes`: see `Decision.nodes`."""

    kind: DecisionKind
    nodes: int
    words: str

    def decision(self, reason: str, generation: int, cause: Cause | None = None) -> Decision:
        return Decision(self.kind, reason, generation, cause, self.nodes)


def course(state: JobState, without: str | None = None) -> Plan:
    """Plan a restart with the present members."""
    before = world_nodes(state)
    stay, spare = 0, 0
    for node, member in state.members.items():
        if node in state.excluded or node == without:
            continue
        stay, spare = (stay + 1, spare) if member.node_rank is not None else (stay, spare + 1)
    returned = min(spare, _came_back(state, without))
    stay, spare = stay + returned, spare - returned
    if stay > state.max_nodes:
        return Plan(
            DecisionKind.SHRINK, state.max_nodes, f"going on with {state.max_nodes} of {before} nodes"
        )
    missing = max(0, min(before, state.max_nodes) - stay)
    if missing == 0:
        return Plan(DecisionKind.RESTART, 0, "restarting with the same nodes")
    if spare >= missing:
        words = f"restarting with {_count(missing, 'spare node')}"
        return Plan(DecisionKind.RESTART_WITH_SPARE, missing, words)
    if stay + spare >= state.min_nodes:
        patience_s = state.spec.shrink_after_s if state.spec is not None else 0.0
        unless = f" unless a replacement comes within {patience_s:g} s" if patience_s else ""
        words = f"going on with {stay + spare} of {before} nodes{unless}"
        return Plan(DecisionKind.SHRINK, stay + spare, words)
    lacking = state.min_nodes - stay - spare
    return Plan(DecisionKind.WAIT, lacking, f"waiting for {_count(lacking, 'replacement node')}")


def _came_back(state: JobState, without: str | None) -> int:
    """The number of nodes of the world whose agent was replaced by a newer one. They count as the same nodes."""
    if state.world is None:
        return 0
    count = 0
    for p in state.world.placements:
        node = p.agent.node
        member = state.members.get(node)
        if member and member.node_rank is None and node not in state.excluded and node != without:
            count += 1
    return count


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def growth(state: JobState) -> int:
    """How many standby nodes could enlarge the world now. `spec.spares` of them are held back."""
    assert state.spec is not None
    if state.spec.scale_up is ScaleUp.NEVER:
        return 0
    return room_to_grow(state)


def room_to_grow(state: JobState) -> int:
    assert state.spec is not None
    room = state.max_nodes - world_nodes(state)
    ready = len(standing_by(state))
    still_too_few = world_nodes(state) + ready < state.min_nodes  # not a reason to stop running ranks
    if room <= 0 or still_too_few:
        return 0
    return max(0, min(room, ready - state.spec.spares))
