"""The processes of one node, as the kernel would know them: ranks, what they leave behind, the zygote, the store.

The agent's machine never reads this. It is the truth that the invariants compare its actions with.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sim_training import Process

from launcher.exchange import (
    CannotHeal,
    CommunicationFailed,
    RankEnded,
    RankHeals,
    RankParked,
    StallDetected,
    StartFailed,
    StoreFailed,
    StoreListens,
    Swept,
    ZygoteReplaced,
)
from launcher.supervision import SIGKILL
from rendezvous.values.rank_view import RankPhase, RankReport
from rendezvous.values.types import Assignment, Cause, FailureClass, StoreAddress

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim_agent import SimAgent

_SAYS_STILL_EVERY_S = 2.0
_ZYGOTES = 3
_CONNECTS_S = 0.05


class Ranks:
    def __init__(self, agent: SimAgent) -> None:
        self._agent, self._chance = agent, agent.world.chance
        self.assignment: Assignment | None = None
        self.processes: dict[int, Process] = {}
        self.live: set[int] = set()
        self.heals: set[int] = set()  # those of the live ones that are inside State.run
        self.parked: set[int] = set()  # those that are paused
        self._pausing: set[int] = set()  # those that leave their collectives, or never get that far
        self._ending: set[int] = set()  # those of the live ones that a signal will end
        self.unreaped: int | None = None  # the generation of which something may be left
        self.stuck: int | None = None  # the generation in which they got stuck
        self.gets_on = True
        self.is_deaf = False  # its ranks ignore SIGTERM
        self.idle_since = 0.0  # unless they get on
        self._zygote = 0  # its life; what an earlier one was to do is lost with it
        self._zygotes_lost = 0

    @property
    def generation(self) -> int:
        return -1 if self.assignment is None else self.assignment.generation

    @property
    def running(self) -> int | None:
        """The generation whose ranks run here."""
        return self.generation if self.live - self.parked else None

    def training(self) -> list[Process]:
        return [self.processes[i] for i in sorted(self.live - self.parked - self._pausing)]

    def vanish(self) -> None:
        """With their agent: the kernel ends them (parent-death signal, cgroup)."""
        if self.live:
            self._agent.world.peers_lost(self.generation)
        self.live, self.parked, self.unreaped = set(), set(), None

    # --- what the agent asks for

    def start(self, assignment: Assignment, kept: tuple[int, ...] = ()) -> None:
        self._agent.world.monitor.ranks_start(self._agent, assignment, kept)
        generation, chance = assignment.generation, self._chance
        self.assignment, self.live, self._ending = assignment, set(range(assignment.nproc)), set()
        before, self.processes = self.processes, {}
        for local_rank in range(assignment.nproc):
            self.processes[local_rank] = Process(joins=assignment.in_place)
            if local_rank in kept:
                self.processes[local_rank] = replace(before[local_rank], kept=True)
            else:
                self._begin_run(generation, local_rank, joins=assignment.in_place)
        self.heals, self.parked, self._pausing = set(kept), set(), set()
        self._agent.world.training.kept += len(kept)
        self.unreaped, self.gets_on, self._zygotes_lost = generation, chance.gets_on(), 0
        self.idle_since = self._agent.world.clock.now
        plan = chance.plan(generation, assignment.nproc, self._agent.world.clock.now)
        if plan.finish_s is not None:
            self._in(plan.finish_s, partial(self.finish, generation))
        if plan.fails is not None:
            self._in(
                plan.fails.after_s, partial(self._fail, generation, plan.fails.local_rank, plan.fails.failure)
            )
        if plan.stuck_s is not None:
            self._in(plan.stuck_s, partial(self.get_stuck, generation))
        if plan.loses_peer_s is not None:
            self._in(plan.loses_peer_s, partial(self.lose_peer, generation))

    def _begin_run(self, generation: int, local_rank: int, *, joins: bool) -> None:
        """A script enters State.run, or turns out to be one whose new ranks cannot join others."""
        after_s = self._chance.enters_run_s()
        if after_s is None:
            return
        if joins and self._chance.cannot_join():
            self._in(after_s, partial(self._cannot_join, generation, local_rank))
        else:
            self._in(after_s, partial(self.enter_run, generation, local_rank))

    def enter_run(self, generation: int, local_rank: int) -> None:
        if generation != self.generation or local_rank not in self.live - self._ending:
            return
        if not self._agent.world.training.is_complete(generation):  # it waits until all ranks have connected
            self._in(_CONNECTS_S, partial(self.enter_run, generation, local_rank))
        else:
            self.heals.add(local_rank)
            self._agent.take(RankHeals(generation, local_rank, True))

    def _cannot_join(self, generation: int, local_rank: int) -> None:
        if generation == self.generation and local_rank in self.live:
            self._agent.take(CannotHeal(generation, local_rank, "it communicates before State.run"))
            self._fail(generation, local_rank, FailureClass.USER_EXCEPTION)

    def pause(self, generation: int, local_ranks: tuple[int, ...]) -> None:
        for local_rank in local_ranks:
            if generation == self.generation and local_rank in self.live & self.heals:
                self._pausing.add(local_rank)
                after_s = self._chance.parks_s()
                if after_s is not None:
                    self._in(after_s, partial(self._park, generation, local_rank))

    def peers_lost(self, generation: int) -> None:
        """Some ranks that can be paused notice it at once: their collective fails."""
        if self.running != generation:
            return
        for local_rank in sorted(self.live & self.heals - self.parked):
            if self._chance.notices_lost_peers():
                self._pausing.add(local_rank)
                self._in(self._chance.parks_s() or 0.1, partial(self._park, generation, local_rank))

    def _park(self, generation: int, local_rank: int) -> None:
        if generation != self.generation or local_rank not in self.live - self._ending - self.parked:
            return
        self.parked.add(local_rank)
        self._agent.take(RankParked(generation, local_rank))
        ends_s = self._chance.parked_rank_ends_s()
        if ends_s is not None:
            self._in(ends_s, partial(self._end_parked, generation, local_rank))

    def _end_parked(self, generation: int, local_rank: int) -> None:
        """Its process dies while it is paused, whatever has been decided meanwhile."""
        if generation == self.generation and local_rank in self.parked:
            self._fail(generation, local_rank, FailureClass.SIGNAL)

    def signal(self, signum: int, only: tuple[int, ...] | None) -> None:
        """A rank that is about to end is not hurried by another signal: it may be stuck in the kernel."""
        for local_rank in sorted((self.live if only is None else self.live & set(only)) - self._ending):
            after_s = None if self.is_deaf and signum != SIGKILL else self._chance.ends_s(signum)
            if after_s is not None:
                self._ending.add(local_rank)
                self._in(after_s, partial(self._end_of_signal, self.generation, local_rank))

    def open_store(self, generation: int) -> None:
        address = self._agent.facts.address
        fact: StoreFailed | StoreListens = StoreFailed(generation, "the port is taken")
        if not self._chance.store_port_is_taken():
            fact = StoreListens(generation, StoreAddress(address, self._agent.world.next_port()))
        self._in(self._chance.store_opens_s(), partial(self._zygote_says, self._zygote, fact))

    def sweep(self, generation: int, kept: tuple[int, ...] = ()) -> None:
        self._agent.world.monitor.sweeps(self._agent, kept)
        self._in(self._chance.sweep_s(), partial(self._swept, self._zygote, generation))

    def _swept(self, zygote: int, generation: int) -> None:
        if zygote == self._zygote:
            if self.unreaped == generation and self.live <= self.parked:
                self.unreaped = None
            self._agent.take(Swept(generation))

    def _zygote_says(self, zygote: int, fact: StoreFailed | StoreListens) -> None:
        if zygote != self._zygote:
            return
        if isinstance(fact, StoreFailed):
            self._agent.excused(fact, fact.reason)
        else:
            self._agent.take(fact)

    # --- what happens to ranks

    def cause(self, local_rank: int, failure: FailureClass, reason: str = "it failed") -> Cause:
        assert self.assignment is not None
        rank, exit_code = self.assignment.rank_offset + local_rank, self._chance.exit_code()
        step, node = self._chance.last_step(), self._agent.node
        return Cause(node, rank, local_rank, failure, reason, exit_code, step=step, ran_s=9.0)

    def end(self, generation: int, local_rank: int, cause: Cause | None) -> None:
        if generation == self.generation and local_rank in self.live:
            self.live.discard(local_rank)
            self.parked.discard(local_rank)
            if cause is not None:
                self._agent.world.peers_lost(generation)
            self._agent.take(RankEnded(generation, local_rank, cause))

    def _fail(self, generation: int, local_rank: int, failure: FailureClass) -> None:
        if generation == self.generation and local_rank in self.live:
            self.end(generation, local_rank, self.cause(local_rank, failure))

    def _end_of_signal(self, generation: int, local_rank: int) -> None:
        if self._chance.ends_badly():
            self._fail(generation, local_rank, FailureClass.CONSEQUENCE)
        else:
            self.end(generation, local_rank, None)

    def finish(self, generation: int) -> None:
        if self.running == generation and self.stuck != generation:
            for local_rank in sorted(self.live - self.parked - self._pausing):
                self.end(generation, local_rank, None)

    def release(self, generation: int, only: tuple[int, ...] | None = None) -> None:
        """Peers are lost: some of those that wait for them in a collective end with an error."""
        if self.running != generation or self._chance.is_healed:
            return
        for local_rank in sorted((self.live if only is None else self.live & set(only)) - self.heals):
            if self._chance.ends_badly():
                after_s = self._chance.checkpoint_s()
                self._in(after_s, partial(self._fail, generation, local_rank, FailureClass.CONSEQUENCE))

    def lose_peer(self, generation: int) -> None:
        if self.running == generation:
            cause = self.cause(
                min(self.live - self.parked), FailureClass.CONSEQUENCE, "its process group reports an error"
            )
            self._agent.take(CommunicationFailed(generation, cause))

    def get_stuck(self, generation: int) -> None:
        if self.running == generation:
            self.stuck, self.gets_on = generation, False
            self.idle_since = self._agent.world.clock.now
            self._says_still(generation)

    def _says_still(self, generation: int) -> None:
        if self.running == generation:
            self._agent.take(StallDetected(generation))
            self._in(_SAYS_STILL_EVERY_S, partial(self._says_still, generation))

    def reports(self) -> tuple[RankReport, ...]:
        if self.assignment is None:
            return ()
        first = self.assignment.rank_offset
        phase = RankPhase.DATA if self.stuck == self.generation else RankPhase.BACKWARD
        return tuple(
            RankReport(first + local_rank, stalled_s=9.0, limit_s=3.0, phase=phase, process="S")
            for local_rank in sorted(self.live)
        )

    def lose_zygote(self) -> None:
        """Ranks and store die with it; the agent hears of each rank first, then starts another zygote."""
        self._zygote += 1
        self._zygotes_lost += 1
        generation = self.generation
        for local_rank in sorted(self.live):
            self.end(
                generation, local_rank, self.cause(local_rank, FailureClass.SIGNAL, "the zygote was lost")
            )
        if self._zygotes_lost > _ZYGOTES or not self._chance.zygote_starts():
            self._agent.take(StartFailed("no rank can be started here"))
        else:
            self._agent.take(ZygoteReplaced("the zygote was lost", 137))

    def _in(self, delay_s: float, act: Callable[[], None]) -> None:
        self._agent.after(delay_s, act)
