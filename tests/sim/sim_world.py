"""One simulated job: nodes, service replicas, their store and the faults, all drawn from one seed.

First chaos, then a time in which everything is healed: nodes are up, the network delivers, ranks succeed.
Within a bound of virtual time the job must then have ended, and everyone must know.
"""

from __future__ import annotations

import random
from functools import partial

from sim_agent import FakeAgent
from sim_monitor import Monitor, Violation
from sim_network import Clock, Connection, Network
from sim_service import FakeStore, Service

from rendezvous.values.events import JobAborted, JobResized, NodeDrained, NodeResumed, RestartOrdered
from rendezvous.values.state import Phase
from rendezvous.values.types import JobSpec, RestartBudget, ScaleUp

CHAOS_S = 12.0
HEAL_S = 90.0


class SimWorld:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.whims = random.Random(f"hangs of {seed}")  # of its own: what else happens stays as it was
        self.clock = Clock()
        self.network = Network(self.clock, self.rng)
        self.store = FakeStore()
        self.spec = self._spec()
        self.monitor = Monitor(self)
        self.agents: list[FakeAgent] = []
        self._lives: dict[str, int] = {}
        self._ports = 0
        self._finish_at: dict[int, float] = {}
        self.healing = False
        self.services: list[Service] = []
        self.service = self._new_service()
        spare = self.rng.choice((0, 0, 1, 2))
        self.nodes = [f"n{i}" for i in range(self.spec.max_nodes + spare)]
        for node in self.nodes:
            self.clock.after(self.rng.uniform(0.0, 2.0), partial(self._boot, node))
        for _ in range(self.rng.randrange(10)):
            self.clock.after(self.rng.uniform(0.0, CHAOS_S), self._fault)

    def _spec(self) -> JobSpec:
        rng = self.rng
        most = rng.randint(1, 4)
        return JobSpec(
            "sim",
            min_nodes=rng.randint(1, most),
            max_nodes=most,
            budget=RestartBudget(rng.choice((0, 1, 2, 5))),
            join_timeout_s=rng.choice((5.0, 30.0)),
            last_call_s=0.5,
            last_call_bound_s=2.0,
            replacement_timeout_s=5.0,
            lease_s=3.0,
            stop_budget_s=4.0,
            node_cooldown_s=5.0,
            spares=rng.choice((0, 0, 1)),
            scale_up=rng.choice(list(ScaleUp)),
            shrink_after_s=rng.choice((0.0, 0.0, 5.0)),
        )

    # --- what agents and services ask of the world

    def connect(self, agent: FakeAgent) -> Connection | None:
        if not self.service.alive or self.network.is_cut(agent.node):
            return None
        connection = Connection(self.network, agent, self.service)
        self.service.accepted.append(connection)
        return connection

    def failures_go_on(self) -> bool:
        return not self.healing

    def reap_s(self) -> float:
        """Longer than the stop budget at times: a process that cannot be killed."""
        return self.rng.choice((0.001, 0.01, 0.05, 0.2, 0.5, 1.0, 6.0, 60.0)) if not self.healing else 0.01

    def write_s(self) -> float:
        return 0.001 if self.healing else self.rng.choice((0.0, 0.002, 0.05))

    def finish_s(self, generation: int) -> float:
        """Ranks of one world finish at about the same time."""
        end = self._finish_at.setdefault(generation, self.clock.now + self.rng.uniform(0.5, 8.0))
        return max(0.0, end - self.clock.now) + self.rng.uniform(0.0, 0.3)

    def next_port(self) -> int:
        self._ports += 1
        return self._ports

    def answer_is_lost(self) -> bool:
        return not self.healing and self.rng.random() < 0.05

    # --- faults

    def _boot(self, node: str) -> None:
        self._lives[node] = self._lives.get(node, 0) + 1
        nproc = 1 + sum(map(ord, node)) % 2
        self.agents.append(FakeAgent(self, node, self._lives[node], self.spec, nproc))

    def _new_service(self) -> Service:
        service = Service(self, f"s{len(self.services)}")
        self.services.append(service)
        return service

    def _fault(self) -> None:
        if not self.healing:
            self.rng.choice(self._FAULTS)(self)

    def _crash_node(self) -> None:
        agent = self._some_agent()
        if agent is not None:
            agent.die()
            self.clock.after(self.rng.choice((0.1, 1.0, 8.0)), partial(self._reboot, agent.node))

    def _reboot(self, node: str) -> None:
        if not any(a.node == node and a.alive and not a.over for a in self.agents):
            self._boot(node)

    def _second_agent(self) -> None:
        """The node's agent is started anew, while the service still has the old one's stream and late words."""
        agent = self._some_agent()
        if agent is not None:
            agent.alive, agent.running = False, None
            self._boot(agent.node)

    def _cut_node(self) -> None:
        agent = self._some_agent()
        if agent is not None:
            self.network.cut[agent.node] = self.clock.now + self.rng.choice((0.5, 2.0, 6.0))

    def _leave_node(self) -> None:
        agent = self._some_agent()
        if agent is not None:
            agent.leave()
            self.clock.after(2.0, partial(self._reboot, agent.node))

    def _crash_service(self) -> None:
        self.service.crash()
        self.clock.after(self.rng.choice((0.0, 0.3, 2.0)), self._restart_service)

    def _restart_service(self) -> None:
        if not self.service.alive:
            self.service = self._new_service()

    def _second_owner(self) -> None:
        """Another replica takes the job over; the old one learns it from the store, or from its own lease."""
        old, self.service = self.service, self._new_service()
        self.clock.after(self.rng.uniform(0.0, 2.0), old.crash)

    def _order(self) -> None:
        node, most = self.rng.choice(self.nodes), self.spec.max_nodes
        orders = [NodeDrained(node, "repairs"), NodeResumed(node), RestartOrdered("a whim")] * 3
        orders += [
            JobResized(1, most),
            JobResized(1, max(1, most - 1)),
            JobResized(1, most + 1),
            JobAborted("enough"),
        ]
        self.service.post(self.rng.choice(orders))

    _FAULTS = (
        _crash_node,
        _crash_node,
        _second_agent,
        _cut_node,
        _cut_node,
        _leave_node,
        _crash_service,
        _crash_service,
        _second_owner,
        _order,
        _order,
    )

    def _some_agent(self) -> FakeAgent | None:
        up = [a for a in self.agents if a.alive and not a.over]
        return self.rng.choice(up) if up else None

    # --- the run

    def run(self) -> None:
        self.clock.run_until(CHAOS_S, self._everyone_knows)
        self._heal()
        self.clock.run_until(CHAOS_S + HEAL_S, self._everyone_knows)
        if not self._everyone_knows():
            raise Violation(f"healed for {HEAL_S:g} s, and the job has not ended: {self._picture()}")
        self.monitor.ended()

    def _heal(self) -> None:
        self.healing = self.network.healed = True
        self._restart_service()
        for other in self.services:
            if other is not self.service and other.alive:
                other.crash()
        for node in self.nodes:
            self.service.post(NodeResumed(node))
            self._reboot(node)

    def _everyone_knows(self) -> bool:
        if self.service.job.state.phase is not Phase.ENDED:
            return False
        return all(a.over or not a.alive for a in self.agents)

    def _picture(self) -> str:
        state = self.service.job.state
        agents = [
            (str(a.id), a.id.incarnation, a.alive, a.over, a.generation, a.running) for a in self.agents
        ]
        return f"{state.phase} g{state.generation} owing={state.owing!r} {state.timers} {agents}"


def simulate(seed: int) -> SimWorld:
    world = SimWorld(seed)
    world.run()
    return world
