"""The agent's shell: one queue of facts, one consumer that steps the machine and runs its actions in order.

Facts come from four places (the rendezvous session, the zygote's socket, signals, the grace clock) and all go
through the queue; only the consumer touches the state. See launcher/supervision.py for what is done, and why.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, assert_never

from launcher import supervision
from launcher.errands import Errands
from launcher.error_boundary import ErrorBoundary
from launcher.exchange import (
    Action,
    AskCheckpoint,
    BreakOff,
    CheckpointOver,
    CheckpointSignal,
    Fact,
    Finish,
    GraceOver,
    Isolated,
    LookAtRanks,
    LookBack,
    OpenStore,
    RanksStandStill,
    ReachStore,
    Send,
    SignalRanks,
    StartGrace,
    StartRanks,
    StopRequested,
    StoreFailed,
    StoreListens,
    Sweep,
    Swept,
    TakeStacks,
)
from launcher.failure import ending
from launcher.failure.verdict import signal_name
from launcher.health.communication import CommunicationWatch
from launcher.health.node_watch import NodeWatch
from launcher.health.watch import HangWatch
from launcher.isolation import IsolationWatch
from launcher.joining.connect import CannotMeet, meet
from launcher.joining.join import job_spec, node_facts
from launcher.output.log_folder import LogFolder
from launcher.output.logs import LogPump
from launcher.ranks.checkpoint import CheckpointQuestion
from launcher.ranks.worker import Workers
from launcher.ranks.zygote_watch import ZygoteWatch
from launcher.settings.spec import EntryKind
from launcher.status import StatusLine, WaitingWords
from launcher.stop_requests import unless_stopped
from launcher.supervised import Phase, Supervision
from launcher.supervision import TRY_AGAIN
from launcher.template.messages import Exited, Keeping, Ready, Report, Started
from launcher.template.messages import Swept as ZygoteSwept
from launcher.user_messages import Announcer
from launcher.version import VERSION
from rendezvous.signals import SignalWatch
from rendezvous.values.events import AgentJoined, Refused
from rendezvous.values.types import StoreAddress

if TYPE_CHECKING:
    from launcher.joining.connect import Met
    from launcher.preflight.agent_preflight import Preflight
    from launcher.ranks.zygote import Zygote
    from launcher.ranks.zygote_starter import ZygoteStarter
    from launcher.settings.spec import LaunchSpec

_EXIT_DRAIN_S = 5.0  # for a terminal that is slow to take the last lines
_GRACE_OF_ACCUSED_S = 1.0  # of ranks that have not got on for long, and are in everybody's way


class Agent:
    def __init__(self, spec: LaunchSpec, starter: ZygoteStarter, zygote: Zygote) -> None:
        self._spec = spec
        self._starter = starter
        self._facts: asyncio.Queue[Fact] = asyncio.Queue()
        self._folder = LogFolder(spec)
        alone = spec.nproc == spec.max_nodes == 1
        self._logs = LogPump(spec.log, self._folder.path, file_limit=self._folder.file_limit, eager=alone)
        self._zygotes = ZygoteWatch(starter, zygote, self._logs.say)
        self._boundary = ErrorBoundary(self._logs.say)
        self._status = StatusLine(spec, self._logs)
        self._announcer = Announcer(spec, self._logs.say)
        self._waiting_words = WaitingWords(self._announcer.say)

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._watch_stop_signals()
        preflight = self._begin_preflight()
        incarnation = f"{os.getpid()}-{time.time_ns():x}"
        try:
            met = await unless_stopped(meet(self._spec, incarnation), self._facts)
        except CannotMeet as error:
            return await self._turned_away(Finish(error.exit_code, f"error: {error}"))
        if isinstance(met, StopRequested):
            return await self._turned_away(Finish(128 + met.signum, f"stopped by {met.name}"))
        join = self._wire(met)
        await self._communication.begin()
        self._watch_signals()
        if preflight is not None:
            try:
                join = await preflight.checked(join, met, self._facts)
            except CannotMeet as error:
                await met.leave()
                return await self._turned_away(Finish(error.exit_code, f"error: {error}"))
            self._state = Supervision(met.agent, join=join)
        met.session.send(join)
        await self._care.begin(lambda: self._state)
        async with asyncio.TaskGroup() as tasks:
            zygotes = self._zygotes.run(self._zygote_told, self._ranks_lost, self._facts.put_nowait)
            owned = [tasks.create_task(each) for each in (self._receive(), self._status.run(), zygotes)]
            finish = await self._consume()
            for task in owned:
                task.cancel()
        await self._errands.end()
        await self._watch_no_more()
        return await self._leave(finish)

    def _wire(self, met: Met) -> AgentJoined:
        """What the agent consists of once it knows its rendezvous."""
        self._met = met
        agent, self._address = self._met.agent, self._met.address
        self._ranks = Workers(
            *(self._spec, self._logs, self._boundary, self._met.host),
            *(self._starter.binding.cpus, self._starter.scratch),
        )
        self._question = CheckpointQuestion(self._starter.scratch, self._ranks.ranks, self._checkpoint_over)
        self._isolation = IsolationWatch(
            *(self._spec.isolation_timeout_s, self._spec.join_timeout_s),
            self._ranks.pids,
            lambda: self._logs.received,
            self._ranks.pages.step,
            self,
        )
        self._communication = CommunicationWatch(
            self._starter.scratch, self._met.host, self._ranks, self._logs.say, self._facts.put_nowait
        )
        self._hangs = HangWatch(
            self._spec.hang,
            self._ranks.pages.views,
            lambda generation: self._facts.put_nowait(RanksStandStill(generation)),
            self._boundary,
        )
        self._errands = Errands(
            self._boundary, self._ranks, self._communication, self._hangs, self._facts.put_nowait
        )
        self._care = NodeWatch(
            *(self._spec, self._folder.path, self._starter.scratch, self._ranks.pages, self._hangs),
            *(self._logs.say, self._met.session.send, self._boundary),
        )
        self._met.session.watch_contact(self._contact)
        facts = node_facts(self._spec, self._met.host, self._address, os.environ)
        join = AgentJoined(agent, job_spec(self._spec, VERSION), facts)
        self._state = Supervision(agent, join=join)
        return join

    async def _watch_no_more(self) -> None:
        self._waiting_words.end()
        self._isolation.close()
        self._hangs.end()
        self._communication.end()
        await self._care.end()
        self._question.withdraw()

    def _begin_preflight(self) -> Preflight | None:
        if self._spec.preflight == "off":
            return None
        from launcher.preflight.agent_preflight import Preflight

        return Preflight(self._spec, lambda line: self._logs.say(f"ddp-launch: {line}"), self._boundary)

    async def _consume(self) -> Finish:
        while True:
            fact = await self._facts.get()
            before = self._state.phase
            self._state, actions = supervision.step(self._state, fact)
            self._status.update(self._state, fact)
            self._announcer.tell(fact, self._state, before)
            if not self._status.is_seen:
                self._waiting_words.hear(fact)
            for action in actions:
                if isinstance(action, Finish):
                    return action
                self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send(message):
                self._met.session.send(message)
            case OpenStore(generation):
                self._zygotes.zygote.keep(
                    generation, self._spec.master_addr or self._address, self._spec.master_port
                )
            case ReachStore(assignment, store):
                self._errands.begin(self._errands.reach_store(self._state.agent.node, assignment, store))
            case AskCheckpoint(assignment, reason, hurried):
                grace_s = self._spec.checkpoint_grace_s if hurried else None
                self._question.ask(assignment.generation, reason, grace_s)
            case StartRanks(assignment, store):
                self._question.withdraw()  # one of an earlier generation
                self._zygotes.ranks_started()
                for rank_ended in self._ranks.start(self._zygotes.zygote, assignment, store):
                    self._facts.put_nowait(rank_ended)
                self._hangs.begin(assignment.generation)
                self._care.ranks_started(assignment.generation)
            case LookAtRanks(generation):
                self._errands.begin(self._errands.look_at_ranks(generation))
            case LookBack(generation):
                self._errands.look_back(generation)
            case TakeStacks(generation, cause):
                self._errands.begin(self._errands.take_stacks(generation, cause))
            case BreakOff(generation, reason):
                self._communication.break_off(generation, reason)
            case SignalRanks(signum, only):
                if only is None:
                    self._ranks.note_stop(signum)
                self._zygotes.zygote.signal(signum, only)
            case StartGrace(generation, of_accused):
                grace = min(self._spec.shutdown_timeout_s, _GRACE_OF_ACCUSED_S if of_accused else math.inf)
                self._loop.call_later(grace, self._facts.put_nowait, GraceOver(generation, of_accused))
            case Sweep(generation):
                self._zygotes.zygote.sweep(generation)

    # --- where facts come from ---------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            self._facts.put_nowait(await self._met.session.receive())

    def _checkpoint_over(self, generation: int, taken: bool) -> None:
        self._facts.put_nowait(CheckpointOver(generation, taken))

    def _contact(self, held: bool) -> None:
        self._isolation.contact(held)
        self._hangs.contact(held)

    def isolated(self, reason: str) -> None:
        self._facts.put_nowait(Isolated(reason))

    def waiting_alone(self, give_up_s: float) -> None:
        if self._state.phase is not Phase.DONE:
            text = "cannot reach the rendezvous any more, and no rank runs here"
            self._logs.say(f"ddp-launch: {text}; trying on for {give_up_s:g} s")

    def out_of_reach(self, reason: str) -> None:
        self._facts.put_nowait(Refused(reason, TRY_AGAIN))

    def _watch_stop_signals(self) -> None:
        """Before anything that may take its time. The other signals stay blocked: they are about ranks."""
        self._signals = SignalWatch()
        stops = set(self._spec.signals)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            stops.discard(signal.SIGHUP)  # nohup: its user wants the job to survive the terminal
        for signum in stops:
            self._signals.on(signum, self._stop_requested)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)

    def _watch_signals(self) -> None:
        for signum in self._spec.forwarded_signals:
            self._signals.on(signum, self._zygote_signal)
        for signum in self._spec.checkpoint_signals:
            self._signals.on(signum, self._checkpoint_signalled)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._spec.handled_signals)

    def _stop_requested(self, signum: int) -> None:
        self._facts.put_nowait(StopRequested(signum, signal_name(signum)))

    def _checkpoint_signalled(self, signum: int) -> None:
        if self._spec.checkpoint_if_watched and not self._question.is_watched(self._state.generation):
            return (
                self._stop_requested(signum) if signum in self._spec.signals else self._zygote_signal(signum)
            )
        name = signal_name(signum)
        stop = StopRequested(signum, name) if signum in self._spec.signals else None
        self._facts.put_nowait(CheckpointSignal(name, stop))

    def _zygote_signal(self, signum: int) -> None:
        self._zygotes.zygote.signal(signum)

    async def _zygote_told(self, report: Report) -> None:
        match report:
            case Ready(_is_warm, reason):
                self._tell_of_plain_start(reason or self._starter.obstacle)
            case Started():
                self._ranks.note_started(report)
            case Exited():
                ended = await self._ranks.ended(report)
                explain = partial(self._care.explained, ended)
                self._facts.put_nowait(self._boundary.called("the node's health", explain, ended))
            case Keeping():
                self._store_listens(report)
            case ZygoteSwept(generation):
                self._facts.put_nowait(Swept(generation))
            case _:
                assert_never(report)

    def _store_listens(self, report: Keeping) -> None:
        host = self._spec.master_addr or self._address
        if report.error:
            where = f"{host}:{self._spec.master_port}"
            reason = f"the store cannot listen on {where}: {report.error}"
            self._facts.put_nowait(StoreFailed(report.generation, reason))
            return
        store = StoreAddress(host, report.port, report.is_kept)
        self._facts.put_nowait(StoreListens(report.generation, store))

    def _ranks_lost(self, reason: str) -> None:
        for rank_ended in self._ranks.lost_with_zygote(reason):
            self._facts.put_nowait(rank_ended)

    # --- what people see ---------------------------------------------------------------------------

    def _tell_of_plain_start(self, reason: str) -> None:
        if self._spec.warm_start and reason and self._spec.entry.kind is not EntryKind.PROGRAM:
            self._logs.say(f"ddp-launch: ranks start without the warm start: {reason}")

    async def _turned_away(self, finish: Finish) -> int:
        self._zygotes.close()
        await self._zygotes.ended()
        await asyncio.to_thread(self._logs.close, _EXIT_DRAIN_S)
        exit_code = ending.tell(self._spec, self._folder, finish, all_shown=True)
        self._signals.close()
        return exit_code

    async def _leave(self, finish: Finish) -> int:
        """In threads where it may take its time: others may still hear from the service in this process."""
        self._zygotes.close()  # it ends while we see to the rest
        self._logs.progress("")
        all_shown = await asyncio.to_thread(self._logs.close, _EXIT_DRAIN_S)
        await self._zygotes.ended()
        await self._met.leave()
        exit_code = ending.tell(self._spec, self._folder, finish, all_shown)
        self._signals.close()  # one more Ctrl-C must not change it
        return exit_code
