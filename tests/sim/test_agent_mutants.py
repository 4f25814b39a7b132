"""The same for the agent's side: its machine, the rules of its session, and what it does when it is cut off."""

from __future__ import annotations

import pytest
from mutation import Mutant, broken_by, first_seed_that_fails

_MACHINE, _SESSION = "launcher.supervision", "rendezvous.client.session_rules"
_STOPS = "launcher.supervision"

MUTANTS = (
    Mutant(
        "ranks start before the older ones are reaped",
        _MACHINE,
        "if state.phase is not Phase.JOINING:  # the Stop message was lost",
        "if state.phase is Phase.DONE:",
    ),
    Mutant(
        "an older assignment is accepted",
        _MACHINE,
        "if assignment.generation <= state.generation:",
        "if assignment.generation < 0:",
    ),
    Mutant(
        "a stop of another generation counts",
        _STOPS,
        "    if generation != state.generation:\n        return state, ()\n    state = replace(state, job_failed",
        "    state = replace(state, job_failed",
    ),
    Mutant(
        "a stop is answered before the node is reaped",
        _STOPS,
        "    if not state.live:\n        return state, (sweep(state),)",
        "    if not state.live:\n        return state, (Send(AgentStopped(state.agent, state.generation)),)",
    ),
    Mutant(
        "ranks that are deaf to SIGTERM are never killed",
        "launcher.supervision",
        "        case _:\n            return kill(state)",
        "        case _:\n            return state, ()",
    ),
    Mutant(
        "what ranks left behind is not swept",
        _MACHINE,
        "actions.append(sweep(state))",
        "actions.append(Send(AgentStopped(state.agent, state.generation)))",
    ),
    Mutant(
        "a failure is not reported",
        _MACHINE,
        "if event.cause is not None:\n        rank",
        "if event.cause is not None and not state.live:\n        rank",
    ),
    Mutant(
        "the first rank that ends counts for all",
        _MACHINE,
        "    if not state.live:\n        if state.phase is Phase.STOPPING:",
        "    if True:\n        if state.phase is Phase.STOPPING:",
    ),
    Mutant(
        "a world that was sealed meanwhile is forgotten",
        _MACHINE,
        "state = replace(state, overtaken_by=assignment)",
        "state = replace(state, overtaken_by=None)",
    ),
    Mutant(
        "the job's exit code is not the agent's",
        _MACHINE,
        "Finish(outcome.exit_code, outcome.reason, outcome)",
        "Finish(1, outcome.reason, outcome)",
    ),
    Mutant(
        "the end of the job is not waited for by the reaping",
        _STOPS,
        "        return stop_after_all(state)\n    if state.phase is Phase.JOINING and not state.live:",
        "        return replace(state, phase=Phase.DONE), (state.finish,)\n    if state.phase is Phase.JOINING:",
    ),
    Mutant(
        "a sweep that was lost with its zygote is not repeated",
        "launcher.supervision",
        "        case Phase.STOPPING if not state.live:\n            return state, (sweep(state),)",
        "        case Phase.STOPPING if not state.live:\n            return state, ()",
    ),
    Mutant(
        "ranks start at a store that was lost",
        "launcher.supervision",
        "return replace(state, over=True), (report, *stopped)",
        "return state, (report, *stopped)",
    ),
    Mutant(
        "ranks that get on are stopped because the service is out of reach",
        "launcher.progress",
        "max(isolation.since, isolation.progress_at)",
        "isolation.since",
    ),
    Mutant(
        "a lost stream is not replaced",
        _SESSION,
        "return state, (*lost, *early, _pause(state, now))",
        "return state, (*lost, *early)",
    ),
    Mutant(
        "who reached a service once gives up",
        _SESSION,
        "    if state.was_reached:\n        return None\n    for_s",
        "    for_s",
    ),
    Mutant(
        "a session goes to the same endpoint for ever",
        _SESSION,
        "return next(usable, others[0] if others else state.at)",
        "return state.at",
    ),
    Mutant(
        "a report of an older generation is repeated",
        "rendezvous.session_replay",
        "return replace(self, generation=generation, running=None, reports=())",
        "return replace(self, generation=generation, running=None)",
    ),
    Mutant(
        "a place is claimed after its ranks were stopped",
        "rendezvous.session_replay",
        "running = None if isinstance(message, AgentStopped) else kept.running",
        "running = kept.running",
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_the_simulator_catches(mutant: Mutant) -> None:
    with broken_by(mutant) as sim:
        assert first_seed_that_fails(sim) is not None
