"""A model of the agent's side of the protocol, with ranks that start, fail, finish and take time to reap.

What it says again whenever its session resumes is for the real `Recital` to know. The rest is modelled: it starts
ranks only after its older ones are reaped; told to wait while ranks run, or that it was given up, it reaps them; it
hears nothing of connections that are gone.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rendezvous.session_replay import Recital
from rendezvous.values.events import (
    Accused,
    AgentHeard,
    AgentJoined,
    AgentLeft,
    AgentStopped,
    Assigned,
    CheckpointRequested,
    CheckpointTaken,
    Ended,
    Examine,
    Examined,
    RankFailed,
    RanksFinished,
    RanksStill,
    Refused,
    Stop,
    StoreAt,
    StoreOpened,
    Waiting,
)
from rendezvous.values.rank_report import Sight
from rendezvous.values.rank_view import RankPhase
from rendezvous.values.types import AgentId, Assignment, Cause, FailureClass, JobSpec, NodeFacts, StoreAddress

if TYPE_CHECKING:
    from sim_network import Connection
    from sim_world import SimWorld

_CLASSES = (FailureClass.USER_EXCEPTION, FailureClass.SIGNAL, FailureClass.HARDWARE, FailureClass.CONSEQUENCE)


class FakeAgent:
    def __init__(self, world: SimWorld, node: str, life: int, spec: JobSpec, nproc: int) -> None:
        self.world, self.node, self.spec = world, node, spec
        self.id = AgentId(node, f"life-{life}")
        self.facts = NodeFacts(node, f"{node}.lan", nproc)
        self.alive, self.over = True, False
        self.exit: Ended | Refused | None = None
        self.connection: Connection | None = None
        self.generation = 0
        self.assignment: Assignment | None = None
        self.running: int | None = None  # the generation whose ranks live here
        self.still: int | None = None  # the generation in which they got stuck
        self.reaping = False
        self.told_to_stop = False
        self.wait_for_reaping: list[object] = []  # what to look at again once the old ranks are gone
        self.recital = Recital().said(AgentJoined(self.id, self.spec, self.facts))
        self._in(0.0, self.connect)
        self._in(world.rng.random(), self.beat)

    def _in(self, delay_s: float, act: object) -> None:
        self.world.clock.after(delay_s, partial(self._if_alive, act))

    def _if_alive(self, act) -> None:
        if self.alive and not self.over:
            act()

    # --- session

    def connect(self) -> None:
        if self.connection is not None:
            return
        self.connection = self.world.connect(self)
        if self.connection is None:
            self._in(self.world.rng.uniform(0.1, 0.6), self.connect)
            return
        for message in self.recital.lines():
            self._send(message)

    def _send(self, message: object) -> None:
        if self.connection is not None:
            self.connection.send_up(message)

    def say(self, message: object) -> None:
        self.recital = self.recital.said(message)
        self._send(message)

    def beat(self) -> None:
        self._send(AgentHeard(self.id))
        self._in(1.0, self.beat)

    def connection_lost(self, connection: Connection) -> None:
        if connection is self.connection:
            self.connection = None
            self._in(self.world.rng.uniform(0.0, 0.5), self.connect)

    def die(self) -> None:
        self.alive, self.running = False, None
        if self.connection is not None:
            self.connection.close()

    def leave(self) -> None:
        self._send(AgentLeft(self.id, "asked to go"))
        self.over, self.running = True, None

    # --- what the service says

    def receive(self, connection: Connection, message: object) -> None:
        if connection is not self.connection or not self.alive or self.over:
            return
        self.world.monitor.told(self, message)
        for report in self.recital.asked_for_by(message):
            self._send(report)
        self.recital = self.recital.heard(message)
        match message:
            case Assigned(assignment):
                self._assigned(assignment)
            case StoreAt(generation, _):
                self._store_at(generation)
            case Stop(generation, _):
                self._stop(generation)
            case CheckpointRequested(generation) if generation == self.generation:
                self._in(self.world.rng.uniform(0.0, 2.0), partial(self._checkpointed, generation))
            case Examine(generation):
                self._examined(generation)
            case Accused(generation, cause):
                self._accused(generation, cause)
            case Waiting():
                self._reap(lambda: None)
            case Refused(retryable=True):
                self._reap(lambda: self._in(0.1, self._join_again))
            case Refused() | Ended():
                self.over, self.exit, self.running = True, message, None

    def _join_again(self) -> None:
        self._send(AgentJoined(self.id, self.spec, self.facts))

    def _assigned(self, assignment: Assignment) -> None:
        if assignment.generation <= self.generation:
            return
        self._new_generation(assignment.generation)
        self.assignment = assignment
        self._reap(partial(self._open_store, assignment.generation))

    def _new_generation(self, generation: int) -> None:
        self.generation, self.assignment, self.told_to_stop = generation, None, False

    def _open_store(self, generation: int) -> None:
        if generation == self.generation and self.assignment and self.assignment.node_rank == 0:
            port = 1000 + self.world.next_port()
            self._in(0.02, partial(self._opened, generation, port))

    def _opened(self, generation: int, port: int) -> None:
        if generation == self.generation and not self.told_to_stop:
            self.say(StoreOpened(self.id, generation, StoreAddress(self.facts.address, port)))

    def _store_at(self, generation: int) -> None:
        if generation != self.generation or self.told_to_stop or self.running == generation:
            return
        if not any(isinstance(report, RanksFinished) for report in self.recital.reports):
            self._reap(partial(self._start, generation))

    def _stop(self, generation: int) -> None:
        if generation < self.generation:
            return
        if generation > self.generation:
            self._new_generation(generation)
        self.told_to_stop = True
        self._reap(partial(self._stopped, generation))

    def _stopped(self, generation: int) -> None:
        if generation == self.generation:
            self.say(AgentStopped(self.id, generation))

    def _checkpointed(self, generation: int) -> None:
        """Also when the ranks were stopped since: what comes too late must change nothing."""
        self._send(CheckpointTaken(self.id, generation))

    # --- ranks

    def _reap(self, then) -> None:
        if self.running is None:
            then()
            return
        self.wait_for_reaping.append(then)
        if not self.reaping:
            self.reaping = True
            self._in(self.world.reap_s(), self._reaped)

    def _reaped(self) -> None:
        if self.running == self.generation and self.told_to_stop and self.world.rng.random() < 0.3:
            self._fail(0, FailureClass.CONSEQUENCE)
        self.running, self.reaping = None, False
        waiting, self.wait_for_reaping = self.wait_for_reaping, []
        for then in waiting:
            then()

    def _start(self, generation: int) -> None:
        if generation != self.generation or self.told_to_stop or self.running is not None:
            return
        self.world.monitor.started(self, generation)
        self.running = generation
        rng = self.world.rng
        if self.world.failures_go_on() and rng.random() < 0.35:
            failure = rng.choice(_CLASSES)
            self._in(rng.uniform(0.0, 3.0), partial(self._rank_fails, generation, failure))
        else:
            self._in(self.world.finish_s(generation), partial(self._finish, generation))
        if self.world.failures_go_on() and self.world.whims.random() < 0.15:
            self._in(self.world.whims.uniform(0.0, 3.0), partial(self._gets_stuck, generation))

    def _rank_fails(self, generation: int, failure: FailureClass) -> None:
        if self.running == generation and not self.reaping:
            self._fail(self.world.rng.randrange(self.facts.nproc), failure)

    def _fail(self, local_rank: int, failure: FailureClass) -> None:
        if self.assignment is None:
            return
        rank, exit_code = self.assignment.rank_offset + local_rank, self.world.rng.choice((0, 1, 7))
        step = self.world.rng.choice((None, 1, 2))
        cause = Cause(self.node, rank, local_rank, failure, "it failed", exit_code, step=step, ran_s=9.0)
        self.say(RankFailed(self.id, self.generation, cause))

    def _finish(self, generation: int) -> None:
        if self.running == generation and not self.reaping and self.still != generation:
            self.running = None
            self.say(RanksFinished(self.id, generation))

    # --- ranks that stand still

    def _gets_stuck(self, generation: int) -> None:
        if self.running == generation and not self.reaping:
            self.still = generation
            self._says_still(generation)

    def _says_still(self, generation: int) -> None:
        if self.running == generation and not self.reaping:
            self._send(RanksStill(self.id, generation))
            self._in(2.0, partial(self._says_still, generation))

    def _examined(self, generation: int) -> None:
        """At times too late, or not at all."""
        late_s = self.world.whims.choice((0.0, 0.0, 0.0, 0.1, 3.0, 60.0)) if not self.world.healing else 0.0
        self._in(late_s, partial(self._says_how_it_is, generation))

    def _says_how_it_is(self, generation: int) -> None:
        sights: tuple[Sight, ...] = ()
        if self.running == generation == self.generation and self.assignment is not None:
            first, stuck = self.assignment.rank_offset, self.still == generation
            phase = RankPhase.DATA if stuck else RankPhase.BACKWARD
            sights = tuple(
                Sight(rank, still_s=9.0, limit_s=3.0, phase=phase, process="S")
                for rank in range(first, first + self.facts.nproc)
            )
        self._send(Examined(self.id, generation, sights))

    def _accused(self, generation: int, cause: Cause) -> None:
        self.world.monitor.accused(self, cause)
        if self.world.whims.random() < 0.7:
            self._in(self.world.whims.uniform(0.0, 2.0), partial(self._confesses, generation, cause))

    def _confesses(self, generation: int, cause: Cause) -> None:
        if self.running == generation:
            self.say(RankFailed(self.id, generation, cause))
