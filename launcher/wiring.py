"""Builds the components of an agent. `Agent` itself only passes events to the state machine and runs its actions.

`Shell` exists from the start: logs, the zygote, messages for users. `Parts` are built after the agent has connected to
the rendezvous: the ranks, and what watches them. All components put their events into the queue of the shell. The
smaller components are defined below, in the order in which a job uses them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import _ddp_launch_entry as doors
from launcher import progress
from launcher.answers import restart_watch
from launcher.answers.desk import Desk
from launcher.answers.measured import Measured
from launcher.answers.restart_watch import RestartClock, RestartWatch, Traces
from launcher.before_restart import BeforeRestart
from launcher.error_boundary import ErrorBoundary
from launcher.exchange import (
    AgentEvent,
    AgentPhase,
    AgentStep,
    CheckpointOver,
    CheckpointSignal,
    Finish,
    GpusFound,
    Grace,
    GraceOver,
    Inspected,
    Isolated,
    LastInspected,
    RankEnded,
    StacksTaken,
    StallDetected,
    StepObserver,
    StopRequested,
    StoreReached,
    Supervision,
)
from launcher.failure.symptoms import is_consequence
from launcher.health import page
from launcher.health.communication import CommunicationWatch
from launcher.health.hang_watch import HangWatch
from launcher.health.node_watch import NodeWatch, PhaseTimesWatch, Requests
from launcher.health.stall_detection import excused
from launcher.health.stop_watch import StopWatch
from launcher.health.time_watch import TimeWatch
from launcher.joining import addresses
from launcher.joining.join import node_facts
from launcher.notify.notifier import EventNotifier
from launcher.output.lines import can_redraw, printable
from launcher.output.log_file import LogFolder
from launcher.output.logs import LogPump
from launcher.progress import ProgressSigns
from launcher.ranks.checkpoint_request import CheckpointRequester
from launcher.ranks.worker import Workers
from launcher.ranks.zygote_watch import ZygoteWatch
from launcher.template import tree
from launcher.template.tree import process_stat
from rendezvous.replay.journal import Journals
from rendezvous.values.cause_text import counted, ranks
from rendezvous.values.events import AgentJoined, Assigned, CheckpointRequested, Notice, Stop, Waiting
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.types import Assignment, Cause, Decision, DecisionKind, FailureClass, StoreAddress

if TYPE_CHECKING:
    from launcher.health.watcher import RankWatcher
    from launcher.joining.connect import ServiceConnection
    from launcher.preflight.agent_preflight import Preflight
    from launcher.ranks.zygote import Zygote
    from launcher.ranks.zygote_starter import ZygoteStarter
    from launcher.settings.spec import LaunchSpec
    from rendezvous.replay.records import Machine
    from rendezvous.values.questions import LoggedSeen, Remark
    from rendezvous.values.rank_view import RankView


@dataclass(frozen=True, slots=True)
class Shell:
    spec: LaunchSpec
    starter: ZygoteStarter
    events: asyncio.Queue[AgentEvent]
    folder: LogFolder
    logs: LogPump
    zygotes: ZygoteWatch
    boundary: ErrorBoundary
    status: StatusLine
    user_messages: UserMessages
    waiting_messages: WaitingMessages
    began: float  # on the monotonic clock
    announcer: EventNotifier
    journals: Journals | None


def build_shell(spec: LaunchSpec, starter: ZygoteStarter, zygote: Zygote) -> Shell:
    folder = LogFolder(spec)
    logs = LogPump(spec.log, folder.path, file_limit=folder.file_limit)
    if folder.warning:
        logs.say(f"ddp-launch: warning: {folder.warning}")
    logs.is_consequence = is_consequence
    user_messages = UserMessages(spec, logs.say, logs.say_of_failure)
    boundary = ErrorBoundary(logs.say)
    return Shell(
        spec,
        starter,
        asyncio.Queue(),
        folder,
        logs,
        ZygoteWatch(starter, zygote, logs.say),
        boundary,
        StatusLine(spec, logs),
        user_messages,
        WaitingMessages(user_messages.say),
        time.monotonic(),
        EventNotifier(spec, logs.say, boundary),
        _journals(folder, spec.log.journal_limit, logs),
    )


def _journals(folder: LogFolder, limit: int, logs: LogPump) -> Journals | None:
    """The user did not ask for a temporary folder, so do not report what is missing there."""

    def complain(text: str) -> None:
        if not folder.temporary:
            logs.say(f"ddp-launch: warning: {text}")

    return Journals(folder.path, limit, complain) if limit else None


class JournalObserver:
    """Writes each step of the agent's state machine, which begins with this state."""

    def __init__(self, journals: Journals, node: str, state: Supervision) -> None:
        self._now = asyncio.get_running_loop().time
        self._journal = journals.open(f"journal_agent_{node}", _agent_machine)
        self._journal.started(state, self._now())

    def observe(self, step: AgentStep) -> None:
        self._journal.took(step.event, self._now(), step.actions, step.after)


def observers_of(shell: Shell, parts: Parts, state: Supervision) -> tuple[StepObserver, ...]:
    """All that see the steps of the agent, in this order."""
    node = parts.connection.agent.node
    journal = () if shell.journals is None else (JournalObserver(shell.journals, node, state),)
    messages = (shell.user_messages, *(() if shell.status.is_seen else (shell.waiting_messages,)))
    return (*journal, parts.time, shell.announcer, shell.status, *messages, parts.restarts)


class JobKeeper(Protocol):
    """Keeps a job for ddpctl, after its end: a wing."""

    measured: Callable[[], tuple[LoggedSeen, LoggedSeen]]  # `ddp.log`, and how much of the node was used

    def follow(self) -> None: ...
    def end(self, *, removes_logs: bool) -> None: ...


def keeper_of(shell: Shell, connection: ServiceConnection, measured: Measured) -> JobKeeper | None:
    """None: a service keeps the job, or it has not begun here, or the wing is not installed."""
    job, log, folder = connection.served(), shell.spec.log, shell.folder
    if job is None:
        return None
    try:
        wing = doors.find(doors.HISTORY, "files")
    except doors.WingMissing:
        return None
    keeper: JobKeeper = wing.keeper(
        job, log.history_dir, log.history_jobs, folder.path, is_temporary=folder.temporary
    )
    keeper.measured = measured.all
    return keeper


async def leave_and_close(shell: Shell, finish: Finish, leave: Callable[[], Awaitable[None]] | None) -> None:
    """Leave the rendezvous, then close the journals, unless they are discarded together with their folder."""
    if shell.journals is not None and shell.folder.temporary and finish.exit_code == 0:
        shell.journals.discard()
    if leave is not None:
        await leave()
    if shell.journals is not None:
        await asyncio.to_thread(shell.journals.close)


def _agent_machine() -> Machine:
    from launcher.replaying import machine

    return machine()


def begin_preflight(shell: Shell) -> Preflight | None:
    return _preflight_of(shell, shell.spec)


def _preflight_of(shell: Shell, spec: LaunchSpec) -> Preflight | None:
    if spec.preflight == "off" and not spec.health_sources and not spec.topology:
        return None
    from launcher.preflight.agent_preflight import Preflight

    return Preflight(spec, lambda line: shell.logs.say(f"ddp-launch: {line}"), shell.boundary)


@dataclass(frozen=True, slots=True)
class Parts:
    connection: ServiceConnection
    join: AgentJoined
    ranks: Workers
    question: CheckpointRequester
    isolation: IsolationWatch
    communication: CommunicationWatch
    hangs: HangWatch
    tasks: BackgroundTasks
    node: NodeWatch
    desk: Desk
    time: TimeWatch
    restarts: RestartWatch
    before_restart: BeforeRestart
    measured: Measured
    watchers: tuple[RankWatcher, ...]  # of the ranks of a generation

    async def end(self) -> None:
        self.isolation.close()
        for watcher in self.watchers:
            watcher.end()
        self.communication.end()
        await self.node.end()
        self.question.withdraw()
        self.restarts.end()


def _waiting_for_a_person(logs: LogPump, ranks: Workers) -> list[int]:
    """Return the ranks whose output is not read, or that wait for input: they are not hung."""
    return logs.blocked_ranks() + ranks.waiting_for_input(logs.prompting_ranks())


def build_parts(shell: Shell, connection: ServiceConnection, listener: IsolationListener) -> Parts:
    spec, scratch, report = shell.spec, shell.starter.scratch, shell.events.put_nowait
    ranks = Workers(spec, shell.logs, shell.boundary, connection.host, shell.starter.binding.cpus, scratch)
    shell.logs.input_wait = ranks.input_wait
    seen = partial(shell.boundary.called, "reading pages for the progress line", ranks.pages.views, ())
    shell.status.watch(seen)
    communication = CommunicationWatch(scratch, ranks, shell.logs.say, report)
    hangs = _hang_watch(shell, ranks)
    isolation = IsolationWatch(
        spec.isolation_timeout_s,
        spec.job.join_timeout_s,
        ranks.pids,
        shell.logs.signs_of_life,
        ranks.pages.step,
        listener,
    )

    def contact(is_held: bool) -> None:
        isolation.contact(is_held)
        hangs.contact(is_held)

    connection.session.watch_contact(contact)
    _send_progress(shell, connection, ranks)
    facts = node_facts(spec, connection.host, connection.address, os.environ)
    node = NodeWatch(
        *(spec, shell.folder.path, scratch, ranks.pages, hangs),
        *(shell.logs.say, connection.session.send, shell.boundary),
    )
    node.on_news = shell.announcer.node_news
    node.on_gpus = lambda: report(GpusFound())

    def checkpoint_over(generation: int, taken: bool) -> None:
        report(CheckpointOver(generation, taken))
        desk.checkpoint_over(taken=taken)

    requester = CheckpointRequester(scratch, ranks.ranks, checkpoint_over)
    traces, drills = Traces(ranks, communication), _drills(shell, connection)
    time, stops = _time_watch(shell, connection, ranks, node), _stop_watch(shell, ranks)
    measured = _measured(shell, ranks, node, stops)
    desk = Desk(ranks, node, shell.logs.files, requester, traces, measured, shell.boundary, drills)
    connection.session.answer_with(desk.answer)
    phases = _phase_times_watch(shell, connection, ranks, node)
    return Parts(
        connection,
        AgentJoined(connection.agent, spec.job, facts),
        ranks,
        requester,
        isolation,
        communication,
        hangs,
        BackgroundTasks(shell.boundary, ranks, communication, hangs, report),
        node,
        desk,
        time,
        _restart_watch(shell, connection, ranks, node),
        _before_restart(shell, connection, node),
        measured,
        (hangs, phases, time, stops, measured, Requests(node, shell.boundary)),
    )


def _drills(shell: Shell, connection: ServiceConnection) -> Callable[[Remark], None] | None:
    def drilled(remark: Remark) -> None:
        shell.logs.say(remark.text)
        connection.session.tell(remark)

    return drilled if shell.spec.allow_drill else None


def _before_restart(shell: Shell, connection: ServiceConnection, node: NodeWatch) -> BeforeRestart:
    checks = partial(_preflight_of, shell)
    return BeforeRestart(shell.spec, connection, node, checks, shell.user_messages.say, shell.boundary)


def _send_progress(shell: Shell, connection: ServiceConnection, ranks: Workers) -> None:
    progressed = ranks.pages.progressed_with_others
    connection.session.ask_for_progress(
        lambda: shell.boundary.called("reading the status pages for a heartbeat", progressed, False)
    )


def _measured(shell: Shell, ranks: Workers, node: NodeWatch, stops: StopWatch) -> Measured:
    measured = Measured(ranks.pages, stops.logged, shell.boundary)
    node.logged, shell.announcer.logged = measured.numbers, measured.first
    node.on_use = measured.note_use
    return measured


def _phase_times_watch(
    shell: Shell, connection: ServiceConnection, ranks: Workers, node: NodeWatch
) -> PhaseTimesWatch:
    rule, send = shell.spec.job.stragglers, connection.session.send
    return PhaseTimesWatch(rule, ranks.pages, send, lambda: node.state_now, shell.boundary)


def _hang_watch(shell: Shell, ranks: Workers) -> HangWatch:
    report = shell.events.put_nowait
    return HangWatch(
        shell.spec.hang,
        lambda: excused(ranks.pages.views(), _waiting_for_a_person(shell.logs, ranks)),
        ranks.pages.processes,
        shell.logs.signs_of_life,
        lambda: ranks.store_port,
        lambda generation: report(StallDetected(generation)),
        shell.logs.say,
        shell.boundary,
    )


def _time_watch(shell: Shell, connection: ServiceConnection, ranks: Workers, node: NodeWatch) -> TimeWatch:
    send = connection.session.send
    watch = TimeWatch(shell.spec.nproc, shell.began, ranks.pages, send, shell.boundary)
    node.rank_times = watch.divided
    return watch


def _restart_watch(
    shell: Shell, connection: ServiceConnection, ranks: Workers, node: NodeWatch
) -> RestartWatch:
    def stepped(clock: RestartClock) -> None:
        parts_s = restart_watch.parts_s(clock)
        numbered = (view.step for view in ranks.pages.views() if view.totals.numbers_steps)
        shell.user_messages.report_back(sum(parts_s.values()), min(numbered, default=None))
        shell.announcer.restarted(restart_watch.moments(clock), parts_s)
        node.restarted(parts_s)

    return RestartWatch(ranks.pages, connection.session.tell, stepped, shell.boundary)


def _stop_watch(shell: Shell, ranks: Workers) -> StopWatch:
    report = shell.events.put_nowait
    watch = StopWatch(shell.spec.stop_when, ranks.pages.views, ranks.folders, report, shell.boundary)
    if watch.reads_output:
        shell.logs.latest.on_output = watch.output
    return watch


# --- background tasks ------------------------------------------------------------------------------
#
# Tasks that run beside the agent's main loop. Each task reports exactly one event, even if a part of it fails.


class BackgroundTasks:
    def __init__(
        self,
        boundary: ErrorBoundary,
        ranks: Workers,
        communication: CommunicationWatch,
        hangs: HangWatch,
        happened: Callable[[AgentEvent], None],
    ) -> None:
        self._boundary, self._ranks, self._hangs = boundary, ranks, hangs
        self._communication, self._happened = communication, happened
        self._tasks: set[asyncio.Task[None]] = set()
        self._preparation: asyncio.Task[None] | None = None

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._tasks.add(task := asyncio.get_running_loop().create_task(work))
        task.add_done_callback(self._tasks.discard)
        return task

    def prepare(self, work: Coroutine[Any, Any, None] | None) -> None:
        """End an older preparation: what it would say or ask belongs to a state that is over."""
        if self._preparation is not None:
            self._preparation.cancel()
        self._preparation = None if work is None else self.begin(work)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def reach_store(self, node: str, assignment: Assignment, store: StoreAddress) -> None:
        """Check the connection before the ranks start: a rank reports a connection error only after minutes."""
        looking = addresses.obstacle_to(store.host, store.port, listens=store.kept)
        obstacle = await self._boundary.awaited("checking the connection to the store", looking, "")
        if obstacle:
            obstacle = addresses.unreachable_store(
                node, assignment.store_node, store, assignment.generation, obstacle
            )
        self._happened(StoreReached(assignment.generation, obstacle))

    async def inspect_ranks(self, generation: int) -> None:
        seen = self._boundary.called("reading the state of the ranks", self._hangs.reports, ())
        reading = self._communication.with_recorders(generation, seen)
        told = await self._boundary.awaited("reading the flight recorder dumps", reading, seen)
        self._happened(Inspected(generation, told))

    def inspect_last(self, generation: int) -> None:
        seen = self._boundary.called("reading the state of the ranks", self._hangs.reports, ())
        self._happened(LastInspected(generation, seen))

    async def take_stacks(self, generation: int, cause: Cause) -> None:
        stacks = self._ranks.with_stacks(cause)
        cause = await self._boundary.awaited("taking the stacks of a rank", stacks, cause)
        dumps = self._communication.await_dumps(generation)
        await self._boundary.awaited("reading the flight recorder dumps", dumps, None)
        self._happened(StacksTaken(generation, cause))


# --- progress while the service is unreachable -----------------------------------------------------
#
# launcher/progress.py defines progress.


class IsolationListener(Protocol):
    def isolated(self, reason: str) -> None:
        """Called when the ranks must be stopped: no service and no progress for `--isolation-timeout`."""

    def waiting_alone(self, give_up_s: float) -> None:
        """Called once per loss of contact, if no rank runs."""

    def out_of_reach(self, reason: str) -> None:
        """Called when the service was unreachable for the whole `--join-timeout`, and no rank runs."""


class IsolationWatch:
    def __init__(
        self,
        timeout_s: float,
        give_up_s: float,
        pids: Callable[[], Iterable[int]],
        output_bytes: Callable[[], int],
        step: Callable[[], int | None],
        listener: IsolationListener,
    ) -> None:
        self._timeout_s, self._give_up_s = timeout_s, give_up_s
        self._pids, self._output_bytes, self._step, self._listener = pids, output_bytes, step, listener
        self._waiting_reported = False
        self._loop = asyncio.get_running_loop()
        self._isolation: progress.Isolation | None = None
        self._timer: asyncio.TimerHandle | None = None

    def contact(self, held: bool) -> None:
        if held:
            self.close()
        elif self._isolation is None:
            self._isolation = progress.contact_lost(self._signs())
            self._waiting_reported = False
            self._check_later()

    def close(self) -> None:
        self._isolation = None
        if self._timer is not None:
            self._timer.cancel()

    def _check_later(self) -> None:
        self._timer = self._loop.call_later(
            progress.pause_s(min(self._timeout_s, self._give_up_s)), self._check
        )

    def _check(self) -> None:
        assert self._isolation is not None
        self._isolation = progress.updated(self._isolation, self._signs())
        if progress.is_over(self._isolation, self._timeout_s):
            self._listener.isolated(progress.in_words(self._isolation))
            self._isolation = progress.contact_lost(self._isolation.seen)
        if self._isolation.idle_since is not None and not self._waiting_reported:
            self._waiting_reported = True
            self._listener.waiting_alone(self._give_up_s)
        if progress.is_hopeless(self._isolation, self._give_up_s):
            self._listener.out_of_reach(
                f"the rendezvous was unreachable for {self._give_up_s:g} s (--join-timeout), and no rank runs on "
                "this node. Run ddp-launch on this node again when the rendezvous is reachable"
            )
        else:
            self._check_later()

    def _signs(self) -> ProgressSigns:
        ranks = tuple(self._pids())
        pids = [pid for rank in ranks for pid in (rank, *tree.descendants(rank))]
        cpu_s = sum(stat.cpu_s for stat in map(process_stat, pids) if stat is not None)
        return ProgressSigns(self._loop.time(), cpu_s, self._output_bytes(), len(ranks), self._step())


# --- the progress line -----------------------------------------------------------------------------
#
# Shows the status of the job: a live line at the bottom of a terminal, and log lines while it waits for nodes.

_FIRST_S, _SECOND_S, _LONGEST_PAUSE_S = 2.0, 10.0, 600.0


class StatusLine:
    def __init__(self, spec: LaunchSpec, logs: LogPump) -> None:
        self._logs = logs
        self._target = spec.entry.name
        is_drawn = can_redraw(os.isatty(2), os.environ)
        self._shown = spec.progress == "always" or (spec.progress == "auto" and is_drawn)
        self.is_seen = self._shown and is_drawn
        self._started = time.monotonic()
        self._text = "joining"
        self._read: Callable[[], Sequence[RankView]] = tuple
        self._views: Callable[[], Sequence[RankView]] | None = None  # while ranks run

    def watch(self, views: Callable[[], Sequence[RankView]]) -> None:
        """Show the steps of these ranks too."""
        self._read = views

    async def run(self) -> None:
        """Refresh once a second, if the line is shown."""
        while self._shown:
            self._show()
            await asyncio.sleep(1.0)

    def observe(self, step: AgentStep) -> None:
        event, state = step.event, step.after
        match event:
            case Waiting(reason, present, wanted):
                self._text = f"{reason} ({present} of {wanted} nodes)"
            case _ if state.assignment is not None:
                self._text = _running_text(state, isinstance(event, Assigned))
        self._views = self._read if state.phase is AgentPhase.RUNNING else None
        if self._shown:
            self._show()

    def _show(self) -> None:
        seconds = int(time.monotonic() - self._started)
        clock = f"{seconds // 3600:d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
        steps = page.progress_in_words(self._views()) if self._views is not None else ""
        parts = filter(None, (f"ddp-launch {self._target}", steps, self._text, clock))
        self._logs.progress(" | ".join(parts))


class WaitingMessages:
    """Logs what the job waits for, at the moments of `next_message_s`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._what = ""
        self._next: asyncio.TimerHandle | None = None

    def observe(self, step: AgentStep) -> None:
        match step.event:
            case Waiting(reason, present, wanted, stands_by=False):
                self._what = f"{reason} ({present} of {wanted} nodes have joined)"
                if self._next is None:
                    self._log_after(0.0)
            case Waiting() | Assigned():  # UserMessages reports a standby at once
                self.end()

    def end(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _log_after(self, waited_s: float) -> None:
        then_s = next_message_s(waited_s)
        self._next = asyncio.get_running_loop().call_later(then_s - waited_s, self._log, then_s)

    def _log(self, waited_s: float) -> None:
        self._say(f"{self._what}, for {waited_s:.0f} s so far")
        self._log_after(waited_s)


def next_message_s(waited_s: float) -> float:
    """How long a wait is when it is mentioned again: 2 s, 10 s, then each time it has doubled, or every 10 min.

    A person at a terminal must see soon what is missing; a log does not need a line for nodes that come seconds apart.
    """
    if waited_s < _FIRST_S:
        return _FIRST_S
    return max(_SECOND_S, waited_s + min(waited_s, _LONGEST_PAUSE_S))


def _running_text(state: Supervision, starting: bool) -> str:
    assignment = state.assignment
    assert assignment is not None
    heals = f" | healed {counted(assignment.heals, 'time')}" if assignment.heals else ""
    restarted = assignment.restart_count - assignment.heals
    restarts = f"restarts {restarted} of {assignment.max_restarts}{heals}"
    if state.phase is AgentPhase.JOINING and state.parked:
        doing = f"healing, {counted(len(state.parked), 'rank')} paused"
    elif starting or state.phase is AgentPhase.JOINING:
        doing = "starting"
    elif state.in_place:
        doing = f"healing, {len(state.parked)} of {len(state.live)} ranks paused"
    elif state.phase is AgentPhase.STOPPING:
        doing = f"stopping, {counted(len(state.live), 'rank')} still running"
    else:
        doing = f"{len(state.live)} of {counted(assignment.nproc, 'rank')} running"
    return f"{doing} | generation {assignment.generation} | {restarts}"


# --- messages for the user -------------------------------------------------------------------------
#
# Prints messages about the agent's events on the terminal, each message once.

_SIGKILL = 9


class UserMessages:
    def __init__(
        self,
        spec: LaunchSpec,
        say: Callable[[str], None],
        say_of_failure: Callable[[str, bool], None] | None = None,
    ) -> None:
        self._spec, self._say_line = spec, say
        self._say_of_failure = say_of_failure or (lambda text, _is_explained: say(text))
        self._last_reason = self._last_waiting = self._last_notice = ""
        self._is_explained = True  # the failure: it is not that a peer is lost
        self._held = ""  # the reason of a stop, until it is certain that the job goes on
        self._replaced: tuple[int, ...] | None = None  # ranks with new processes; None: all

    def say(self, text: str) -> None:
        self._say_line(f"ddp-launch: {printable(text)}")

    def observe(self, step: AgentStep) -> None:
        event, state, before = step.event, step.after, step.before.phase
        match event:
            case Stop(_, decision) if before is AgentPhase.RUNNING and decision.kind is not DecisionKind.FAIL:
                self._report_stop(decision)
            case Stop(_, decision) if before is AgentPhase.RUNNING and decision.is_interrupt:
                self.say(f"{decision.reason}: stopping the ranks (up to {self._spec.shutdown_timeout_s:g} s)")
            case Assigned(assignment) if state.assignment == assignment:
                self._report_reason(assignment.reason)  # which names the first of several causes
            case StopRequested(_, name) if before is AgentPhase.RUNNING:
                grace = self._spec.shutdown_timeout_s
                self.say(f"{name}: stopping the ranks (up to {grace:g} s; repeat the signal to kill at once)")
            case Waiting(stands_by=False) if self._held:  # for a replacement
                self._report_reason(self._held)
            case Waiting(reason, stands_by=True) if reason != self._last_waiting:
                self._last_waiting = reason
                self.say(f"{state.agent.node}: {reason}")
            case Notice(_, text) if text != self._last_notice:  # a rejected node may try again and again
                self._last_notice = text
                self.say(text)
            case StoreReached(_, problem) if problem:
                self.say(problem)
            case CheckpointRequested(_, reason) if before is AgentPhase.RUNNING:
                self.say(f"the rendezvous service requests a checkpoint from the ranks: {reason}")
            case CheckpointSignal(name) if before is AgentPhase.RUNNING:
                grace = self._spec.checkpoint_grace_s
                self.say(f"{name}: requesting a checkpoint from the ranks (up to {grace:g} s)")
            case Isolated(reason) if before is AgentPhase.RUNNING:
                self.say(f"stopping the ranks of this node: {reason}")
            case _:
                self._report_paused(event, state, before)

    def _report_paused(self, event: AgentEvent, state: Supervision, before: AgentPhase) -> None:
        """Report ranks that could not be paused."""
        if (
            before is AgentPhase.JOINING
            and state.phase is AgentPhase.RUNNING
            and state.assignment is not None
        ):
            new = set(range(state.assignment.nproc)) - set(state.kept)
            self._replaced = tuple(_global(state, sorted(new))) if state.kept else None
        match event:
            case GraceOver(kind=Grace.FULL) if state.in_place and state.stop_signal == _SIGKILL:
                who = ranks(_global(state, set(state.live) - set(state.parked)))
                timeout = f"{self._spec.shutdown_timeout_s:g} s (--shutdown-timeout)"
                self.say(f"{who} could not be paused within {timeout}, and was killed")
            case RankEnded(_, _, Cause() as cause) if before is AgentPhase.JOINING:
                self.say(
                    f"rank {cause.rank} ended while it was paused: {cause.reason}; it will be started again"
                )
            case _:
                pass

    def report_debug(self) -> None:
        """Say which rank is debugged, and how."""
        debug = self._spec.debug
        if debug is not None:
            how = (
                f"waits for a debugger at {debug.address} before its script starts"
                if debug.address
                else "alone reads from the terminal, and breakpoint() does nothing in the other ranks"
            )
            self.say(
                f"--debug: rank {debug.rank} {how}. No rank is called hung, and collectives wait for a week."
            )

    def report_shared_id(self) -> None:
        """Say which job this node joins, if the ID was not given."""
        if self._spec.id_may_be_shared:
            name = self._spec.job.job_id
            self.say(
                f"this node joins the job {name}, named after the user and the script. If you run this "
                "script several times at once on this rendezvous, give each job its own --rdzv-id."
            )

    def report_back(self, seconds: float, step: int | None) -> None:
        """Say that training goes on after a restart. `step`: as the script numbers its steps, if it does."""
        who = "the ranks train again"
        if self._replaced:
            who = f"{ranks(self._replaced)} {'is' if len(self._replaced) == 1 else 'are'} back"
        at = "" if step is None else f" at step {step}"
        self.say(f"{'restarted' if self._replaced is None else 'healed'} in {seconds:.1f} s: {who}{at}")

    def _report_stop(self, decision: Decision) -> None:
        """A failure that is reported later may be the first cause, and may end the job, or not be healed in place.

        So a restart or a heal is announced when it takes place.
        """
        if decision.cause is None:
            self._report_reason(decision.reason)
            return
        self._held = decision.reason
        self._is_explained = decision.cause.failure is not FailureClass.CONSEQUENCE
        if decision.in_place:  # ranks may take long to leave a collective
            cause, self._last_reason = decision.cause, decision.reason  # `report_back` says when it is healed
            self._say_failure(f"rank {cause.rank} on {cause.node}: {cause.reason}; pausing the other ranks")

    def _report_reason(self, reason: str) -> None:
        self._held = ""
        if reason and reason != self._last_reason:
            self._last_reason = reason
            self._say_failure(reason)

    def _say_failure(self, text: str) -> None:
        self._say_of_failure(f"ddp-launch: {printable(text)}", self._is_explained)


def _global(state: Supervision, local_ranks: Iterable[int]) -> list[int]:
    assert state.assignment is not None
    return [state.assignment.rank_offset + rank for rank in local_ranks]
