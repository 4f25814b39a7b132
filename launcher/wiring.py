"""Builds the components of an agent. `Agent` itself only passes events to the state machine and runs its actions.

`Shell` exists from the start: logs, the zygote, messages for users. `Parts` are built after the agent has connected to
the rendezvous: the ranks, and what watches them. All components put their events into the queue of the shell.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

from launcher.answers import restart_clock
from launcher.answers.desk import Desk
from launcher.answers.restart_watch import RestartWatch, Traces
from launcher.background_tasks import BackgroundTasks
from launcher.error_boundary import ErrorBoundary
from launcher.exchange import AgentEvent, CheckpointOver, StallDetected
from launcher.health.communication import CommunicationWatch
from launcher.health.node_watch import NodeWatch
from launcher.health.stall_detection import excused
from launcher.health.stop_watch import StopWatch
from launcher.health.time_watch import TimeWatch
from launcher.health.watch import HangWatch
from launcher.isolation import IsolationWatch
from launcher.joining.join import job_spec, node_facts
from launcher.notify.announcer import Announcer
from launcher.output.log_folder import LogFolder
from launcher.output.logs import LogPump
from launcher.ranks.checkpoint import CheckpointRequester
from launcher.ranks.editions import Editions
from launcher.ranks.worker import Workers
from launcher.ranks.zygote_watch import ZygoteWatch
from launcher.status import StatusLine, WaitingMessages
from launcher.user_messages import UserMessages
from launcher.version import VERSION
from rendezvous.replay.journal import Journals
from rendezvous.values.events import AgentJoined
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from launcher.answers.restart_clock import Clock
    from launcher.exchange import Action, Finish, Supervision
    from launcher.isolation import Listener
    from launcher.joining.connect import Connection
    from launcher.preflight.agent_preflight import Preflight
    from launcher.ranks.zygote import Zygote
    from launcher.ranks.zygote_starter import ZygoteStarter
    from launcher.settings.spec import LaunchSpec
    from rendezvous.replay.records import Machine

    Recorder = Callable[[AgentEvent, tuple[Action, ...], Supervision], None]


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
    announcer: Announcer
    journals: Journals | None


def build_shell(spec: LaunchSpec, starter: ZygoteStarter, zygote: Zygote) -> Shell:
    folder = LogFolder(spec)
    logs = LogPump(spec.log, folder.path, file_limit=folder.file_limit)
    if folder.warning:
        logs.say(f"ddp-launch: warning: {folder.warning}")
    user_messages = UserMessages(spec, logs.say)
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
        Announcer(spec, logs.say, boundary),
        _journals(folder, spec.log.journal_limit, logs),
    )


def _journals(folder: LogFolder, limit: int, logs: LogPump) -> Journals | None:
    """Nobody has asked for a temporary folder: what is missing there is no news."""

    def complain(text: str) -> None:
        if not folder.temporary:
            logs.say(f"ddp-launch: warning: {text}")

    return Journals(folder.path, limit, complain) if limit else None


def open_journal(shell: Shell, connection: Connection, state: Supervision) -> Recorder:
    """Return the function that gets each step of the agent's state machine, which begins with this state."""
    if shell.journals is None:
        return lambda _event, _actions, _after: None
    now = asyncio.get_running_loop().time
    journal = shell.journals.open(f"journal_agent_{connection.agent.node}", _agent_machine)
    journal.started(state, now())
    return lambda event, actions, after: journal.took(event, now(), actions, after)


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
    if shell.spec.preflight == "off" and not shell.spec.health_sources and not shell.spec.topology:
        return None
    from launcher.preflight.agent_preflight import Preflight

    return Preflight(shell.spec, lambda line: shell.logs.say(f"ddp-launch: {line}"), shell.boundary)


@dataclass(frozen=True, slots=True)
class Parts:
    connection: Connection
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
    editions: Editions
    stops: StopWatch

    async def end(self) -> None:
        self.isolation.close()
        self.hangs.end()
        self.time.end()
        self.stops.end()
        self.communication.end()
        await self.node.end()
        self.question.withdraw()
        self.restarts.end()


def _waiting_for_a_person(logs: LogPump, ranks: Workers) -> list[int]:
    """Return the ranks whose output is not read, or that wait for input: they are not hung."""
    return logs.blocked_ranks() + ranks.waiting_for_input(logs.prompting_ranks())


def build_parts(shell: Shell, connection: Connection, listener: Listener) -> Parts:
    spec, scratch, report = shell.spec, shell.starter.scratch, shell.events.put_nowait
    ranks = Workers(spec, shell.logs, shell.boundary, connection.host, shell.starter.binding.cpus, scratch)
    shell.logs.input_wait = ranks.input_wait
    shell.status.watch(
        lambda: shell.boundary.called("reading the status pages for the progress line", ranks.pages.views, ())
    )
    communication = CommunicationWatch(scratch, ranks, shell.logs.say, report)
    hangs = _hang_watch(shell, ranks)
    isolation = IsolationWatch(
        spec.isolation_timeout_s,
        spec.join_timeout_s,
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

    def checkpoint_over(generation: int, taken: bool) -> None:
        report(CheckpointOver(generation, taken))
        desk.checkpoint_over(taken=taken)

    requester = CheckpointRequester(scratch, ranks.ranks, checkpoint_over)
    editions, traces = Editions(spec, scratch), Traces(ranks, communication)
    desk = Desk(ranks, node, shell.logs.files, requester, traces, editions, shell.boundary)
    connection.session.answer_with(desk.answer)
    return Parts(
        connection,
        AgentJoined(connection.agent, job_spec(spec, VERSION), facts),
        ranks,
        requester,
        isolation,
        communication,
        hangs,
        BackgroundTasks(shell.boundary, ranks, communication, hangs, report),
        node,
        desk,
        _time_watch(shell, connection, ranks, node),
        _restart_watch(shell, connection, ranks, node),
        editions,
        _stop_watch(shell, ranks),
    )


def _send_progress(shell: Shell, connection: Connection, ranks: Workers) -> None:
    progressed = ranks.pages.progressed_with_others
    connection.session.ask_for_progress(
        lambda: shell.boundary.called("reading the status pages for a heartbeat", progressed, False)
    )


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


def _time_watch(shell: Shell, connection: Connection, ranks: Workers, node: NodeWatch) -> TimeWatch:
    send = connection.session.send
    watch = TimeWatch(shell.spec.nproc, shell.began, ranks.pages, send, shell.boundary)
    node.rank_times = watch.divided
    return watch


def _restart_watch(shell: Shell, connection: Connection, ranks: Workers, node: NodeWatch) -> RestartWatch:
    def stepped(clock: Clock) -> None:
        parts_s = restart_clock.parts_s(clock)
        shell.announcer.restarted(restart_clock.moments(clock), parts_s)
        node.restarted(parts_s)

    return RestartWatch(ranks.pages, connection.session.tell, stepped, shell.boundary)


def _stop_watch(shell: Shell, ranks: Workers) -> StopWatch:
    report = shell.events.put_nowait
    watch = StopWatch(shell.spec.stop_when, ranks.pages.views, ranks.folders, report, shell.boundary)
    if watch.reads_output:
        shell.logs.latest.on_output = watch.output
    return watch
