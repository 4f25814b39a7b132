"""Mutation test of the simulator: break one line of the state machine, and expect that the simulator finds it."""

from __future__ import annotations

import pytest
from mutation import Mutant, broken_by, first_seed_that_fails

MUTANTS = (
    Mutant(
        "the generation fence is dropped",
        "rendezvous.machine",
        "member is None or event.generation != state.generation",
        "member is None",
    ),
    Mutant(
        "the incarnation fence is dropped",
        "rendezvous.values.state",
        "return member if member is not None and member.agent == agent else None",
        "return member",
    ),
    Mutant(
        "nothing is ever written",
        "rendezvous.service.owner",
        "return bool(self.effects) and isinstance(self.effects[0], Persist)",
        "return False",
    ),
    Mutant(
        "the address of the TCPStore is sent before the state is stored",
        "rendezvous.machine",
        "return state, (Persist(), *(Tell(p.agent, store_at) for p in world_of(state).placements), *more)",
        "return state, (*(Tell(p.agent, store_at) for p in world_of(state).placements), *more)",
    ),
    Mutant(
        "one node's checkpoint is enough",
        "rendezvous.rounds.orders",
        "if len(state.checkpoints_due):\n        return state, ()\n    state = replace",
        "state = replace",
    ),
    Mutant(
        "the service does not wait until the ranks are reaped",
        "rendezvous.rounds.stopping",
        "    if nodes:\n        return state, effects\n    state, more",
        "    state, more",
    ),
    Mutant(
        "only one node gets the stop order",
        "rendezvous.rounds.stopping",
        "effects: tuple[Effect, ...] = (Persist(), *(Tell(agent, order) for _, agent in nodes))",
        "effects: tuple[Effect, ...] = (Persist(), *(Tell(agent, order) for _, agent in nodes[:1]))",
    ),
    Mutant(
        "restarts are not counted",
        "rendezvous.rounds.healing",
        "    return replace(state, restarts_used=state.restarts_used + 1, restart_times=times)\n\n\ndef recounted",
        "    return replace(state, restarts_used=state.restarts_used, restart_times=times)\n\n\ndef recounted",
    ),
    Mutant(
        "one restart too many",
        "rendezvous.rounds.policy",
        "if used < budget.limit:",
        "if used <= budget.limit:",
    ),
    Mutant(
        "the service waits for a lost node",
        "rendezvous.rounds.stopping",
        "return replace(state, pending=state.pending.minus(node)) if node in state.pending else state",
        "return state",
    ),
    Mutant(
        "the generation number is used again",
        "rendezvous.rounds.sealing",
        "generation = next_generation(state) if again is None else again.generation",
        "generation = max(1, state.generation)",
    ),
    Mutant(
        "node ranks change with each generation",
        "rendezvous.rounds.sealing",
        "[(m.agent, m.facts) for m in chosen], held_ranks(state))",
        "[(m.agent, m.facts) for m in reversed(chosen)], {})",
    ),
    Mutant(
        "the stop budget never expires",
        "rendezvous.rounds.stopping",
        "stop_by=now + spec_of(state).stop_budget_s",
        "stop_by=None",
    ),
    Mutant(
        "leases never expire",
        "rendezvous.rounds.admission",
        "if at + lease_s <= now]",
        "if at + lease_s <= now - 1e9]",
    ),
    Mutant(
        "times of another clock are not converted",
        "rendezvous.rounds.admission",
        "by_s = now - state.as_of",
        "by_s = 0.0",
    ),
    Mutant(
        "ranks are counted per node, not per process",
        "rendezvous.rounds.sealing",
        "rank_offset += facts.nproc",
        "rank_offset += 1",
    ),
    Mutant(
        "a new agent of a node does not end the generation",
        "rendezvous.rounds.admission",
        "if before is not None and before.node_rank is not None:",
        "if before is None and newcomer.node_rank is not None:",
    ),
    Mutant(
        "a consequence is as likely the first cause as a failure",
        "rendezvous.rounds.policy",
        "return tier, tier == 4 and not cause.traceback",
        "return 0, False",
    ),
    Mutant(
        "reports are not sent again",
        "rendezvous.session_replay",
        "replace(kept, reports=(*kept.reports, message), running=running)",
        "replace(kept, running=running)",
    ),
    Mutant(
        "one restart more than the budget has",
        "rendezvous.rounds.policy",
        "if used < budget.limit:",
        "if used <= budget.limit:",
    ),
    Mutant(
        "a resumed session gets no messages",
        "rendezvous.rounds.admission",
        "return renewed, tuple(Tell(agent, m) for m in missed_messages(state, known))",
        "return renewed, ()",
    ),
)


def test_the_sound_machine_passes_the_same_way() -> None:
    same = "rearm=isinstance(event, DeadlineReached)"
    with broken_by(Mutant("nothing is broken", "rendezvous.machine", same, same)) as sim:
        assert first_seed_that_fails(sim, seeds=50) is None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_the_simulator_catches(mutant: Mutant) -> None:
    with broken_by(mutant) as sim:
        assert first_seed_that_fails(sim) is not None
