"""The agent's shell: one queue of facts, and one consumer that steps the machine and runs its actions in order.

Facts come from four sources (the rendezvous session, the zygote's socket, signals, the grace clock), all through the
queue. Only the consumer changes the state. See launcher/supervision.py for what the agent does, and why.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from functools import partial
from typing import assert_never

from launcher import supervision
from launcher.exchange import (
    Action,
    AskCheckpoint,
    BreakOff,
    CheckpointSignal,
    Finish,
    GraceOver,
    Isolated,
    LookAtRanks,
    LookBack,
    OpenStore,
    ReachStore,
    Send,
    SignalRanks,
    StartGrace,
    StartRanks,
    StopRequested,
    StoreFailed,
    StoreListens,
    StoreLost,
    Sweep,
    Swept,
    TakeStacks,
)
from launcher.failure.ending import Farewell
from launcher.failure.verdict import signal_name
from launcher.joining.connect import CannotConnect, open_session
from launcher.settings.spec import EntryKind
from launcher.stop_requests import unless_stopped
from launcher.supervised import Phase, Supervision
from launcher.supervision import TRY_AGAIN
from launcher.template.messages import Exited, KeeperEnded, Keeping, Ready, Report, Started
from launcher.template.messages import Swept as ZygoteSwept
from launcher.wiring import Shell, begin_preflight, build_parts
from rendezvous.signals import SignalWatch
from rendezvous.values.events import Refused
from rendezvous.values.types import StoreAddress

_GRACE_OF_ACCUSED_S = 1.0  # of ranks that have made no progress for a long time and block the others


class Agent:
    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._spec, self._logs, self._zygotes = shell.spec, shell.logs, shell.zygotes
        self._facts = shell.facts

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._watch_stop_signals()
        preflight = begin_preflight(self._shell)
        incarnation = f"{os.getpid()}-{time.time_ns():x}"
        try:
            connection = await unless_stopped(open_session(self._spec, incarnation), self._facts)
        except CannotConnect as error:
            return await self._turned_away(Finish(error.exit_code, f"error: {error}"))
        if isinstance(connection, StopRequested):
            return await self._turned_away(Finish(128 + connection.signum, f"stopped by {connection.name}"))
        self._parts = build_parts(self._shell, connection, self)
        self._ranks, join = self._parts.ranks, self._parts.join
        self._state = Supervision(connection.agent, join=join)
        await self._parts.communication.begin()
        self._watch_signals()
        if preflight is not None:
            try:
                join = await preflight.checked(join, connection, self._facts)
            except CannotConnect as error:
                await connection.leave()
                return await self._turned_away(Finish(error.exit_code, f"error: {error}"))
            self._state = Supervision(connection.agent, join=join)
        connection.session.send(join)
        await self._parts.node.begin(lambda: self._state)
        async with asyncio.TaskGroup() as tasks:
            zygotes = self._zygotes.run(self._zygote_told, self._ranks_lost, self._facts.put_nowait)
            owned = [tasks.create_task(each) for each in (self._receive(), self._shell.status.run(), zygotes)]
            finish = await self._consume()
            for task in owned:
                task.cancel()
        await self._parts.errands.end()
        self._shell.waiting_words.end()
        await self._parts.end()
        return await self._leave(finish)

    async def _consume(self) -> Finish:
        while True:
            fact = await self._facts.get()
            before = self._state.phase
            self._state, actions = supervision.step(self._state, fact)
            self._shell.status.update(self._state, fact)
            self._shell.user_messages.report(fact, self._state, before)
            if not self._shell.status.is_seen:
                self._shell.waiting_words.hear(fact)
            for action in actions:
                if isinstance(action, Finish):
                    return action
                self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send(message):
                self._parts.connection.session.send(message)
            case OpenStore(generation):
                self._zygotes.zygote.keep(
                    generation,
                    self._spec.master_addr or self._parts.connection.address,
                    self._spec.master_port,
                )
            case ReachStore(assignment, store):
                self._parts.errands.begin(
                    self._parts.errands.reach_store(self._state.agent.node, assignment, store)
                )
            case AskCheckpoint(assignment, reason, hurried):
                grace_s = self._spec.checkpoint_grace_s if hurried else None
                self._parts.question.ask(assignment.generation, reason, grace_s)
            case StartRanks(assignment, store):
                self._parts.question.withdraw()  # a request of an earlier generation
                self._zygotes.ranks_started()
                for rank_ended in self._ranks.start(self._zygotes.zygote, assignment, store):
                    self._facts.put_nowait(rank_ended)
                self._parts.hangs.begin(assignment.generation)
                self._parts.node.ranks_started(assignment.generation)
            case LookAtRanks(generation):
                self._parts.errands.begin(self._parts.errands.look_at_ranks(generation))
            case LookBack(generation):
                self._parts.errands.look_back(generation)
            case TakeStacks(generation, cause):
                self._parts.errands.begin(self._parts.errands.take_stacks(generation, cause))
            case BreakOff(generation, reason):
                self._parts.communication.break_off(generation, reason)
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
            self._facts.put_nowait(await self._parts.connection.session.receive())

    def isolated(self, reason: str) -> None:
        self._facts.put_nowait(Isolated(reason))

    def waiting_alone(self, give_up_s: float) -> None:
        if self._state.phase is not Phase.DONE:
            text = "lost contact with the rendezvous, and no rank runs on this node"
            self._logs.say(f"ddp-launch: {text}; retrying for {give_up_s:g} s")

    def out_of_reach(self, reason: str) -> None:
        self._facts.put_nowait(Refused(reason, TRY_AGAIN))

    def _watch_stop_signals(self) -> None:
        """Handle stop signals before any slow step. The other signals stay blocked: they concern ranks."""
        self._signals = SignalWatch()
        stops = set(self._spec.signals)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            stops.discard(signal.SIGHUP)  # nohup: the user wants the job to survive the terminal
        self._stops = stops
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
        if self._spec.checkpoint_if_watched and not self._parts.question.is_watched(self._state.generation):
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
                self._tell_of_plain_start(reason or self._shell.starter.obstacle)
            case Started():
                self._ranks.note_started(report)
            case Exited():
                ended = await self._ranks.ended(report)
                explain = partial(self._parts.node.explained, ended)
                self._facts.put_nowait(self._shell.boundary.called("the node's health", explain, ended))
            case Keeping():
                self._store_listens(report)
            case KeeperEnded(generation, reason):
                words = f"the store through which the ranks connect has ended: {reason}"
                self._facts.put_nowait(StoreLost(generation, words))
            case ZygoteSwept(generation):
                self._facts.put_nowait(Swept(generation))
            case _:
                assert_never(report)

    def _store_listens(self, report: Keeping) -> None:
        host = self._spec.master_addr or self._parts.connection.address
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
        farewell = self._farewell(finish)
        await farewell.show_output()
        exit_code = await farewell.tell(all_shown=True)
        self._signals.close()
        return exit_code

    async def _leave(self, finish: Finish) -> int:
        """Leave. Slow steps run in threads: other nodes may still need the service, which can run in this process."""
        self._zygotes.close()  # it ends while the other steps run
        self._logs.progress("")
        farewell = self._farewell(finish)
        showing = asyncio.ensure_future(farewell.show_output())
        await self._zygotes.ended()
        await self._parts.connection.leave()
        exit_code = await farewell.tell(await showing)
        self._signals.close()  # one more Ctrl-C must not change the exit code
        return exit_code

    def _farewell(self, finish: Finish) -> Farewell:
        """From here on a stop signal ends the wait for the reader of the output: no rank is left to stop."""
        farewell = Farewell(self._spec, self._shell.folder, self._logs, finish)
        for signum in self._stops:
            self._signals.on(signum, farewell.hurry)
        return farewell
