"""The simulator is worth what it catches: break the machine by hand, one line at a time, and see it cry.

Each mutant is a textual change to one module, loaded afresh together with the simulator; the sound modules
come back afterwards.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_PACKAGE = Path(importlib.import_module("rendezvous").__path__[0])
_SEEDS = range(400)


class Mutant(NamedTuple):
    name: str
    module: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "the generation fence is dropped",
        "machine",
        "member.node_rank is None or event.generation != state.generation",
        "member.node_rank is None",
    ),
    Mutant(
        "the incarnation fence is dropped",
        "state",
        "return member if member is not None and member.agent == agent else None",
        "return member",
    ),
    Mutant(
        "nothing is ever written",
        "service.owner",
        "return bool(self.effects) and isinstance(self.effects[0], Persist)",
        "return False",
    ),
    Mutant(
        "the store's address is told without being written",
        "machine",
        "return state, (Persist(), *(Tell(p.agent, told) for p in world_of(state).placements), *more)",
        "return state, (*(Tell(p.agent, told) for p in world_of(state).placements), *more)",
    ),
    Mutant(
        "one node's checkpoint is enough",
        "rounds.growing",
        "if len(state.checkpoints_due):\n        return state, ()\n    state = replace",
        "state = replace",
    ),
    Mutant(
        "nobody waits for the reaping",
        "rounds.stopping",
        "    if told:\n        return state, effects\n    state, more",
        "    state, more",
    ),
    Mutant(
        "only one node is told to stop",
        "rounds.stopping",
        "effects: tuple[Effect, ...] = (Persist(), *(Tell(agent, order) for _, agent in told))",
        "effects: tuple[Effect, ...] = (Persist(), *(Tell(agent, order) for _, agent in told[:1]))",
    ),
    Mutant(
        "restarts are free",
        "rounds.stopping",
        "charged=state.charged + 1",
        "charged=state.charged",
    ),
    Mutant(
        "one restart too many",
        "rounds.policy",
        "if used < budget.limit:",
        "if used <= budget.limit:",
    ),
    Mutant(
        "a lost node is waited for",
        "rounds.stopping",
        "return replace(state, owing=state.owing.minus(node)) if node in state.owing else state",
        "return state",
    ),
    Mutant(
        "the generation number is used again",
        "rounds.sealing",
        "generation = next_generation(state) if again is None else again.generation",
        "generation = max(1, state.generation)",
    ),
    Mutant(
        "node ranks are dealt anew each time",
        "rounds.sealing",
        "[(m.agent, m.facts) for m in chosen], held_ranks(state))",
        "[(m.agent, m.facts) for m in reversed(chosen)], {})",
    ),
    Mutant(
        "who is silent about its reaping is waited for without end",
        "rounds.stopping",
        "stop_by=now + spec_of(state).stop_budget_s",
        "stop_by=None",
    ),
    Mutant(
        "leases never run out",
        "rounds.admission",
        "if at + lease_s <= now]",
        "if at + lease_s <= now - 1e9]",
    ),
    Mutant(
        "instants of another clock are taken at face value",
        "rounds.resume",
        "by_s = now - state.as_of",
        "by_s = 0.0",
    ),
    Mutant(
        "ranks are counted per node, not per process",
        "rounds.ranks",
        "rank_offset += facts.nproc",
        "rank_offset += 1",
    ),
    Mutant(
        "a newer life of a node's agent breaks nothing",
        "rounds.admission",
        "if before is not None and before.node_rank is not None:",
        "if before is None and newcomer.node_rank is not None:",
    ),
    Mutant(
        "whoever reports first is the first cause",
        "rounds.policy",
        "return (tier, says_nothing, no_step, 0 if cause.step is None else cause.step, cause.rank)",
        "return (0, False, False, 0, 0)",
    ),
    Mutant(
        "what was reported is not said again",
        "service.conversation",
        "replace(kept, reports=(*kept.reports, message), running=running)",
        "replace(kept, running=running)",
    ),
    Mutant(
        "one restart more than the budget has",
        "rounds.policy",
        "if used < budget.limit:",
        "if used <= budget.limit:",
    ),
    Mutant(
        "a resumed session is told nothing",
        "rounds.admission",
        "return renewed, tuple(Tell(agent, m) for m in where_it_stands(state, known))",
        "return renewed, ()",
    ),
)


class _Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._path = _PACKAGE / f"{mutant.module.replace('.', '/')}.py"

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        if name != f"rendezvous.{self._mutant.module}":
            return None
        return importlib.util.spec_from_loader(name, self)

    def exec_module(self, module: ModuleType) -> None:
        source = self._path.read_text()
        assert source.count(self._mutant.old) == 1, f"{self._mutant.name}: the line to break is not there"
        exec(
            compile(source.replace(self._mutant.old, self._mutant.new), str(self._path), "exec"),
            module.__dict__,
        )


@contextmanager
def broken_by(mutant: Mutant) -> Iterator[ModuleType]:
    """The simulator, over a machine with this mutation."""
    sound = {n: m for n, m in sys.modules.items() if n.startswith(("rendezvous", "sim_"))}
    loader = _Loader(mutant)
    for name in sound:
        del sys.modules[name]
    sys.meta_path.insert(0, loader)
    try:
        yield importlib.import_module("sim_world")
    finally:
        sys.meta_path.remove(loader)
        for name in [n for n in sys.modules if n.startswith(("rendezvous", "sim_"))]:
            del sys.modules[name]
        sys.modules.update(sound)


def _first_seed_that_fails(sim: ModuleType) -> int | None:
    for seed in _SEEDS:
        try:
            sim.simulate(seed)
        except Exception:  # a broken invariant, or a machine that falls over: caught either way
            return seed
    return None


def test_the_sound_machine_passes_the_same_way() -> None:
    same = "rearm=isinstance(event, DeadlineReached)"
    with broken_by(Mutant("nothing is broken", "machine", same, same)) as sim:
        assert _first_seed_that_fails(sim) is None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_the_simulator_catches(mutant: Mutant) -> None:
    with broken_by(mutant) as sim:
        assert _first_seed_that_fails(sim) is not None
