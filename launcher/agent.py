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
from typing import TYPE_CHECKING

from launcher import supervision
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
    LastSeen,
    LookAtRanks,
    LookBack,
    OpenStore,
    RanksSeen,
    RanksStandStill,
    ReachStore,
    Send,
    SignalRanks,
    StacksTaken,
    StartFailed,
    StartGrace,
    StartRanks,
    StopRequested,
    StoreFailed,
    StoreListens,
    StoreReached,
    Sweep,
    Swept,
    TakeStacks,
    ZygoteReplaced,
)
from launcher.failure import ending
from launcher.failure.verdict import signal_name
from launcher.health.communication import CommunicationWatch
from launcher.health.node_watch import NodeWatch
from launcher.health.watch import HangWatch
from launcher.isolation import IsolationWatch
from launcher.joining import addresses
from launcher.joining.connect import CannotMeet, meet
from launcher.joining.join import job_spec, node_facts
from launcher.output.log_folder import LogFolder
from launcher.output.logs import LogPump
from launcher.ranks.checkpoint import CheckpointQuestion
from launcher.ranks.worker import Workers
from launcher.settings.spec import EntryKind
from launcher.status import StatusLine, WaitingWords
from launcher.supervised import Phase, Supervision
from launcher.supervision import TRY_AGAIN
from launcher.template import tree
from launcher.user_messages import Announcer
from launcher.version import VERSION
from rendezvous.signals import SignalWatch
from rendezvous.values.events import AgentJoined, Refused
from rendezvous.values.types import StoreAddress

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from launcher.preflight.agent_preflight import Preflight
    from launcher.ranks.zygote import Zygote
    from launcher.ranks.zygote_starter import ZygoteStarter
    from launcher.settings.spec import LaunchSpec
    from launcher.template.wire import Message
    from rendezvous.values.types import Assignment, Cause

_EXIT_DRAIN_S = 5.0  # for a terminal that is slow to take the last lines
_LAST_BREATH_S = 1.0  # from the end of its socket to the end of the zygote
_GRACE_OF_ACCUSED_S = 1.0  # of ranks that have not got on for long, and are in everybody's way
_ZYGOTES = 3  # lost without a rank in between: it is not by accident
_ZYGOTE_END_S = 15.0  # beyond its own bound for processes that will not die


class Agent:
    def __init__(self, spec: LaunchSpec, starter: ZygoteStarter, zygote: Zygote) -> None:
        self._spec = spec
        self._starter = starter
        self._zygote = zygote
        self._zygote_ready = False
        self._zygotes_lost = 0  # since ranks were last started
        self._facts: asyncio.Queue[Fact] = asyncio.Queue()
        self._folder = LogFolder(spec)
        alone = spec.nproc == spec.max_nodes == 1
        self._logs = LogPump(spec.log, self._folder.path, file_limit=self._folder.file_limit, eager=alone)
        self._status = StatusLine(spec, self._logs)
        self._announcer = Announcer(spec, self._logs.say)
        self._waiting_words = WaitingWords(self._announcer.say)

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        preflight = self._begin_preflight()
        try:
            self._met = await meet(self._spec, f"{os.getpid()}-{time.time_ns():x}")
        except CannotMeet as error:
            return await self._turned_away(error)
        agent, self._address = self._met.agent, self._met.address
        self._ranks = Workers(
            self._spec, self._logs, self._met.host, self._starter.binding.cpus, self._starter.scratch
        )
        self._question = CheckpointQuestion(self._starter.scratch, self._ranks.ranks, self._checkpoint_over)
        self._isolation = IsolationWatch(
            self._spec.isolation_timeout_s,
            self._spec.join_timeout_s,
            self._ranks.pids,
            lambda: self._logs.received,
            self._ranks.pages.step,
            self,
        )
        self._communication = CommunicationWatch(
            self._starter.scratch, self._met.host, self._ranks, self._logs.say, self._facts.put_nowait
        )
        await self._communication.begin()
        self._hangs = HangWatch(
            self._spec.hang,
            self._ranks.pages.views,
            lambda generation: self._facts.put_nowait(RanksStandStill(generation)),
        )
        self._care = NodeWatch(
            *(self._spec, self._folder.path, self._starter.scratch, self._ranks.pages, self._hangs),
            *(self._logs.say, self._met.session.send),
        )
        self._met.session.watch_contact(self._contact)
        facts = node_facts(self._spec, self._met.host, self._address, os.environ)
        join = AgentJoined(agent, job_spec(self._spec, VERSION), facts)
        self._state = Supervision(agent, join=join)
        self._watch_signals()
        if preflight is not None:
            try:
                join = await preflight.checked(join, self._met, self._facts)
            except CannotMeet as error:
                await self._met.leave()
                return await self._turned_away(error)
            self._state = Supervision(agent, join=join)
        self._loop.add_reader(self._zygote.fileno(), self._zygote_spoke)
        self._met.session.send(join)
        await self._care.begin(lambda: self._state)
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._owned = {tasks.create_task(self._receive()), tasks.create_task(self._status.run())}
            finish = await self._consume()
            for task in self._owned:
                task.cancel()
        await self._watch_no_more()
        return await self._leave(finish)

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

        return Preflight(self._spec, lambda line: self._logs.say(f"ddp-launch: {line}"))

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
                self._zygote.keep(generation, self._spec.master_addr or self._address, self._spec.master_port)
            case ReachStore(assignment, store):
                self._run_errand(self._reach(assignment, store))
            case AskCheckpoint(assignment, reason, hurried):
                grace_s = self._spec.checkpoint_grace_s if hurried else None
                self._question.ask(assignment.generation, reason, grace_s)
            case StartRanks(assignment, store):
                self._question.withdraw()  # one of an earlier generation
                self._zygotes_lost = 0
                for rank_ended in self._ranks.start(self._zygote, assignment, store):
                    self._facts.put_nowait(rank_ended)
                self._hangs.begin(assignment.generation)
                self._care.ranks_started(assignment.generation)
            case LookAtRanks(generation):
                self._run_errand(self._look_at_ranks(generation))
            case LookBack(generation):
                self._facts.put_nowait(LastSeen(generation, self._hangs.sights()))
            case TakeStacks(generation, cause):
                self._run_errand(self._take_stacks(generation, cause))
            case BreakOff(generation, reason):
                self._communication.break_off(generation, reason)
            case SignalRanks(signum, only):
                if only is None:
                    self._ranks.note_stop(signum)
                self._zygote.signal(signum, only)
            case StartGrace(generation, of_accused):
                grace = min(self._spec.shutdown_timeout_s, _GRACE_OF_ACCUSED_S if of_accused else math.inf)
                self._loop.call_later(grace, self._facts.put_nowait, GraceOver(generation, of_accused))
            case Sweep(generation):
                self._zygote.sweep(generation)

    def _run_errand(self, errand: Coroutine[Any, Any, None]) -> None:
        task = self._tasks.create_task(errand)
        self._owned.add(task)
        task.add_done_callback(self._owned.discard)

    # --- where facts come from ---------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            self._facts.put_nowait(await self._met.session.receive())

    async def _reach(self, assignment: Assignment, store: StoreAddress) -> None:
        """Before ranks start: what they would find out after minutes, each on its own."""
        obstacle = await addresses.obstacle_to(store.host, store.port, listens=store.kept)
        if obstacle:
            here, there = self._state.agent.node, assignment.store_node
            obstacle = addresses.cannot_talk(here, there, store, assignment.generation, obstacle)
        self._facts.put_nowait(StoreReached(assignment.generation, obstacle))

    async def _look_at_ranks(self, generation: int) -> None:
        sights = await self._communication.with_recorders(generation, self._hangs.sights())
        self._facts.put_nowait(RanksSeen(generation, sights))

    async def _take_stacks(self, generation: int, cause: Cause) -> None:
        cause = await self._ranks.with_stacks(cause)
        self._facts.put_nowait(
            StacksTaken(generation, await self._communication.with_dumps(generation, cause))
        )

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

    def _watch_signals(self) -> None:
        self._signals = SignalWatch()
        for signum in set(self._spec.signals) - set(self._spec.checkpoint_signals):
            if signal.getsignal(signum) is signal.SIG_IGN and signum == signal.SIGHUP:
                continue  # nohup: its user wants the job to survive the terminal
            self._signals.on(signum, self._stop_requested)
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
        self._zygote.signal(signum)

    def _zygote_spoke(self) -> None:
        messages = self._zygote.read()
        if messages is None:
            self._zygote_died()
            return
        for message in messages:
            self._zygote_told(message)

    def _zygote_told(self, message: Message) -> None:
        match message["event"]:
            case "ready":
                self._zygote_ready = True
                self._tell_of_plain_start(message["reason"] or self._starter.obstacle)
            case "started":
                self._ranks.note_started(message)
            case "exited":
                self._facts.put_nowait(self._care.explained(self._ranks.ended(message)))
            case "keeping":
                self._store_listens(message)
            case "swept":
                self._facts.put_nowait(Swept(message["generation"]))

    def _store_listens(self, message: Message) -> None:
        if message["error"]:
            where = f"{self._spec.master_addr or self._address}:{self._spec.master_port}"
            self._facts.put_nowait(
                StoreFailed(message["generation"], f"the store cannot listen on {where}: {message['error']}")
            )
            return
        store = StoreAddress(self._spec.master_addr or self._address, message["port"], message["kept"])
        self._facts.put_nowait(StoreListens(message["generation"], store))

    def _zygote_died(self) -> None:
        """Its ranks died with it (parent-death signal); what they left behind is now ours to end."""
        self._loop.remove_reader(self._zygote.fileno())
        self._zygote.close()
        how = _in_words(tree.await_child(self._zygote.pid, _LAST_BREATH_S))
        self._starter.clean_up()
        if self._zygote_ready:
            reason = f"the process that ranks are started from (the zygote, pid {self._zygote.pid}) was lost: {how}"
            self._logs.say(f"ddp-launch: {reason}; starting another")
        else:
            reason = f"the process that was to import torch ended while it did: {how}"
            self._starter.obstacle = reason
        for rank_ended in self._ranks.lost_with_zygote(reason):
            self._facts.put_nowait(rank_ended)
        self._facts.put_nowait(self._replace_zygote(reason))

    def _replace_zygote(self, reason: str) -> Fact:
        self._zygotes_lost += 1
        if self._zygotes_lost > _ZYGOTES or not (self._zygote_ready or self._zygote.warm):
            return StartFailed(f"no rank can be started here: {reason}")
        self._starter.warm = self._zygote.warm and self._zygote_ready
        self._zygote_ready = False
        try:
            self._zygote = self._starter.start()
        except OSError as error:
            return StartFailed(f"no rank can be started here: {error.strerror}")
        self._loop.add_reader(self._zygote.fileno(), self._zygote_spoke)
        return ZygoteReplaced(reason, 128 + signal.SIGKILL)

    # --- what people see ---------------------------------------------------------------------------

    def _tell_of_plain_start(self, reason: str) -> None:
        if self._spec.warm_start and reason and self._spec.entry.kind is not EntryKind.PROGRAM:
            self._logs.say(f"ddp-launch: ranks start without the warm start: {reason}")

    async def _turned_away(self, error: CannotMeet) -> int:
        self._zygote.close()
        self._await_zygote()
        self._logs.close(_EXIT_DRAIN_S)
        return ending.tell(
            self._spec, self._folder, Finish(error.exit_code, f"error: {error}"), all_shown=True
        )

    async def _leave(self, finish: Finish) -> int:
        if self._zygote.fileno() >= 0:
            self._loop.remove_reader(self._zygote.fileno())
        self._zygote.close()  # it ends while we see to the rest
        self._logs.progress("")
        all_shown = self._logs.close(_EXIT_DRAIN_S)
        await asyncio.to_thread(self._await_zygote)  # others may still hear from the service in this process
        await self._met.leave()
        exit_code = ending.tell(self._spec, self._folder, finish, all_shown)
        self._signals.close()  # one more Ctrl-C must not change it
        return exit_code

    def _await_zygote(self) -> None:
        if self._zygote_ready:
            tree.await_child(self._zygote.pid, _ZYGOTE_END_S)
        self._starter.end()  # one that still imports torch has nothing to end, and does not look up


def _in_words(wait_status: int | None) -> str:
    if wait_status is None:
        return "it closed its socket"
    if os.WIFSIGNALED(wait_status):
        return f"killed by {signal_name(os.WTERMSIG(wait_status))}"
    return f"exit code {os.WEXITSTATUS(wait_status)}"
