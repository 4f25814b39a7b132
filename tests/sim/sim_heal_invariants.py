"""What must hold for every step of the machine about ranks that keep their processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim_violation import require

from rendezvous.values.events import AgentStopped, Assigned, HealReady, RestartOrdered, Tell
from rendezvous.values.job_state import JobState, Phase
from rendezvous.values.types import Decision, DecisionKind, FailureClass, PolicyAction, Recover

if TYPE_CHECKING:
    from rendezvous.values.events import Effect, Event
    from rendezvous.values.types import Cause


def check_stop_in_place(before: JobState, event: Event, after: JobState) -> None:
    """A stop begins: no rank that can be paused is ended for another's death, and none is paused against the rules."""
    decision, spec = after.decision, after.spec
    assert decision is not None
    assert spec is not None
    forbidden = (
        spec.recover is Recover.RESTART
        or bool(after.refusal)
        or decision.kind is DecisionKind.FAIL
        or isinstance(event, RestartOrdered)
        or not _may_heal(after, decision.cause)
        or not any(_survives(before, after, node) for node in before.ready)
    )
    spent = decision.cause is not None and before.heals_used >= spec.heal_budget.limit
    if decision.in_place:
        require(not forbidden, f"in place against the rules: {decision}")
        require(not spent, f"one heal too many: {decision}")
    else:
        require(forbidden or spent, f"ranks that can be paused are restarted: {decision}")


def _survives(before: JobState, after: JobState, node: str) -> bool:
    if node not in after.members or node in after.excluded or node not in before.pending:
        return False
    assert before.world is not None
    place = next(p for p in before.world.placements if p.agent.node == node)
    local_ranks = range(place.facts.nproc)
    if before.phase is Phase.SEALED:  # only paused ranks exist
        local_ranks = before.parked.get(node, ())
    lives = any(place.rank_offset + i not in after.causes for i in local_ranks)
    return lives and after.members[node].agent == place.agent


def _may_heal(state: JobState, cause: Cause | None) -> bool:
    if cause is None or cause.failure is not FailureClass.USER_EXCEPTION:
        return True
    assert state.spec is not None
    actions = [rule.action for rule in state.spec.rules if rule.failure is cause.failure]
    return PolicyAction.HEAL in actions


def check_paused_ranks(before: JobState, event: Event, after: JobState, effects: tuple[Effect, ...]) -> None:
    places = [
        e.message.assignment for e in effects if isinstance(e, Tell) and isinstance(e.message, Assigned)
    ]
    if after.generation > before.generation > 0 and after.phase is Phase.SEALED:
        last = _last_about(after, before.generation)
        told = {place.in_place for place in places if place.generation == after.generation}
        in_place = last is not None and last.in_place
        require(told == {in_place}, f"decided {last}, and told {told}")
        require(bool(len(after.parked)) is in_place, f"decided {last}, and {after.parked} are paused")
    if before.phase is Phase.STOPPING and after.phase in (Phase.FORMING, Phase.SEALED):
        _paused_for_good_reason(before, event, after)
    if isinstance(event, HealReady) and event.refusal and before.refusal:
        require(after.refusal == before.refusal, "the first refusal is forgotten")


def _paused_for_good_reason(before: JobState, event: Event, after: JobState) -> None:
    """All nodes have stopped: if ranks are paused, and their failure may be healed, they continue."""
    sent, final = before.decision, _last_about(after, before.generation)
    assert sent is not None
    if final is None:  # a test that leaves the decisions out
        return
    paused = set(before.parked)
    if isinstance(event, AgentStopped) and event.parked and event.agent.node in before.pending:
        paused.add(event.agent.node)
    kept = {
        node
        for node in paused
        if node in after.members and node not in after.excluded
        if after.members[node].agent == before.members[node].agent
        if after.phase is Phase.FORMING
        or after.members[node].node_rank is not None  # a smaller world may leave it out
    }
    may = sent.in_place and bool(kept) and not after.refusal and _may_heal(after, final.cause)
    require(final.in_place or not may, f"paused ranks of {sorted(kept)} are restarted: {final}")


def _last_about(state: JobState, generation: int) -> Decision | None:
    return next((d for d in reversed(state.decisions) if d.generation == generation), None)
