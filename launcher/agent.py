"""The I/O of the agent: all events go into one queue; one consumer passes them to the state machine.

Events come from the rendezvous session, the zygote's socket, signals, and the timer of the grace period. Only the
consumer changes the state, and it runs the resulting actions in order. See launcher/supervision.py for what the agent
does, and why.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import assert_never

import _ddp_launch_entry as doors
from launcher import error_boundary, supervision
from launcher.error_boundary import ErrorBoundary
from launcher.exchange import (
    AbortGroups,
    Action,
    AgentPhase,
    AgentStep,
    AskCheckpoint,
    CheckpointSignal,
    Finish,
    Grace,
    GraceOver,
    InspectLast,
    InspectRanks,
    Isolated,
    NodePrepared,
    OpenStore,
    PauseRanks,
    PrepareNode,
    ReachStore,
    Send,
    SignalRanks,
    StartGrace,
    StartRanks,
    StopRequested,
    StoreFailed,
    StoreListens,
    StoreLost,
    Supervision,
    Sweep,
    Swept,
    TakeStacks,
)
from launcher.failure.ending import Farewell
from launcher.joining.connect import CannotConnect, ServiceConnection, open_session
from launcher.settings.spec import EntryKind, LaunchSpec
from launcher.stop_requests import ParentSignals, unless_stopped
from launcher.template import messages
from launcher.template.messages import Exited, KeeperEnded, Keeping, Late, Ready, Report
from launcher.wiring import (
    JobKeeper,
    Parts,
    Shell,
    begin_preflight,
    build_parts,
    keeper_of,
    leave_and_close,
    observers_of,
)
from rendezvous.signals import SignalWatch
from rendezvous.values.cause_text import signal_name
from rendezvous.values.contracts import TRY_AGAIN
from rendezvous.values.events import AgentStopped, FromAgent, Refused, Waiting
from rendezvous.values.questions import LOGS_ARE_IN, Remark
from rendezvous.values.types import Assignment, StoreAddress

_GRACE_OF_ACCUSED_S = 1.0  # of ranks that have made no progress for a long time and block the others
_LAST_GRACE_S = 5.0  # after the SIGTERM that follows SIGINT
_UNASKED_S = 0.5  # other agents report the end of a rank sooner
_SHARE_TOGETHER = (
    2 / 3
)  # of --shutdown-timeout: after that, collectives are aborted, and a third is left to save
# For processes that a rank has started in a session of their own. That of Weights & Biases ends 0.1 s after its rank.
_DETACHED_S = 2.0
_NODES_THAT_NAME_LOGS = 16


def _grace_s(kind: Grace, timeout_s: float) -> float:
    match kind:
        case Grace.FULL:
            return timeout_s
        case Grace.OF_ACCUSED:
            return min(timeout_s, _GRACE_OF_ACCUSED_S)
        case Grace.TOGETHER:
            return timeout_s * _SHARE_TOGETHER
        case Grace.LAST:
            return min(timeout_s, _LAST_GRACE_S)
        case Grace.UNASKED:
            return _UNASKED_S
        case _:
            assert_never(kind)


class Agent:
    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._spec, self._logs, self._zygotes = shell.spec, shell.logs, shell.zygotes
        self._events = shell.events
        self._connected: Parts | None = None
        self._keeper: JobKeeper | None = None
        self._logs_named = False

    @property
    def _parts(self) -> Parts:
        assert self._connected is not None, "internal error: used before the agent has connected"
        return self._connected

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._watch_stop_signals()
        preflight = begin_preflight(self._shell)
        incarnation = f"{os.getpid()}-{time.time_ns():x}"
        session = open_session(self._spec, incarnation, self._shell.journals)
        try:
            connection = await unless_stopped(session, self._events)
        except CannotConnect as error:
            return await self._end(Finish(error.exit_code, f"error: {error}", code=error.code))
        if isinstance(connection, StopRequested):
            return await self._end(Finish(128 + connection.signum, f"stopped by {connection.name}"))
        self._shell.user_messages.report_shared_id()
        self._shell.user_messages.report_debug()
        self._connected = build_parts(self._shell, connection, self)
        self._ranks, join = self._parts.ranks, self._parts.join
        self._state = Supervision(connection.agent, join=join)
        await self._parts.communication.begin()
        self._watch_signals()
        if preflight is not None:
            try:
                join = await preflight.checked(join, connection, self._events)
            except CannotConnect as error:
                return await self._end(
                    Finish(error.exit_code, f"error: {error}", code=error.code), connection.leave
                )
            self._state = Supervision(connection.agent, join=join)
        connection.session.send(join)
        await self._parts.node.begin(lambda: self._state)
        self._parts.desk.begin(lambda: self._state)
        self._page = JobPage(self._spec, connection, self._shell.user_messages.say, self._shell.boundary)
        self._page.begin()
        self._keeper = keeper_of(self._shell, connection, self._parts.measured)
        if self._keeper is not None:
            self._keeper.follow()
        async with asyncio.TaskGroup() as tasks:
            zygotes = self._zygotes.run(self._on_zygote_report, self._ranks_lost, self._events.put_nowait)
            owned = [tasks.create_task(each) for each in (self._receive(), self._shell.status.run(), zygotes)]
            finish = await self._consume()
            for task in owned:
                task.cancel()
        await self._parts.tasks.end()
        self._shell.waiting_messages.end()
        await self._parts.end()
        return await self._end(finish, self._leave)

    async def _leave(self) -> None:
        await self._parts.desk.end()
        await self._page.end()
        self._keeper = self._keeper or keeper_of(self._shell, self._parts.connection, self._parts.measured)
        await self._parts.connection.leave()

    async def _consume(self) -> Finish:
        observers = observers_of(self._shell, self._parts, self._state)
        while True:
            event = await self._events.get()
            before = self._state
            self._state, actions = supervision.step(before, event)
            if self._state.assignment is not before.assignment:
                self._parts.tasks.prepare(None)
            step = AgentStep(event, before, self._state, actions)
            for observer in observers:
                observer.observe(step)
            for action in actions:
                if isinstance(action, Finish):
                    return action
                self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send(message):
                self._parts.time.before_sending(message)
                self._parts.connection.session.send(self._completed(message))
            case PrepareNode(assignment, frees_memory):
                self._parts.tasks.prepare(self._prepare(assignment, frees_memory))
            case OpenStore(generation):
                self._zygotes.zygote.keep(
                    generation,
                    self._spec.master_addr or self._parts.connection.address,
                    self._spec.master_port,
                    self._shell.starter.store_command(),
                )
            case ReachStore(assignment, store):
                self._parts.tasks.begin(
                    self._parts.tasks.reach_store(self._state.agent.node, assignment, store)
                )
            case AskCheckpoint(assignment, reason, has_deadline):
                grace_s = self._spec.checkpoint_grace_s if has_deadline else None
                self._parts.question.ask(assignment.generation, reason, grace_s)
            case StartRanks(assignment, store, kept):
                self._start_ranks(assignment, store, kept)
            case InspectRanks(generation):
                self._parts.tasks.begin(self._parts.tasks.inspect_ranks(generation))
            case InspectLast(generation):
                self._parts.tasks.inspect_last(generation)
            case TakeStacks(generation, cause):
                self._parts.tasks.begin(self._parts.tasks.take_stacks(generation, cause))
            case PauseRanks(generation, local_ranks, reason):
                self._ranks.note_stop(only=local_ranks)
                self._parts.communication.pause(generation, local_ranks, reason)
            case AbortGroups(generation, reason, only):
                self._parts.communication.abort_groups(generation, reason, only)
            case SignalRanks(signum, only):
                self._ranks.note_stop(signum, only)
                self._zygotes.signal(signum, self._ranks.pids(only), only)
            case StartGrace(generation, kind):
                grace_s = _grace_s(kind, self._spec.shutdown_timeout_s)
                self._loop.call_later(grace_s, self._events.put_nowait, GraceOver(generation, kind))
            case Sweep(generation, hurried, kept):
                self._zygotes.sweep(generation, 0.0 if hurried else _DETACHED_S, kept)

    async def _prepare(self, assignment: Assignment, frees_memory: bool) -> None:
        await self._parts.before_restart.prepare(assignment, frees_memory=frees_memory)
        self._events.put_nowait(NodePrepared(assignment.generation))

    def _start_ranks(self, assignment: Assignment, store: StoreAddress, kept: tuple[int, ...]) -> None:
        """Let parked ranks continue, and start the others."""
        self._parts.restarts.ranks_started(assignment.generation)
        self._parts.question.withdraw()  # a request of an earlier generation
        self._zygotes.ranks_started()
        for move in self._ranks.carry_over(assignment, store, kept):
            if not self._parts.communication.carry_on(move):  # it would wait forever
                self._zygotes.zygote.signal(signal.SIGKILL, (move.local_rank,))
        for rank_ended in self._ranks.start(self._zygotes.zygote, assignment, store, kept):
            self._events.put_nowait(rank_ended)
        for watcher in self._parts.watchers:
            watcher.begin(assignment.generation)
        self._parts.node.ranks_started()
        self._name_logs(assignment)

    def _name_logs(self, assignment: Assignment) -> None:
        """Once, to a service: it has the events of the job when this agent is gone. The first nodes are enough."""
        connection = self._parts.connection
        if not self._logs_named and connection.endpoints and assignment.node_rank < _NODES_THAT_NAME_LOGS:
            text = f"{LOGS_ARE_IN}{self._shell.folder.path}"
            connection.session.tell(Remark(assignment.generation, "logs", text))
        self._logs_named = True

    def _completed(self, message: FromAgent) -> FromAgent:
        if not isinstance(message, AgentStopped):
            return message
        how_far = self._ranks.pages.reached
        reached = self._shell.boundary.called("reading how many steps the ranks have finished", how_far, None)
        generation, saved = message.generation, self._ranks.saved
        found = self._shell.boundary.called(
            "reading what the ranks have saved", lambda: saved(generation), None
        )
        return replace(message, reached=reached, saved=found)

    # --- sources of events ---------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            message = await self._parts.connection.session.receive()
            self._events.put_nowait(message)
            if isinstance(message, Waiting) and message.imports and self._spec.learn_imports:
                self._zygotes.zygote.learn(message.imports)

    def isolated(self, reason: str) -> None:
        self._events.put_nowait(Isolated(reason))

    def waiting_alone(self, give_up_s: float) -> None:
        if self._state.phase is not AgentPhase.DONE:
            text = "cannot reach the rendezvous, and no rank runs on this node"
            self._logs.say(f"ddp-launch: {text}; retrying for {give_up_s:g} s (--join-timeout)")

    def out_of_reach(self, reason: str) -> None:
        self._events.put_nowait(Refused(reason, TRY_AGAIN))

    def _watch_stop_signals(self) -> None:
        """Handle stop signals before any slow step. The other signals concern ranks and stay blocked for now."""
        self._signals = SignalWatch()
        stops = set(self._spec.signals)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            stops.discard(signal.SIGHUP)  # nohup: the user wants the job to survive the terminal
        self._stops = stops
        self._parent_signals = ParentSignals(stops, lambda: self._state.trains_undisturbed, self._logs.say)
        for signum in stops:
            self._signals.on(signum, self._on_stop_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
        self._signals.on(signal.SIGWINCH, self._terminal_resized)
        self._signals.on(signal.SIGCONT, lambda _signum: self._logs.resumed())

    def _watch_signals(self) -> None:
        for signum in self._spec.forwarded_signals:
            self._signals.on(signum, self._forward_signal)
        for signum in self._spec.checkpoint_signals:
            self._signals.on(signum, self._on_checkpoint_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._spec.handled_signals)

    def _on_stop_signal(self, signum: int) -> None:
        self._events.put_nowait(StopRequested(signum, signal_name(signum)))

    def _on_checkpoint_signal(self, signum: int) -> None:
        if self._spec.checkpoint_if_watched and not self._parts.question.is_watched(self._state.generation):
            return (
                self._on_stop_signal(signum) if signum in self._spec.signals else self._forward_signal(signum)
            )
        name = signal_name(signum)
        stop = StopRequested(signum, name) if signum in self._spec.signals else None
        self._events.put_nowait(CheckpointSignal(name, stop))

    def _terminal_resized(self, signum: int) -> None:
        """Ranks get the signal from us, after the size: the kernel sends it only to those who control a terminal."""
        self._logs.resized(partial(error_boundary.call_in, self._loop, self._forward_signal, signum))

    def _forward_signal(self, signum: int) -> None:
        self._zygotes.zygote.signal(signum)

    async def _on_zygote_report(self, report: Report) -> None:
        match report:
            case Ready(reason):
                self._report_plain_start(reason or self._shell.starter.obstacle)
            case messages.Started():
                self._ranks.note_started(report)
                self._parts.time.note_started(report.local_rank)
                self._parts.restarts.forked()
            case Exited():
                ended = await self._ranks.ended(report)
                explain = partial(self._parts.node.with_node_problems, ended)
                self._events.put_nowait(
                    self._shell.boundary.called("reading the health of the node", explain, ended)
                )
            case Keeping():
                self._store_listens(report)
            case KeeperEnded(generation, reason):
                words = f"the store through which the ranks connect has ended: {reason}"
                self._events.put_nowait(StoreLost(generation, words))
            case messages.Signalled(signum, local_rank):
                self._parent_signals.sent(signum, local_rank)
            case messages.Learned(names):
                self._parts.time.learned(names)
            case Late(variables, file):
                self._report_late_variables(variables, file)
            case messages.SweepDone(generation):
                self._events.put_nowait(Swept(generation))
            case _:
                assert_never(report)

    def _store_listens(self, report: Keeping) -> None:
        host = self._spec.master_addr or self._parts.connection.address
        if report.error:
            where = f"{host}:{self._spec.master_port}"
            reason = (
                f"the store cannot listen on {where}: {report.error}. Use another --master-port, or omit the "
                "option"
            )
            self._events.put_nowait(StoreFailed(report.generation, reason))
            return
        store = StoreAddress(host, report.port, report.is_kept)
        self._events.put_nowait(StoreListens(report.generation, store))

    def _ranks_lost(self, reason: str) -> None:
        for rank_ended in self._ranks.lost_with_zygote(reason):
            self._events.put_nowait(rank_ended)

    # --- messages and the end ---------------------------------------------------------------------------

    def _report_plain_start(self, reason: str) -> None:
        if self._spec.warm_start and reason and self._spec.entry.kind is not EntryKind.PROGRAM:
            self._logs.say(f"ddp-launch: warm start is not possible ({reason}): the ranks start more slowly")

    def _report_late_variables(self, variables: tuple[str, ...], file: str) -> None:
        set_by = f"{file} sets" if file else "the script sets"
        self._logs.say(
            f"ddp-launch: warning: {', '.join(variables)}: {set_by} this before the first import of torch, which has "
            "no effect: the ranks are forks of a process that has imported torch. Set it before you start "
            "ddp-launch, or use --no-warm-start"
        )

    async def _end(self, finish: Finish, leave: Callable[[], Awaitable[None]] | None = None) -> int:
        """Show the rest of the output, leave the rendezvous, and report how the job ended.

        Slow steps run in threads, so that a rendezvous in this process can still answer other nodes.
        """
        self._zygotes.close()  # it ends while the other steps run
        self._logs.progress("")
        self._shell.announcer.finish(finish)
        farewell = self._farewell(finish)
        showing = asyncio.ensure_future(farewell.show_output())
        await self._zygotes.ended()
        await leave_and_close(self._shell, finish, leave)
        exit_code = await farewell.tell(await showing)
        await asyncio.to_thread(self._shell.announcer.close)
        self._signals.close()  # one more Ctrl-C must not change the exit code
        return exit_code

    def _farewell(self, finish: Finish) -> Farewell:
        """From now on, a stop signal ends the wait for the reader of the output, because no rank is left to stop."""
        time_words = self._parts.time.summary(finish.outcome) if self._connected is not None else ""
        farewell = Farewell(
            *(self._spec, self._shell.folder, self._logs, finish),
            self._keep_history,
            time_words,
        )
        for signum in self._stops:
            self._signals.on(signum, farewell.hurry)
        return farewell

    def _keep_history(self, removes_logs: bool) -> None:
        if self._keeper is not None:
            end = partial(self._keeper.end, removes_logs=removes_logs)
            self._shell.boundary.called("keeping the history of the job", end, None)


# --- the page of the job ---------------------------------------------------------------------------
#
# `--web`: the page of this job, served by its agent. Its packages are loaded beside the start of the job.


class JobPage:
    def __init__(
        self,
        spec: LaunchSpec,
        connection: ServiceConnection,
        say: Callable[[str], None],
        boundary: ErrorBoundary,
    ) -> None:
        self._spec, self._connection, self._say, self._boundary = spec, connection, say, boundary
        self._starting: asyncio.Task[None] | None = None
        self._close: Callable[[], Awaitable[None]] | None = None

    def begin(self) -> None:
        if self._spec.web:
            work = self._boundary.awaited("serving the page", self._serve(), None)
            self._starting = asyncio.get_running_loop().create_task(work, name="start of the page")

    async def _serve(self) -> None:
        connection = self._connection
        url, self._close = await doors.find(doors.PAGE, "web").of_job(
            self._spec.job.job_id, connection.job, connection.endpoints, connection.options
        )
        self._say(f"the page of this job, for one login: {url}")

    async def end(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._close is not None:
            await self._boundary.awaited("closing the page", self._close(), None)
