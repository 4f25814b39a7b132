"""The decision after a failure: one for the whole job, with its reason as text.

The service decides twice about each failed generation. It decides on the first report at once, because the stop order
must not wait for other reports. When all nodes have stopped and sent their reports, it decides again, on the true first
cause. The second decision does not depend on the order of the reports. It can only be stricter than the first: it ends
the job if --failure-policy says so for the true cause, or it excludes a node.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rendezvous.rounds import healing
from rendezvous.values.cause_text import counted, described
from rendezvous.values.job_state import JobState, Standstill, Streak, standing_by, world_nodes
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.types import (
    Cause,
    Decision,
    DecisionKind,
    FailureClass,
    JobSpec,
    Outcome,
    PolicyAction,
    Reached,
    RestartBudget,
    ScaleUp,
)

# Failures that count against the node on which they happen. An exception of the script does not.
_NODE_FAULTS = (
    FailureClass.HARDWARE,
    FailureClass.NETWORK,
    FailureClass.NODE_LOST,
    FailureClass.OUT_OF_MEMORY,
    FailureClass.SIGNAL,
    FailureClass.HANG,
)
_MOST_WITHOUT_STEP = 5  # failures in a row, until the ranks are not healed in place any more


@dataclass(frozen=True, slots=True)
class Verdict:
    decision: Decision
    exclude: str | None = None  # the node to exclude
    exclude_reason: str = ""


def first_cause_order(cause: Cause) -> tuple[tuple[int, bool], tuple[bool, int], int]:
    """The sort key for the causes of one generation, by what each says. It puts the most probable first cause first."""
    return _unlikelihood(cause), _steps_done(cause), cause.rank


def _unlikelihood(cause: Cause) -> tuple[int, bool]:
    """A rank that reported its own failure comes before a lost node.

    A lost node comes before an error of the network that may lie at either end, and before the consequences on its
    peers. Among the consequences, one that may be an error of its own rank comes first. A cause that names what was
    lost comes before that of a rank that was only stopped.
    """
    tier = {FailureClass.CONSEQUENCE: 4, FailureClass.NODE_LOST: 1}.get(cause.failure, 0)
    if cause.uncertain:
        tier = {FailureClass.CONSEQUENCE: 3, FailureClass.NETWORK: 2}.get(cause.failure, tier)
    return tier, tier == 4 and not cause.traceback


def _steps_done(cause: Cause) -> tuple[bool, int]:
    return cause.step is None, cause.step or 0


def first_of(state: JobState, causes: Iterable[Cause]) -> Cause:
    """The first cause. A failure that the policy ignores is the first cause only if there is no other.

    Among causes that are as likely, the one comes first whose rank ended first, as the agent of its node has seen it.
    The clocks of nodes differ, so between nodes a rank that has lost a connection comes last. Otherwise the first ends
    of the nodes are compared by steps: all ranks do the same steps, and the rank that failed first has not finished its
    step. If that does not decide, the first report does.
    """
    sent = state.decision
    reported = sent.cause if sent is not None and sent.generation == state.generation else None
    groups: dict[tuple[bool, tuple[int, bool]], list[Cause]] = {}
    known = tuple(causes)
    has_lost_node = any(cause.failure is FailureClass.NODE_LOST for cause in known)
    for cause in known:
        likely = _unlikelihood(as_consequence(cause) if has_lost_node else cause)
        groups.setdefault((is_ignored(state, cause), likely), []).append(cause)
    of_node: dict[str, Cause] = {}
    for cause in sorted(groups[min(groups)], key=lambda c: (c.ran_s, _steps_done(c), c.rank)):
        of_node.setdefault(cause.node, cause)
    first_report = -1 if reported is None else reported.rank
    ends = of_node.values()
    return min(ends, key=lambda c: (c.lost_peer, _steps_done(c), c.rank != first_report, c.rank))


def as_consequence(cause: Cause) -> Cause:
    """A cause that may be one of another rank's failure, as such a consequence; any other cause unchanged."""
    return replace(cause, failure=FailureClass.CONSEQUENCE) if cause.lost_peer else cause


def is_ignored(state: JobState, cause: Cause) -> bool:
    assert state.spec is not None
    return _action_for(state.spec, cause) is PolicyAction.IGNORE


def in_words(cause: Cause) -> str:
    if cause.failure is FailureClass.NODE_LOST:
        return cause.reason
    if cause.uncertain:
        known = f"{cause.failure}; " if cause.failure is not FailureClass.CONSEQUENCE else ""
        return f"{known}{described(cause)}"
    if cause.failure is FailureClass.CONSEQUENCE:  # the report of the cause itself may still arrive
        return f"rank {cause.rank} on {cause.node} lost the connection to its peers"
    return f"rank {cause.rank} on {cause.node}: {cause.reason}"


def outcome_text(outcome: Outcome) -> str:
    """The outcome in one sentence: what failed, and why that ended the job."""
    first = outcome.first_cause
    if first is None:
        return outcome.reason
    return f"{in_words(first)}; {outcome.reason}"


# --- the decision ------------------------------------------------------------------------------------


def decide(state: JobState, cause: Cause, now: float) -> Verdict:
    """Decide about a failure. Lost nodes are no longer members in `state`."""
    spec = state.spec
    assert spec is not None, "internal error: a failure in a job without a spec"
    rule = _rule_for(spec, cause)
    action = rule or PolicyAction.RESTART
    if action is PolicyAction.IGNORE:
        return _verdict(
            state, DecisionKind.IGNORE, f"{in_words(cause)}; ignored because of --failure-policy", cause
        )
    if cause.final or action is PolicyAction.FAIL:
        return _verdict(state, DecisionKind.FAIL, _why_final(cause), cause)
    if loop := crash_loop(state, cause):
        return _looped(state, loop, cause)
    exclude, exclude_reason = _node_to_exclude(state, cause, action)
    why_not = healing.obstacle(state, cause, rule, exclude) or heals_spent(state, now)
    if why_not and (spent := restarts_spent(state, now)):
        return _verdict(state, DecisionKind.FAIL, f"{healing.mention(spec, why_not)}{spent}", cause)
    plan = plan_restart(state, without=exclude, in_place=not why_not)
    without = f"{exclude} is excluded: {exclude_reason}; " if exclude else ""
    how = f"{healing.mention(spec, why_not)}{plan.words} ({_count_of(state, now, plan.in_place, 1)})"
    reason = f"{in_words(cause)}; {without}{how}"
    return Verdict(plan.decision(reason, state.generation, cause), exclude, exclude_reason)


def _why_final(cause: Cause) -> str:
    return "a restart would not help" if cause.final else f"--failure-policy ends the job on {cause.failure}"


def decide_again(state: JobState, first: Cause, now: float) -> Verdict | None:
    """Decide again when all reports have arrived and `first` is the first cause. The restart is already counted.

    Return None if the first decision remains. Return a new decision in four cases:

    - It is stricter.
    - The cause differs from the cause in the stop order.
    - The job continues with other nodes than planned: more nodes were lost, or lost nodes joined again.
    - The stop was in place, but no rank is paused, or the cause is one that is not healed in place.
    """
    spec, sent = state.spec, state.decision
    assert spec is not None
    assert sent is not None
    rule = _rule_for(spec, first)
    action = rule or PolicyAction.RESTART
    if first.final or action is PolicyAction.FAIL:
        return _verdict(state, DecisionKind.FAIL, _why_final(first), first)
    loop = _loop_in_words(spec, next_streak(state, first))
    if loop := loop or standstill_in_words(spec, standstill_after_failure(state, first)):
        return _looped(state, loop, first)
    exclude, exclude_reason = _node_to_exclude(state, first, action)
    why_not = healing.obstacle_after_stop(state, first, rule, exclude) if sent.in_place else ""
    if why_not and (spent := restarts_spent(state, now)):
        return _verdict(state, DecisionKind.FAIL, f"not in place: {why_not}; {spent}", first)
    plan = plan_restart(state, without=exclude, in_place=sent.in_place and not why_not)
    if exclude is None and not why_not and plan.is_that_of(sent) and first == sent.cause:
        return None
    fell_back = f"not in place: {why_not}; " if why_not else ""
    if exclude is not None:
        reason = f"{exclude} is excluded: {exclude_reason}; {fell_back}{plan.words}"
        return Verdict(plan.decision(reason, state.generation, first), exclude, exclude_reason)
    used = _count_of(state, now, plan.in_place, 1 if why_not else 0)
    reason = f"{in_words(first)}; {fell_back}{plan.words} ({used})"
    return Verdict(plan.decision(reason, state.generation, first))


def _verdict(state: JobState, kind: DecisionKind, reason: str, cause: Cause) -> Verdict:
    return Verdict(Decision(kind, reason, state.generation, cause))


def _looped(state: JobState, reason: str, cause: Cause) -> Verdict:
    return Verdict(Decision(DecisionKind.FAIL, reason, state.generation, cause, is_crash_loop=True))


def _action_for(spec: JobSpec, cause: Cause) -> PolicyAction:
    return _rule_for(spec, cause) or PolicyAction.RESTART


def _rule_for(spec: JobSpec, cause: Cause) -> PolicyAction | None:
    """The rule for this exit code, else the last rule for the class, if there is one."""
    matching = [
        r for r in spec.rules if r.failure is cause.failure and r.exit_code in (None, cause.exit_code)
    ]
    exact = [r for r in matching if r.exit_code is not None]
    chosen = exact or matching
    return chosen[-1].action if chosen else None


# --- budget and crash loop ---------------------------------------------------------------------------


def restarts_spent(state: JobState, now: float) -> str:
    """Why no further restart is allowed; empty if one is."""
    assert state.spec is not None
    if state.spec.budget.limit <= 0:
        return "no restarts are allowed (--max-restarts 0)"
    return _spent("--max-restarts", state.spec.budget, _used(state, now, in_place=False))


def heals_spent(state: JobState, now: float) -> str:
    assert state.spec is not None
    if state.standstill.times >= _MOST_WITHOUT_STEP:
        return f"{state.standstill.times} failures in a row without a further step"
    if state.spec.heal_budget.limit <= 0:
        return "no heals are allowed (--max-heals 0)"
    return _spent("--max-heals", state.spec.heal_budget, _used(state, now, in_place=True))


def _spent(option: str, budget: RestartBudget, used: int) -> str:
    if used < budget.limit:
        return ""
    within = "" if budget.window_s is None else f" within {budget.window_s:g} s"
    return f"{option} is used up ({used} of {budget.limit}{within})"


def _used(state: JobState, now: float, *, in_place: bool) -> int:
    """The number of restarts, or of heals, that count against their budget now."""
    assert state.spec is not None
    budget = state.spec.heal_budget if in_place else state.spec.budget
    if budget.window_s is None:
        return state.heals_used if in_place else state.restarts_used
    times = state.heal_times if in_place else state.restart_times
    return sum(1 for at in times if at > now - budget.window_s)


def _count_of(state: JobState, now: float, in_place: bool, more: int) -> str:
    assert state.spec is not None
    budget = state.spec.heal_budget if in_place else state.spec.budget
    limit = ", no limit" if budget.is_unlimited else f" of {budget.limit}"
    return f"{'heal' if in_place else 'restart'} {_used(state, now, in_place=in_place) + more}{limit}"


def next_streak(state: JobState, first: Cause) -> Streak:
    """The streak after this generation. `first` is its final first cause. Steps are progress: the next may resume."""
    assert state.spec is not None
    if first.step or first.failure is FailureClass.NODE_LOST or first.ran_s >= state.spec.crash_loop.within_s:
        return Streak()
    again = state.streak.times + 1 if state.streak.rank == first.rank else 1
    return Streak(first.rank, again)


def crash_loop(state: JobState, cause: Cause) -> str:
    assert state.spec is not None
    if cause.failure is FailureClass.CONSEQUENCE:
        return ""  # the report of the cause itself arrives later: see decide_again
    return _loop_in_words(state.spec, next_streak(state, cause))


def _loop_in_words(spec: JobSpec, streak: Streak) -> str:
    rule = spec.crash_loop
    if rule.times <= 0 or streak.times < rule.times:
        return ""
    return (
        f"rank {streak.rank} failed within {rule.within_s:g} s of its start {streak.times} times in a row; "
        "the job ends (--crash-loop)"
    )


# --- the nodes of the next world -----------------------------------------------------------------------


def _node_to_exclude(state: JobState, cause: Cause, action: PolicyAction) -> tuple[str | None, str]:
    assert state.spec is not None
    node = cause.node
    if node not in state.members or node in state.excluded:
        return None, ""
    if action is PolicyAction.RESTART_WITHOUT_NODE and not cause.uncertain:
        return node, f"--failure-policy excludes a node on {cause.failure}"
    failed = state.node_failures.get(node, 0) + (1 if counts_against_node(cause) else 0)
    limit = state.spec.node_failure_limit
    if 0 < limit <= failed and plan_restart(state, without=node).kind is not DecisionKind.WAIT:
        return node, f"{failed} failures of this job happened on it"
    return None, ""


def counts_against_node(cause: Cause) -> bool:
    return cause.failure in _NODE_FAULTS and not cause.uncertain


@dataclass(frozen=True, slots=True)
class Plan:
    """How the job continues after a stop. `nodes`: see `Decision.nodes`."""

    kind: DecisionKind
    nodes: int
    words: str
    in_place: bool = False

    def decision(self, reason: str, generation: int, cause: Cause | None = None) -> Decision:
        return Decision(self.kind, reason, generation, cause, self.nodes, in_place=self.in_place)

    def is_that_of(self, sent: Decision) -> bool:
        return (self.kind, self.nodes, self.in_place) == (sent.kind, sent.nodes, sent.in_place)


def plan_restart(state: JobState, without: str | None = None, *, in_place: bool = False) -> Plan:
    """Plan a restart with the current members. `in_place`: ranks that survive keep their processes."""
    before = world_nodes(state)
    stay, spare = 0, 0
    for node, member in state.members.items():
        if node in state.excluded or node == without:
            continue
        stay, spare = (stay + 1, spare) if member.node_rank is not None else (stay, spare + 1)
    returned = min(spare, _restarted_nodes(state, without))
    stay, spare = stay + returned, spare - returned
    restarting, on = ("healing in place", "continuing in place") if in_place else ("restarting", "continuing")
    if stay > state.max_nodes:
        words = f"{on} with {state.max_nodes} of {before} nodes"
        return Plan(DecisionKind.SHRINK, state.max_nodes, words, in_place)
    missing = max(0, min(before, state.max_nodes) - stay)
    if missing == 0:
        return Plan(DecisionKind.RESTART, 0, f"{restarting} with the same nodes", in_place)
    if spare >= missing:
        words = f"{restarting} with {counted(missing, 'spare node')}"
        return Plan(DecisionKind.RESTART_WITH_SPARE, missing, words, in_place)
    if stay + spare >= state.min_nodes:
        wait_s = state.spec.shrink_after_s if state.spec is not None else 0.0
        unless = f" unless a replacement joins within {wait_s:g} s" if wait_s else ""
        words = f"{on} with {stay + spare} of {before} nodes{unless}"
        return Plan(DecisionKind.SHRINK, stay + spare, words, in_place)
    lacking = state.min_nodes - stay - spare
    paused = "; the other ranks are paused" if in_place else ""
    words = f"waiting for {counted(lacking, 'replacement node')}{paused}"
    return Plan(DecisionKind.WAIT, lacking, words, in_place)


def _restarted_nodes(state: JobState, without: str | None) -> int:
    """The number of nodes of the world that have a newer agent now. They count as the same nodes."""
    if state.world is None:
        return 0
    count = 0
    for p in state.world.placements:
        node = p.agent.node
        member = state.members.get(node)
        if member and member.node_rank is None and node not in state.excluded and node != without:
            count += 1
    return count


def growth(state: JobState) -> int:
    """The number of standby nodes that could enlarge the world now. `spec.spares` of them remain spares."""
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


# --- standstill: failures in a row without a further step -------------------------------------------
#
# With `--crash-loop` they end the job, and heals of them are limited.
#
# A budget per time window never ends a job that fails slowly: `--max-restarts 10/1h` permits a failure every seven
# minutes for ever. So progress is counted in steps. Agents report with each stop how many steps their ranks have
# finished. A generation that fails has made no progress
#
# - if the script numbers its steps over all restarts (`ddp.elastic`, `ddp.status(step=...)`): if its highest step is
#   not above that of all generations before it;
# - otherwise, if it was formed in place, so that the counts of its ranks go on: if it has finished no further step;
# - otherwise, if it has finished no step at all, although earlier generations have.
#
# Steps that new processes have finished are progress: the next ones may resume after them. If no rank has a status
# page (programs without torch), or if ranks have saved checkpoints but finished no step, the generation counts
# neither way. A script that has never finished a step, such as a server, may fail in several ways and go on.


def standstill_after_failure(state: JobState, first: Cause) -> Standstill:
    """The standstill after this generation. All nodes have stopped, and `first` is the first cause."""
    was, now, manner = (
        state.standstill,
        steps_reached(state),
        f"{first.rank} {first.failure} {first.exit_code}",
    )
    if now is None:
        return was
    times = 1 if _is_further(state, now, manner) else was.times + 1
    return _standstill_noted(was, now, times, manner)


def standstill_after_order(state: JobState) -> Standstill:
    """The same after a stop that is not a failure, such as growth. It ends a standstill if there were further steps."""
    was, now = state.standstill, steps_reached(state)
    if now is None or not _is_further(state, now, was.manner):
        return was
    return _standstill_noted(was, now, 0, "")


def standstill_in_words(spec: JobSpec, standstill: Standstill) -> str:
    """Why the job ends; empty if it does not."""
    limit, step = spec.crash_loop.without_step, standstill.step
    if limit <= 0 or standstill.times < limit:
        return ""
    if not step:
        where = "without finishing a step"
    elif standstill.numbered:
        where = f"without getting beyond step {max(step, standstill.highest)}"
    else:
        where = f"each time after {step} steps"
    return f"the job failed {standstill.times} times in a row {where}; it ends (--crash-loop)"


def steps_reached(state: JobState) -> Reached | None:
    """The most steps that a rank of this generation has finished, as far as this is known."""
    told = list(state.reached.values())
    if not told:
        steps = [cause.step for cause in state.causes.values() if cause.step is not None]
        return Reached(max(steps)) if steps else None
    numbered = [each for each in told if each.numbered]
    return max(numbered or told, key=lambda each: each.step)


def _standstill_noted(was: Standstill, now: Reached, times: int, manner: str) -> Standstill:
    highest = max(was.highest, now.step) if now.numbered else was.highest
    return Standstill(times, now.step, now.numbered, highest, was.stepped or now.step > 0, manner)


def _is_further(state: JobState, now: Reached, manner: str) -> bool:
    was = state.standstill
    if now.numbered:
        return now.step > was.highest
    if now.step == 0:
        return not was.stepped and manner != was.manner
    return now.step != was.step or not _formed_in_place(state)


def _formed_in_place(state: JobState) -> bool:
    before = (d.in_place for d in reversed(state.decisions) if d.generation == state.generation - 1)
    return next(before, False)
