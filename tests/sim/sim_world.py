"""One simulated job: nodes, service replicas, their store and the faults, all drawn from one seed.

First chaos, then a time in which everything is healed: nodes are up, the network delivers, ranks succeed.
Within a bound of virtual time the job must then have ended, and everyone must know.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from sim_agent import SimAgent
from sim_chance import Chance
from sim_monitor import Monitor, Violation
from sim_network import Clock, Network
from sim_service import FakeStore, Service
from sim_training import Training

from launcher.exchange import CheckpointSignal, StopRequested
from rendezvous.session_replay import Redirect
from rendezvous.values.events import (
    JobAborted,
    JobResized,
    NodeDrained,
    NodeResumed,
    RestartOrdered,
)
from rendezvous.values.job_state import Phase

if TYPE_CHECKING:
    from rendezvous.values.types import Assignment, JobSpec

CHAOS_S = 12.0
HEAL_S = 90.0
ADDRESSES = ("r0", "r1", "nobody")  # at the last one nothing ever listens


class SimWorld:
    """Without nodes, and nothing goes wrong in it: see `Job` for one that has both."""

    keeps_journals = False  # for `ddpctl replay`

    def __init__(self, chance: Chance, spec: JobSpec, addresses: tuple[str, ...] = ADDRESSES[:2]) -> None:
        self.chance, self.spec, self.endpoints = chance, spec, addresses
        self.isolation_timeout_s = 30.0
        self.has_gpus = False
        self.healed_at: float | None = None
        self.no_route: set[str] = set()  # nodes that do not reach the store of rank 0
        self.clock = Clock()
        self.network = Network(self)
        self.store = FakeStore()
        self.training = Training(self)
        self.monitor = Monitor(self)
        self.agents: list[SimAgent] = []
        self.services: list[Service] = []
        self.service = self.serve_at(addresses[0])
        self._lives: dict[str, int] = {}
        self._ports = 1000

    # --- what agents and services ask of the world

    def host_at(self, address: str) -> Service | Redirect | None:
        """The job's owner, one that was deposed and has not noticed, or a replica that redirects."""
        here = [s for s in self.services if s.alive and s.address == address]
        if here:
            return here[-1]
        if len(self.replicas) == 1 or address not in self.replicas or address == self.service.address:
            return None
        known = self.service.alive
        return Redirect(
            self.service.address if known else "", 0.0 if known else 0.5, "another replica has the job"
        )

    def peers_lost(self, generation: int) -> None:
        """A rank of this generation is gone, and others may notice before anybody tells them."""
        for agent in self.agents:
            if agent.is_up:
                agent.ranks.peers_lost(generation)

    @property
    def replicas(self) -> tuple[str, ...]:
        return self.endpoints[:2]

    def is_store_out_of_reach(self, agent: SimAgent, assignment: Assignment) -> bool:
        return agent.node in self.no_route or self.chance.store_is_out_of_reach()

    def next_port(self) -> int:
        self._ports += 1
        return self._ports

    # --- nodes and replicas

    def boot(self, node: str, nproc: int, address: str = "") -> SimAgent:
        self._lives[node] = self._lives.get(node, 0) + 1
        agent = SimAgent(self, node, self._lives[node], self.spec, nproc, address)
        self.agents.append(agent)
        return agent

    def serve_at(self, address: str) -> Service:
        self.service = Service(self, address)
        self.services.append(self.service)
        return self.service

    def everyone_knows(self) -> bool:
        if self.service.job.state.phase is not Phase.ENDED:
            return False
        return not any(agent.is_up for agent in self.agents)


class Job(SimWorld):
    """One job under fire: nodes, replicas and faults, all drawn from one seed."""

    def __init__(self, seed: int) -> None:
        chance = Chance(seed)
        self.rng = rng = chance.rng
        super().__init__(chance, chance.spec(), rng.choice((ADDRESSES[:1], ADDRESSES[:2], ADDRESSES)))
        self.isolation_timeout_s = rng.choice((1.5, 30.0))
        self.has_gpus = seed % 2 == 1  # not drawn: the other seeds stay what they were
        spare = rng.choice((0, 0, 1, 2))
        self.nodes = [f"n{i}" for i in range(self.spec.max_nodes + spare)]
        for node in self.nodes:
            self.clock.after(rng.uniform(0.0, 2.0), partial(self._boot, node))
        for _ in range(rng.randrange(12)):
            self.clock.after(rng.uniform(0.0, CHAOS_S), self._fault)

    def _boot(self, node: str) -> None:
        self.boot(node, 1 + sum(map(ord, node)) % 2)

    # --- faults

    def _fault(self) -> None:
        if not self.chance.is_healed:
            self.rng.choice(self._FAULTS)(self)

    def _crash_node(self) -> None:
        agent = self._some_agent()
        if agent is not None:
            agent.die()
            self.clock.after(self.rng.choice((0.1, 1.0, 8.0)), partial(self._reboot, agent.node))

    def _reboot(self, node: str) -> None:
        if not any(agent.node == node and agent.is_up for agent in self.agents):
            self._boot(node)

    def _second_agent(self) -> None:
        """The node's agent is started anew, while the service still has the old one's stream and late words."""
        agent = self._some_agent()
        if agent is not None:
            agent.is_alive = False
            agent.ranks.vanish()
            self._boot(agent.node)

    def _cut_node(self) -> None:
        agent = self._some_agent()
        if agent is not None:
            self.network.cut[agent.node] = self.clock.now + self.rng.choice((0.5, 2.0, 6.0, 15.0))

    def _signal_agent(self) -> None:
        agent = self._some_agent()
        if agent is not None:
            stop = StopRequested(15, "SIGTERM")
            facts = (
                *(stop, stop, CheckpointSignal("SIGUSR1", stop), CheckpointSignal("SIGUSR1", None)),
                StopRequested(2, "SIGINT"),
            )
            fact = self.rng.choice(facts)
            agent.excused(fact, "a signal")
            self.clock.after(2.0, partial(self._reboot, agent.node))

    def _lose_zygote(self) -> None:
        agent = self._some_agent()
        if agent is not None:
            agent.excuse = agent.excuse or "its zygote was lost"
            agent.ranks.lose_zygote()

    def _crash_service(self) -> None:
        self.service.crash()
        self.clock.after(self.rng.choice((0.0, 0.3, 2.0, 6.0)), self._restart_service)

    def _restart_service(self) -> None:
        if not self.service.alive:
            self.serve_at(self.rng.choice(self.replicas))

    def _second_owner(self) -> None:
        """Another replica takes the job over; the old one learns it from the store, or from its own lease."""
        old = self.service
        self.serve_at(self.rng.choice(self.replicas))
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
        _signal_agent,
        _lose_zygote,
        _lose_zygote,
        _crash_service,
        _crash_service,
        _second_owner,
        _order,
        _order,
    )

    def _some_agent(self) -> SimAgent | None:
        up = [agent for agent in self.agents if agent.is_up]
        return self.rng.choice(up) if up else None

    # --- the run

    def run(self) -> None:
        self.clock.run_until(CHAOS_S, self.everyone_knows)
        self._heal()
        self.clock.run_until(CHAOS_S + HEAL_S, self.everyone_knows)
        if not self.everyone_knows():
            raise Violation(f"healed for {HEAL_S:g} s, and the job has not ended: {self._picture()}")
        self.monitor.ended()

    def _heal(self) -> None:
        self.chance.heal()
        self.healed_at = self.clock.now
        self.network.heal()
        self._restart_service()
        for other in self.services:
            if other is not self.service and other.alive:
                other.crash()
        for node in self.nodes:
            self.service.post(NodeResumed(node))
        self._keep_nodes_up()

    def _keep_nodes_up(self) -> None:
        """An agent that was told to leave before the healing may end only now."""
        if self.service.job.state.phase is not Phase.ENDED:
            for node in self.nodes:
                self._reboot(node)
            self.clock.after(10.0, self._keep_nodes_up)

    def _picture(self) -> str:
        state = self.service.job.state
        agents = [
            (str(a.id), a.id.incarnation, a.is_alive, a.finish, a.state, a.session.link) for a in self.agents
        ]
        return f"{state.phase} g{state.generation} pending={state.pending!r} {state.timers} {agents}"


def simulate(seed: int) -> Job:
    job = Job(seed)
    job.run()
    return job
