"""Virtual time, and connections that behave like streams on a bad network.

Within one connection messages keep their order, as on a stream. What a bad network does to it is break it:
everything under way is lost in both directions, and the two ends notice at different times, or the service
never does. A message that left the agent may also arrive once more, long after, when its connection is gone.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

from sim_violation import require

from rendezvous.client.session_rules import StreamEnded, StreamFailed
from rendezvous.session_replay import Redirect
from rendezvous.values.events import Accused, Assigned, CheckpointRequested, Examine, Stop, StoreAt, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim_agent import SimAgent
    from sim_service import Service
    from sim_world import SimWorld

    from rendezvous.client.session_rules import OpenStream

# What may come late, as from a replica that was deposed. It does not refuse anyone: it asks its lease first.
_MAY_COME_LATE = (Assigned, StoreAt, Stop, CheckpointRequested, Examine, Accused, Waiting)
STEPS_BOUND = 30_000  # in one job; a few hundred is usual


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._steps = 0

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(when, self.now), next(self._serial), act))

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        self.at(self.now + delay_s, act)

    def run_until(self, end: float, done: Callable[[], bool]) -> None:
        while self._heap and self._heap[0][0] <= end:
            if done():
                return
            self._steps += 1
            require(self._steps < STEPS_BOUND, "it goes round in circles")
            self.now, _, act = heapq.heappop(self._heap)
            act()
        self.now = max(self.now, end)


class Network:
    def __init__(self, world: SimWorld) -> None:
        self.world, self.clock, self.chance = world, world.clock, world.chance
        self.cut: dict[str, float] = {}  # node -> until when nothing passes

    def is_cut(self, node: str) -> bool:
        return self.cut.get(node, -1.0) > self.clock.now

    def heal(self) -> None:
        self.cut.clear()

    def connect(self, agent: SimAgent, stream: OpenStream) -> Connection | None:
        """None: nothing comes of it, which the agent learns after a while."""
        if self.is_cut(agent.node):
            self._await_route(agent, self.clock.now + stream.connect_s)
            return None
        host = self.world.host_at(stream.endpoint)
        if host is None:
            self._over(agent, None, StreamFailed("connection refused"), self.chance.delay_s())
            return None
        if isinstance(host, Redirect):
            connection = Connection(self, agent, None)
            self.clock.after(self.chance.delay_s(), lambda: agent.receive(connection, host))
            self._over(agent, connection, StreamEnded(), 0.25)
            return connection
        connection = Connection(self, agent, host)
        host.accepted.append(connection)
        return connection

    def _await_route(self, agent: SimAgent, until: float) -> None:
        """A connection that is being made learns soon that its link is back."""
        if self.is_cut(agent.node) and self.clock.now < until:
            self.clock.after(0.5, lambda: self._await_route(agent, until))
        else:
            silent = self.chance.falls_silent()
            self._over(agent, None, StreamFailed("no answer", silent=silent), self.chance.delay_s())

    def _over(
        self, agent: SimAgent, connection: Connection | None, how: StreamEnded | StreamFailed, after_s: float
    ) -> None:
        self.clock.after(after_s, lambda: agent.stream_over(connection, how))


class Connection:
    """`service` None: a replica that only knows where else to go."""

    def __init__(self, network: Network, agent: SimAgent, service: Service | None) -> None:
        self.network, self.agent, self.service = network, agent, service
        self.open = True
        self._up_at = self._down_at = 0.0

    def send_up(self, message: object) -> None:
        service = self.service
        if service is None or not self._passes():
            return
        clock, chance = self.network.clock, self.network.chance
        self._up_at = max(self._up_at, clock.now + chance.delay_s())
        clock.at(self._up_at, lambda: service.receive(self, message) if self.open else None)
        late_s = chance.late_copy_s()
        if late_s is not None:  # after all else is forgotten
            clock.after(late_s, lambda: service.receive(None, message))

    def send_down(self, message: object) -> None:
        if not self._passes():
            return
        clock, chance = self.network.clock, self.network.chance
        for _ in range(2 if chance.is_doubled() else 1):
            self._down_at = max(self._down_at, clock.now + chance.delay_s())
            clock.at(self._down_at, lambda: self.agent.receive(self, message) if self.open else None)
        late_s = chance.late_copy_s()
        if late_s is not None and isinstance(message, _MAY_COME_LATE):
            clock.after(late_s, lambda: self.agent.receive(None, message))

    def _passes(self) -> bool:
        if not self.open:
            return False
        if self.network.is_cut(self.agent.node) or self.network.chance.breaks():
            self.close()
            return False
        return True

    def close(self) -> None:
        if not self.open:
            return
        self.open = False
        clock, chance, service = self.network.clock, self.network.chance, self.service
        silent = self.network.is_cut(self.agent.node) or chance.falls_silent()
        lost = StreamFailed("the stream was lost", silent=silent)
        clock.after(chance.agent_notices_s(), lambda: self.agent.stream_over(self, lost))
        notices_s = None if self.network.is_cut(self.agent.node) else chance.service_notices_s()
        if service is not None and notices_s is not None:  # else only the lease tells
            clock.after(notices_s, lambda: service.connection_lost(self))
