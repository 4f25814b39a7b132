"""An agent: the real machine of the launcher and the real rules of its session, over simulated processes and streams.

This is the shell that `launcher.agent` and `rendezvous.remote` are in a real one: it carries out what the two machines
ask for, and brings them what comes of it. It decides nothing.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from journals import MemoryJournal
from sim_ranks import Ranks

from launcher import progress, supervision
from launcher.exchange import (
    AbortGroups,
    AskCheckpoint,
    CheckpointOver,
    Finish,
    GpusFound,
    Grace,
    GraceOver,
    Inspected,
    InspectLast,
    InspectRanks,
    Isolated,
    LastInspected,
    NodePrepared,
    OpenStore,
    PauseRanks,
    PrepareNode,
    ReachStore,
    Send,
    SignalRanks,
    StacksTaken,
    StartGrace,
    StartRanks,
    StoreReached,
    Supervision,
    Sweep,
    TakeStacks,
)
from launcher.replaying import machine
from rendezvous.client import session_rules as session
from rendezvous.client.session_rules import (
    CloseRequested,
    ContactChanged,
    Deliver,
    MessageSent,
    OpenStream,
    Pause,
    PauseEnded,
    ReceivedMessage,
    SessionState,
    StreamEnded,
    StreamFailed,
    StreamState,
    Write,
)
from rendezvous.values.events import AgentHeard, AgentJoined, Refused
from rendezvous.values.types import AgentId, JobSpec, NodeFacts

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim_network import Connection
    from sim_world import SimWorld

    from launcher.exchange import Action, AgentEvent
    from rendezvous.client.session_rules import SessionEvent

_GRACE_S = {Grace.FULL: 2.0, Grace.OF_ACCUSED: 1.0, Grace.TOGETHER: 1.5, Grace.LAST: 1.0, Grace.UNASKED: 1.0}
_FAREWELL_S, _PREPARES_S = 1.0, 0.5


class SimAgent:
    def __init__(
        self, world: SimWorld, node: str, life: int, spec: JobSpec, nproc: int, address: str
    ) -> None:
        self.world, self.node = world, node
        self.id = AgentId(node, f"life-{life}")
        self.facts = NodeFacts(node, address or f"{node}.lan", nproc)
        self.is_alive = True
        self.finish: Finish | None = None
        self.excuse = ""  # why it may end with another exit code than the job
        self.ranks = Ranks(self)
        self.state = Supervision(self.id, join=AgentJoined(self.id, spec, self.facts))
        self._isolation: progress.Isolation | None = None
        self.isolation_timeout_s = world.isolation_timeout_s
        self._connection: Connection | None = None
        self.cut_off_since: float | None = None
        first = world.chance.first_of(len(world.endpoints))
        self.session = SessionState(world.endpoints, spec.join_timeout_s, world.clock.now, at=first)
        self.journal = MemoryJournal(machine()) if world.keeps_journals else None
        if self.journal is not None:
            self.journal.started(self.state, world.clock.now)
        if world.has_gpus:
            self.take(GpusFound())
        assert self.state.join is not None
        self._step_session(MessageSent(self.state.join))
        self.after(world.chance.pause_s(0.0, 1.0), self._beat)

    @property
    def is_up(self) -> bool:
        return self.is_alive and self.finish is None

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        self.world.clock.after(delay_s, partial(self._if_alive, act))

    def _if_alive(self, act: Callable[[], None]) -> None:
        if self.is_alive:
            act()

    def die(self) -> None:
        self.is_alive = False
        self.ranks.vanish()
        if self._connection is not None:
            self._connection.close()

    # --- the machine of the launcher

    def take(self, fact: AgentEvent) -> None:
        if not self.is_up:
            return
        before = self.state
        self.state, actions = supervision.step(before, fact)
        if self.journal is not None:
            self.journal.took(fact, self.world.clock.now, actions, self.state)
        self.world.monitor.agent_stepped(self, before, fact, actions)
        for action in actions:
            self._carry_out(action)

    def excused(self, fact: AgentEvent, excuse: str) -> None:
        """A fact of this node that may end its agent on its own."""
        self.excuse = self.excuse or excuse
        self.take(fact)

    def _carry_out(self, action: Action) -> None:
        chance, ranks = self.world.chance, self.ranks
        match action:
            case Send(message):
                self._step_session(MessageSent(message))
            case PrepareNode(assignment, _):
                self.after(_PREPARES_S, partial(self.take, NodePrepared(assignment.generation)))
            case OpenStore(generation):
                ranks.open_store(generation)
            case ReachStore(assignment, _):
                problem = "no route" if self.world.is_store_out_of_reach(self, assignment) else ""
                self.after(0.02, partial(self.take, StoreReached(assignment.generation, problem)))
            case StartRanks(assignment, _, kept):
                ranks.start(assignment, kept)
            case PauseRanks(generation, local_ranks, _):
                ranks.pause(generation, local_ranks)
            case AskCheckpoint(assignment, _, _):
                over = CheckpointOver(assignment.generation, chance.checkpoint_is_taken())
                self.after(chance.checkpoint_s(), partial(self.take, over))
            case InspectRanks(generation):
                self.after(chance.errand_s(), partial(self._look_at_ranks, generation))
            case InspectLast(generation):
                self.after(0.0, partial(self.take, LastInspected(generation, ranks.reports())))
            case TakeStacks(generation, cause):
                self.after(chance.errand_s(), partial(self.take, StacksTaken(generation, cause)))
            case AbortGroups(generation, _, only):
                ranks.release(generation, only)
            case SignalRanks(signum, only):
                ranks.signal(signum, only)
            case StartGrace(generation, kind):
                self.after(_GRACE_S[kind], partial(self.take, GraceOver(generation, kind)))
            case Sweep(generation, _, kept):
                ranks.sweep(generation, kept)
            case Finish():
                self._finish(action)

    def _look_at_ranks(self, generation: int) -> None:
        self.take(Inspected(generation, self.ranks.reports()))

    def _finish(self, finish: Finish) -> None:
        self.finish = finish
        self.world.monitor.agent_finished(self, finish)
        self.ranks.vanish()
        self._step_session(CloseRequested())
        self.after(_FAREWELL_S, self.die)

    # --- its session

    def _step_session(self, event: SessionEvent) -> None:
        if not self.is_alive:
            return
        self.session, effects = session.step(self.session, event, self.world.clock.now)
        for effect in effects:
            match effect:
                case OpenStream():
                    self._open(effect)
                case Write(messages):
                    for message in messages:
                        self._write(message)
                case Deliver(message):
                    self._deliver(message)
                case ContactChanged(held):
                    self._contact(held)
                case Pause(least_s, most_s):
                    pause_s = self.world.chance.pause_s(least_s, most_s)
                    self.after(pause_s, partial(self._step_session, PauseEnded()))

    def _open(self, stream: OpenStream) -> None:
        self.world.monitor.stream_begins(self, stream.messages)
        self._connection = self.world.network.connect(self, stream)
        for message in stream.messages:
            self._write(message)

    def _write(self, message: object) -> None:
        if self._connection is not None:
            self._connection.send_up(message)

    def _beat(self) -> None:
        self.world.monitor.still_cut_off(self)
        if self.finish is None:
            self._write(AgentHeard(self.id))
        self.after(session.heartbeat_every_s(self.session), self._beat)

    def receive(self, connection: Connection | None, message: object) -> None:
        """`connection` None: a copy of a message that came long ago, on whatever stream there is now."""
        if connection is None and self._connection is not None:
            self._step_session(ReceivedMessage(message))
        elif connection is not None and connection is self._connection:
            self.cut_off_since = None
            self._step_session(ReceivedMessage(message))

    def stream_over(self, connection: Connection | None, how: StreamEnded | StreamFailed) -> None:
        if connection is self._connection and self.session.link is StreamState.STREAMING:
            self._connection = None
            if self.cut_off_since is None:
                self.cut_off_since = self.world.clock.now
            self._step_session(how)

    def _deliver(self, message: object) -> None:
        if not self.is_up:
            return
        if self.session.link is StreamState.OVER:  # these are its own words, not the service's
            self.world.monitor.gave_up(self)
        else:
            self.world.monitor.told(self, message)
        if isinstance(message, Refused) and not message.retryable:
            self.excuse = self.excuse or f"refused: {message.reason}"
        self.take(message)

    # --- cut off from the service

    def _contact(self, held: bool) -> None:
        self.world.monitor.contact(self, held)
        if held:
            self._isolation = None
        elif self._isolation is None:
            self._isolation = progress.contact_lost(self._signs())
            self._look_later(self._isolation)

    def _look_later(self, isolation: progress.Isolation) -> None:
        every_s = progress.pause_s(min(self.isolation_timeout_s, self.session.give_up_s))
        self.after(every_s, partial(self._look, isolation))

    def _look(self, seen: progress.Isolation) -> None:
        if seen is not self._isolation or not self.is_up:
            return
        isolation = self._isolation = progress.updated(seen, self._signs())
        if progress.is_over(isolation, self.isolation_timeout_s):
            self._isolation = progress.contact_lost(isolation.seen)
            self.world.monitor.isolated(self)
            self.take(Isolated("cut off from the rendezvous"))
        if progress.is_hopeless(isolation, self.session.give_up_s):
            self.excused(Refused("the rendezvous was out of reach", 75), "out of reach")
        elif self._isolation is not None:
            self._look_later(self._isolation)

    def _signs(self) -> progress.ProgressSigns:
        now, ranks = self.world.clock.now, self.ranks
        return progress.ProgressSigns(now, ranks=len(ranks.live), step=int(now * 10) if ranks.gets_on else 0)
