"""Runs a scenario: commands to a job in which nothing goes wrong by itself, and the transcript of what follows.

A file is a list of blocks, after the manner of etcd-io/raft's test data: commands, `----`, the expected transcript, an
empty line. Lines that begin with `#` are for the reader. Times are virtual seconds. `tests/scenarios/README.md` lists
the commands.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from sim_chance import Calm
from sim_monitor import Monitor
from sim_transcript import Transcript
from sim_world import SimWorld

from launcher.exchange import CheckpointSignal, StopRequested
from rendezvous.values.events import JobAborted, JobResized, NodeDrained, NodeResumed, RestartOrdered
from rendezvous.values.job_state import JobState
from rendezvous.values.types import (
    FailureClass,
    JobSpec,
    PolicyAction,
    PolicyRule,
    Recover,
    RestartBudget,
    ScaleUp,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim_agent import SimAgent

_LONG_S = 1e9
_SPEC = JobSpec(
    "job", 2, 2, budget=RestartBudget(1), replacement_timeout_s=20.0, lease_s=4.0, stop_budget_s=10.0
)


class Scenario:
    def __init__(self) -> None:
        self.world = SimWorld(Calm(), _SPEC)

    def run(self, text: str) -> str:
        """The same text, with what follows now in place of what was expected."""
        blocks = [block for block in text.strip().split("\n\n") if block.strip()]
        return "\n\n".join(self._block(block) for block in blocks) + "\n"

    def _block(self, block: str) -> str:
        commands = block.split("\n----")[0]
        lines = [line for line in commands.splitlines() if not line.startswith("#")]
        if not lines:
            return commands
        out = [said for line in lines for said in self._carry_out(*shlex.split(line))]
        return "\n".join([commands, "----", *out])

    def _carry_out(self, command: str, *words: str) -> list[str]:
        options = dict(word.split("=", 1) for word in words if "=" in word)
        names = [word for word in words if "=" not in word]
        act: Callable[..., list[str] | None] = getattr(self, f"do_{command.replace('-', '_')}")
        said = act(*names, **options)
        return [*self.world.monitor.transcript.take(), *(said or [])]

    def _agent(self, node: str) -> SimAgent:
        return next(agent for agent in reversed(self.world.agents) if agent.node == node)

    # --- the job

    def do_job(self, **options: str) -> None:
        """Options: min, max, restarts, spares, scale-up, shrink-after, join-timeout, isolation, ignore, replicas,
        recover (ranks train inside State.run).
        """
        most = int(options.get("max", "2"))
        rules = tuple(
            PolicyRule(FailureClass(name), PolicyAction.IGNORE)
            for name in options.get("ignore", "").split(",")
            if name
        )
        spec = replace(
            _SPEC,
            min_nodes=int(options.get("min", str(most))),
            max_nodes=most,
            budget=RestartBudget(int(options.get("restarts", "1"))),
            spares=int(options.get("spares", "0")),
            scale_up=ScaleUp(options.get("scale-up", "on-restart")),
            shrink_after_s=float(options.get("shrink-after", "0")),
            join_timeout_s=float(options.get("join-timeout", "60")),
            rules=rules,
            recover=Recover(options.get("recover", "restart")),
        )
        addresses = ("r0", "r1")[: int(options.get("replicas", "1"))]
        calm = Calm()
        calm.uses_run = "recover" in options
        self.world = SimWorld(calm, spec, addresses)
        self.world.isolation_timeout_s = float(options.get("isolation", "30"))
        self.world.monitor.transcript = Transcript()

    def do_boot(self, *nodes: str, nproc: str = "1", address: str = "") -> None:
        for node in nodes:
            agent = self.world.boot(node, int(nproc), address)
            assert agent.is_up

    def do_run(self, seconds: str) -> None:
        clock = self.world.clock
        clock.run_until(clock.now + float(seconds), lambda: False)

    def do_show(self) -> list[str]:
        state = self.world.service.job.state
        heals = f", heals {state.heals_used}" if state.heals_used else ""
        lines = [f"service: {state.phase} g{state.generation}, restarts {state.restarts_used}{heals}"]
        for agent in self.world.agents:
            ends = "" if agent.finish is None else f", exit code {agent.finish.exit_code}"
            runs = "no ranks" if agent.ranks.running is None else f"runs g{agent.ranks.running}"
            gone = "" if agent.is_alive or agent.finish else ", dead"
            lines.append(f"{agent.id}/{agent.id.incarnation}: {agent.state.phase}, {runs}{ends}{gone}")
        return lines

    # --- ranks

    def do_fail(self, node: str, **options: str) -> None:
        ranks, local_rank = self._agent(node).ranks, int(options.get("rank", "0"))
        failure = FailureClass(options.get("as", "user-exception"))
        ranks.end(ranks.generation, local_rank, ranks.cause(local_rank, failure))

    def do_finish(self, *nodes: str) -> None:
        for node in nodes:
            ranks = self._agent(node).ranks
            ranks.finish(ranks.generation)

    def do_stuck(self, node: str) -> None:
        ranks = self._agent(node).ranks
        ranks.get_stuck(ranks.generation)

    def do_deaf(self, node: str) -> None:
        """Its ranks ignore SIGTERM."""
        self._agent(node).ranks.is_deaf = True

    def do_idle(self, *nodes: str) -> None:
        """Its ranks make no progress from here on."""
        for node in nodes:
            self._agent(node).ranks.gets_on = False

    # --- nodes

    def do_kill_agent(self, node: str) -> None:
        self._agent(node).die()

    def do_power_off(self, *nodes: str) -> None:
        for node in nodes:
            self.world.network.cut[node] = _LONG_S  # nothing says goodbye
            self._agent(node).die()

    def do_power_on(self, *nodes: str, nproc: str = "1", address: str = "") -> None:
        for node in nodes:
            del self.world.network.cut[node]
        self.do_boot(*nodes, nproc=nproc, address=address)

    def do_lose_zygote(self, node: str) -> None:
        self._agent(node).ranks.lose_zygote()

    def do_signal(self, node: str) -> None:
        self._agent(node).excused(StopRequested(15, "SIGTERM"), "a signal")

    def do_interrupt(self, node: str) -> None:
        """A person presses Ctrl-C."""
        self._agent(node).excused(StopRequested(2, "SIGINT"), "a signal")

    def do_checkpoint_signal(self, node: str) -> None:
        self._agent(node).excused(CheckpointSignal("SIGTERM", StopRequested(15, "SIGTERM")), "a signal")

    # --- the network

    def do_cut(self, *nodes: str) -> None:
        """From the service."""
        for node in nodes:
            self.world.network.cut[node] = _LONG_S

    def do_restore(self, *nodes: str) -> None:
        for node in nodes:
            del self.world.network.cut[node]

    def do_no_route(self, node: str) -> None:
        """To the store of rank 0."""
        self.world.no_route.add(node)

    # --- the service

    def do_crash_service(self) -> None:
        self.world.service.crash()

    def do_start_service(self, at: str = "r0") -> None:
        self.world.serve_at(at)

    def do_lose_state(self) -> None:
        """The service that is started next knows of no job."""
        store = self.world.store
        store.state, store.version = JobState(), store.version + 1
        transcript = self.world.monitor.transcript
        self.world.monitor = Monitor(self.world)
        self.world.monitor.transcript, self.world.monitor.state_was_lost = transcript, True

    def do_depose(self, address: str) -> None:
        """Another replica takes the job over; the first one learns it when it writes."""
        self.world.serve_at(address)

    def do_drain(self, node: str) -> None:
        self.world.service.post(NodeDrained(node, "repairs"))

    def do_resume(self, node: str) -> None:
        self.world.service.post(NodeResumed(node))

    def do_resize(self, least: str, most: str) -> None:
        self.world.service.post(JobResized(int(least), int(most)))

    def do_restart(self) -> None:
        self.world.service.post(RestartOrdered("an operator asked for it"))

    def do_abort(self) -> None:
        self.world.service.post(JobAborted("an operator asked for it"))
