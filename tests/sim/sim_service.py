"""A service replica: the real owner logic over a store whose writes take time, fail over, and outlive crashes."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from journals import MemoryJournal

from rendezvous.replay.journal import service_machine
from rendezvous.service.owner import OwnedJob, Transition
from rendezvous.store.protocol import Conflict
from rendezvous.values.events import AgentLost, DeadlineReached, Persist, SetDeadline, Tell
from rendezvous.values.job_state import JobState

if TYPE_CHECKING:
    from sim_network import Connection
    from sim_world import SimWorld

    from rendezvous.values.events import Event


class FakeStore:
    def __init__(self) -> None:
        self.state, self.version = JobState(), 0

    def save(self, state: JobState, expected_version: int) -> int:
        if expected_version != self.version:
            raise Conflict
        self.state, self.version = state, self.version + 1
        return self.version


class Service:
    """`skew_s`: its monotonic clock started at another instant than anyone else's."""

    def __init__(self, world: SimWorld, address: str) -> None:
        self.world, self.address = world, address
        self.alive = True
        self.skew_s = world.chance.skew_s()
        self.journal = MemoryJournal(service_machine()) if world.keeps_journals else None
        self.job = OwnedJob(self.journal)
        self.accepted: list[Connection] = []
        self.connections: dict[object, Connection] = {}  # the latest of each agent
        self._queue: deque[Event] = deque()
        self._busy = False
        self._alarm = 0
        self._take_over()

    def _take_over(self) -> None:
        store = self.world.store
        version = store.save(store.state, store.version)  # from here on, no write of an older owner lands
        self._perform(self.job.reload(store.state, version, self.now()))

    def now(self) -> float:
        return self.world.clock.now + self.skew_s

    # --- what comes in

    def receive(self, connection: Connection | None, message: Event) -> None:
        if not self.alive:
            return
        if connection is not None:
            self.connections[connection.agent.id] = connection
        self.post(message)

    def connection_lost(self, connection: Connection) -> None:
        if self.alive and self.connections.get(connection.agent.id) is connection:
            del self.connections[connection.agent.id]
            self.post(AgentLost(connection.agent.id, "its stream broke"))

    def post(self, event: Event) -> None:
        if self.alive:
            self._queue.append(event)
            self._work()

    # --- one transition after another

    def _work(self) -> None:
        while self._queue and not self._busy and self.alive:
            event = self._queue.popleft()
            transition = self._turn(event)
            if transition.persists:
                self._busy = True
                self.world.clock.after(self.world.chance.write_s(), partial(self._write, event, transition))
            else:
                self._commit(transition, self.job.version)

    def _turn(self, event: Event) -> Transition:
        transition = self.job.take(event, self.now())
        self.world.monitor.stepped(self.job.state, event, transition)
        return transition

    def _write(self, event: Event, transition: Transition) -> None:
        """Lands or not; the service may die, or the answer be lost, either way."""
        if not self.alive:
            return
        try:
            version = self.world.store.save(transition.state, self.job.version)
        except Conflict:
            self.crash()  # another replica owns the job: agents have to go there
            return
        self.world.monitor.written(transition.state)
        if self.world.chance.answer_is_lost():
            self._take_over()
            self._queue.appendleft(event)
            self._busy = False
            self._work()
            return
        self.world.clock.after(self.world.chance.write_s(), partial(self._written, transition, version))

    def _written(self, transition: Transition, version: int) -> None:
        if self.alive:
            self._busy = False
            self._commit(transition, version)
            self._work()

    def _commit(self, transition: Transition, version: int) -> None:
        self.job.commit(transition, version)
        self._perform(transition)

    def _perform(self, transition: Transition) -> None:
        for effect in transition.effects:
            match effect:
                case Persist():
                    pass
                case Tell(agent, message):
                    connection = self.connections.get(agent)
                    if connection is not None:
                        self.world.monitor.about_to_tell(message)
                        connection.send_down(message)
                case SetDeadline(at):
                    self._set_alarm(at)

    def _set_alarm(self, at: float | None) -> None:
        self._alarm += 1
        if at is not None:
            self.world.clock.at(at - self.skew_s + 1e-9, partial(self._ring, self._alarm))

    def _ring(self, alarm: int) -> None:
        if self.alive and alarm == self._alarm:
            self.post(DeadlineReached())

    # --- ends

    def crash(self) -> None:
        self.alive = False
        self.drop_connections()

    def drop_connections(self) -> None:
        for connection in self.accepted:
            connection.close()
        self.connections.clear()
