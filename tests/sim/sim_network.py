"""Virtual time, and connections that behave like streams on a bad network.

Within one connection messages keep their order, as on a stream. What a bad network does to it is break it:
everything under way is lost in both directions, and the two ends notice at different times, or the service
never does. A message that left the agent may also arrive once more, long after, when its connection is gone.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

from sim_invariants import require

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from sim_agent import FakeAgent
    from sim_service import Service

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
    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self.clock, self.rng = clock, rng
        self.healed = False
        self.cut: dict[str, float] = {}  # node -> until when nothing passes
        self.stray: list[Callable[[], None]] = []

    def delay_s(self) -> float:
        return 0.001 if self.healed else self.rng.choice((0.001, 0.002, 0.005, 0.02, 0.2))

    def breaks(self) -> bool:
        return not self.healed and self.rng.random() < 0.02

    def is_cut(self, node: str) -> bool:
        return not self.healed and self.cut.get(node, -1.0) > self.clock.now


class Connection:
    def __init__(self, network: Network, agent: FakeAgent, service: Service) -> None:
        self.network, self.agent, self.service = network, agent, service
        self.open = True
        self._up_at = self._down_at = 0.0

    def send_up(self, message: object) -> None:
        if not self._passes():
            return
        clock, network = self.network.clock, self.network
        self._up_at = max(self._up_at, clock.now + network.delay_s())
        clock.at(self._up_at, lambda: self.service.receive(self, message) if self.open else None)
        if not network.healed and network.rng.random() < 0.03:  # a late copy, after all else is forgotten
            clock.after(network.rng.uniform(0.1, 8.0), lambda: self.service.receive(None, message))

    def send_down(self, message: object) -> None:
        if not self._passes():
            return
        clock = self.network.clock
        for _ in range(2 if not self.network.healed and self.network.rng.random() < 0.05 else 1):
            self._down_at = max(self._down_at, clock.now + self.network.delay_s())
            clock.at(self._down_at, lambda: self.agent.receive(self, message) if self.open else None)

    def _passes(self) -> bool:
        if not self.open:
            return False
        if self.network.is_cut(self.agent.node) or self.network.breaks():
            self.close()
            return False
        return True

    def close(self) -> None:
        if not self.open:
            return
        self.open = False
        rng, clock = self.network.rng, self.network.clock
        clock.after(rng.uniform(0.0, 1.0), lambda: self.agent.connection_lost(self))
        if rng.random() < 0.5:  # else only the lease tells
            clock.after(rng.uniform(0.0, 1.5), lambda: self.service.connection_lost(self))
