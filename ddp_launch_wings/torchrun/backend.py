"""torch's interface to a rendezvous. It uses one session with the service."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import re
import socket
import sys
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import TypeVar, assert_never

import torch
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from rendezvous.client.credential_files import client_options
from rendezvous.client.session import Session, connect
from rendezvous.values.contracts import PORT, TRY_AGAIN
from rendezvous.values.events import (
    Accused,
    AgentJoined,
    AgentLeft,
    AgentStopped,
    Assigned,
    CheckpointRequested,
    Ended,
    Examine,
    Examined,
    FromAgent,
    Notice,
    RankFailed,
    RanksFinished,
    Refused,
    Stop,
    StoreAt,
    StoreOpened,
    ToAgent,
    Waiting,
)
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.types import (
    UNLIMITED,
    AgentId,
    Assignment,
    Cause,
    DecisionKind,
    FailureClass,
    JobSpec,
    NodeFacts,
    Outcome,
    PolicyAction,
    PolicyRule,
    RestartBudget,
    ScaleUp,
    StoreAddress,
)

_log = logging.getLogger(__name__)

NAME = "ddp"
_END_TIMEOUT_S = 10.0
_NO_ERROR_FILE = "<N/A>"
# torch's agent stops its ranks with a grace of 30 s, then kills and waits for up to 30 s more.
_STOP_BUDGET_S = 75.0
_FINAL = (FailureClass.USER_EXCEPTION, FailureClass.SIGNAL, FailureClass.EXIT_CODE)
_OPTIONS = {  # of torchrun, by setting
    "budget": "--rdzv-conf max_restarts",
    "last_call_s": "--rdzv-conf last_call_timeout",
    "join_timeout_s": "--rdzv-conf join_timeout",
    "lease_s": "--rdzv-conf keep_alive_interval x keep_alive_max_attempt",
    "replacement_timeout_s": "--rdzv-conf join_timeout",
}
_SCHEDULER_INDEXES = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")


def create(params: RendezvousParameters) -> TorchrunRendezvous:
    if not params.endpoint:
        raise ValueError(
            "--rdzv-backend ddp needs --rdzv-endpoint HOST:PORT of a running `ddp-rendezvous serve`"
        )
    return TorchrunRendezvous(params)


class TorchrunRendezvous(RendezvousHandler):
    def __init__(self, params: RendezvousParameters) -> None:
        self._run_id = params.run_id
        self._join_timeout_s = float(params.get_as_int("join_timeout", 600) or 600)
        self._read_timeout = timedelta(seconds=params.get_as_int("read_timeout", 60) or 60)
        endpoints = _endpoints(params)
        options = client_options(os.environ, give_up_s=self._join_timeout_s)
        joining = _joining(params, self._join_timeout_s, _address_towards(endpoints[0]))
        agent = joining.agent
        self._link = Link(
            NodeState(agent, joining),
            lambda: connect([f"{host}:{port}" for host, port in endpoints], agent, options),
        )
        self._store: TCPStore | None = None  # of the latest generation; node rank 0's is its server
        self._warned_of = 0
        atexit.register(self._ended_by_signal)

    def get_backend(self) -> str:
        return NAME

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks share the agents' store, which is new in each generation. Otherwise rank 0 hosts a store."""
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    # --- joining -------------------------------------------------------------------------------------

    def next_rendezvous(self) -> RendezvousInfo:
        self._link.apply(next_rendezvous)
        while True:
            assignment = self._await(lambda node: node.assigned)
            info = self._form_world(assignment)
            if info is not None:
                return info

    def _await(self, look: Callable[[NodeState], Answer | None]) -> Answer:
        try:
            return self._link.wait_for(look, self._join_timeout_s)
        except JobOver as over:
            raise _ending(over.node) from None
        except TimeoutError as error:
            problem = f"the rendezvous service did not answer for {self._join_timeout_s:g} s"
            what_next = (
                "Check --rdzv-endpoint and the log of the service, or increase --rdzv-conf join_timeout"
            )
            raise RendezvousTimeoutError(f"{problem}. {what_next}") from error
        except ConnectionError as error:
            raise RendezvousConnectionError(str(error)) from error

    def _form_world(self, assignment: Assignment) -> RendezvousInfo | None:
        """Connect to the store of this world. Return None if the world has ended: wait for the next assignment."""
        if assignment.node_rank == 0:
            self._open_store(assignment)
        store = self._await(partial(_store_of, assignment))
        if not isinstance(store, StoreAddress) or not self._connected(store, assignment):
            return None
        node = self._link.apply(partial(give_to_torch, assignment=assignment))
        return self._info(assignment, store) if node.running == assignment else None

    def _open_store(self, assignment: Assignment) -> None:
        host = assignment.store_host
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self._read_timeout)
        opened = StoreAddress(host, self._store.port)
        generation = assignment.generation
        self._link.apply(lambda s: (s, (StoreOpened(s.agent, generation, opened),)))

    def _connected(self, address: StoreAddress, assignment: Assignment) -> bool:
        if assignment.node_rank == 0:
            return True
        try:
            self._store = TCPStore(
                address.host, address.port, wait_for_workers=False, timeout=self._read_timeout
            )
        except RuntimeError as error:  # torch's DistError is one
            if self._link.node.assigned != assignment:
                return False
            problem = (
                f"cannot connect to the TCPStore of node rank 0 at {address.host}:{address.port}: {error}"
            )
            what_next = "Check the network and the firewall between the nodes"
            raise RendezvousConnectionError(f"{problem}. {what_next}") from error
        return True

    def _info(self, assignment: Assignment, address: StoreAddress) -> RendezvousInfo:
        assert self._store is not None
        rank, store = assignment.node_rank, PrefixStore("torchrun", self._store)
        if self.use_agent_store:
            store_info = RendezvousStoreInfo(address.host, address.port)
        else:
            store_info = RendezvousStoreInfo.build(rank, store, assignment.store_host)
        return RendezvousInfo(store, rank, assignment.n_nodes, store_info)

    def num_nodes_waiting(self) -> int:
        """A value above 0 makes torch's agent stop its ranks and join again, without using its restart budget."""
        node = self._link.node
        if not node.must_rejoin:
            return 0
        if node.running is not None and self._warned_of != node.running.generation:
            self._warned_of = node.running.generation
            _log.warning("%s", _why(node))
        return 1

    # --- leaving -------------------------------------------------------------------------------------

    def is_closed(self) -> bool:
        return self._link.node.over

    def set_closed(self) -> None:
        self._link.apply(finish)

    def shutdown(self) -> bool:
        """Report how the agent ended. torch does not pass the reason: it is the exception that is being handled."""
        atexit.unregister(self._ended_by_signal)
        error = sys.exc_info()[1]
        if error is None:
            self._link.apply(finish)
        elif isinstance(error, ChildFailedError):
            self._link.apply(partial(fail_job, cause=_final_cause(error)))
        else:
            self._link.apply(
                partial(leave, reason=f"torchrun on this node ended: {type(error).__name__}: {error}")
            )
        self._wait_for_end()
        self._link.close()
        self._store = None
        return True

    def _wait_for_end(self) -> None:
        """Wait until the service confirms the end, so that node rank 0 keeps its store open while others need it."""
        if self._link.node.running is None:
            return
        try:
            self._link.wait_for(lambda s: s.stop, _END_TIMEOUT_S)
        except JobOver:
            pass
        except (TimeoutError, ConnectionError) as error:
            reason = error or f"no answer for {_END_TIMEOUT_S:g} s"
            _log.warning("the rendezvous service did not confirm that this node has left: %s", reason)

    def _ended_by_signal(self) -> None:
        """Leave after a signal: torch's launcher does not call `shutdown` then. It has already stopped its ranks."""
        self._link.apply(partial(leave, reason="a signal ended torchrun on this node"))
        self._link.close()


def _store_of(assignment: Assignment, node: NodeState) -> StoreAddress | bool | None:
    """The store of this world.

    None: it is not known yet. False: the world is no longer assigned.
    """
    return node.store if node.assigned == assignment else False


# --- the join of this node ----------------------------------------------------------------------------


def _endpoints(params: RendezvousParameters) -> list[tuple[str, int]]:
    """Parse a comma-separated list of HOST[:PORT], each with torch's own parser."""
    words = [word for word in params.endpoint.split(",") if word.strip()]
    return [parse_rendezvous_endpoint(word, default_port=PORT) for word in words]


def _joining(params: RendezvousParameters, join_timeout_s: float, address: str) -> AgentJoined:
    """The join message. torch does not name the agents of one host, so the process id makes the node name unique."""
    host = socket.gethostname()
    agent = AgentId(f"{host}:{os.getpid()}", uuid.uuid4().hex)
    return AgentJoined(
        agent, _job_spec(params, join_timeout_s), _node_facts(host, params.local_addr or address)
    )


def _job_spec(params: RendezvousParameters, join_timeout_s: float) -> JobSpec:
    """The job spec. It switches off the rules that torch's agent already implements, for example for restarts."""
    limit = params.get_as_int("max_restarts")
    return JobSpec(
        job_id=params.run_id,
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        version=f"torchrun {torch.__version__.partition('+')[0]}",
        budget=RestartBudget(UNLIMITED if limit is None else limit),
        join_timeout_s=join_timeout_s,
        last_call_s=float(params.get_as_int("last_call_timeout", 2) or 0),
        replacement_timeout_s=join_timeout_s,
        lease_s=_lease_s(params),
        stop_budget_s=_STOP_BUDGET_S,
        scale_up=ScaleUp.IMMEDIATE,
        node_failure_limit=0,
        rules=tuple(PolicyRule(failure, PolicyAction.FAIL) for failure in _FINAL),
    )


def _lease_s(params: RendezvousParameters) -> float:
    interval_s, attempts = (
        params.get_as_int("keep_alive_interval", 5),
        params.get_as_int("keep_alive_max_attempt", 3),
    )
    return float((interval_s or 5) * (attempts or 3))


def _node_facts(host: str, address: str) -> NodeFacts:
    indexes = (os.environ.get(name, "") for name in _SCHEDULER_INDEXES)
    index = next((int(text) for text in indexes if re.fullmatch(r"\d{1,9}", text, re.ASCII)), None)
    return NodeFacts(host=host, address=address or socket.getfqdn(), nproc=1, scheduler_index=index)


def _address_towards(service: tuple[str, int]) -> str:
    """The local address of packets to the service, which peers can most likely reach too. Empty if unknown."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(*service, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


# --- as text ----------------------------------------------------------------------------------------


def _ending(node: NodeState) -> BaseException:
    outcome = node.outcome
    if outcome is None:
        refused = node.refused
        assert refused is not None
        return (RendezvousConnectionError if refused.exit_code == TRY_AGAIN else RendezvousStateError)(
            _refusal(refused)
        )
    if outcome.succeeded:
        # A standby node. RendezvousGracefulExitError is meant for it, but then torch 2.13's launcher uses the
        # agent's missing result, and fails with an AttributeError.
        return SystemExit(0)
    words = _in_words(outcome)
    return RendezvousTimeoutError(words) if outcome.exit_code == TRY_AGAIN else RendezvousClosedError(words)


def _in_words(outcome: Outcome) -> str:
    first = outcome.first_cause
    if first is None:
        return f"the job has ended: {outcome.reason}"
    # Our own rule ends the job on a final failure; the outcome's reason would only repeat that rule.
    more = "" if first.failure in _FINAL else f" ({outcome.reason})"
    return f"the job has ended: {first.reason}, on {first.node}{more}"


def _why(node: NodeState) -> str:
    if node.stop is not None:
        decision = node.stop.decision
        if decision.kind is DecisionKind.FAIL and decision.cause is not None:
            return f"the job has failed: {decision.cause.reason}, on {decision.cause.node}"
        return f"{decision.reason}; torchrun stops its ranks and joins the rendezvous again"
    if node.refused is not None:
        return f"the rendezvous refused this node: {_refusal(node.refused)}"
    return "the job has continued without this node; torchrun stops its ranks and joins the rendezvous again"


def _refusal(refused: Refused) -> str:
    """The refusal as text, with torchrun's option names. Some of them differ from those of ddp-launch."""
    found = refused.disagreement
    option = _OPTIONS.get(found.setting) if found is not None else None
    if found is None or option is None:
        return refused.reason
    return (
        f"the nodes of the job have different values of {option}: the job has {found.of_job}, "
        f"this node has {found.of_node}. Start all nodes with the same value"
    )


def _final_cause(error: ChildFailedError) -> Cause:
    """The cause of a final failure. `fail_job` sets `node` and `rank`: the service counts a node as one rank."""
    rank, failure = error.get_first_failure()
    code = failure.exitcode
    has_record = failure.error_file != _NO_ERROR_FILE
    if has_record:
        kind, what = FailureClass.USER_EXCEPTION, str(failure.message).splitlines()[0]
    elif code < 0:
        kind, what = FailureClass.SIGNAL, f"killed by {failure.signal_name()}"
    else:
        kind, what = FailureClass.EXIT_CODE, f"exit code {code}"
    return Cause(
        node="",
        rank=0,
        local_rank=failure.local_rank,
        failure=kind,
        reason=f"rank {rank}: {what}; all restarts of torchrun's --max-restarts are used",
        exit_code=128 - code if code < 0 else code,
        signal=-code if code < 0 else 0,
        at=datetime.fromtimestamp(failure.timestamp).isoformat(sep=" "),
        log=failure.error_file if has_record else "",
    )


# --- one session with the rendezvous, for a thread that has no event loop ---------------------------
#
# A separate thread runs the loop, so that heartbeats continue while torch's agent sleeps, waits or stops processes.
# The threads share the node state, which one `threading.Condition` protects. The link sends messages in the order in
# which the node state changed.

_JOIN_AGAIN_S = 1.0
_CLOSE_S = 5.0

Answer = TypeVar("Answer")


class JobOver(Exception):
    def __init__(self, node: NodeState) -> None:
        super().__init__("the rendezvous has ended for this node")
        self.node = node


class Link:
    def __init__(self, node: NodeState, open_session: Callable[[], Session]) -> None:
        self._node = node
        self._open_session = open_session
        self._changed = threading.Condition()
        self._received = 0
        self._broken: BaseException | None = None
        self._session: Session | None = None
        self._unsent: list[FromAgent] = []
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="ddp rendezvous", daemon=True)
        self._thread.start()

    @property
    def node(self) -> NodeState:
        with self._changed:
            return self._node

    def apply(self, act: Callable[[NodeState], Transition]) -> NodeState:
        """Apply an action of torch's agent to the node state, and send the resulting messages."""
        with self._changed:
            self._node, messages = act(self._node)
            self._queue(messages)
            self._changed.notify_all()
            return self._node

    def wait_for(self, look: Callable[[NodeState], Answer | None], silence_s: float) -> Answer:
        """Return the first result of `look` that is not None. Raise JobOver if the rendezvous ends before.

        Raise TimeoutError if no message came from the service for `silence_s`.
        """
        with self._changed:
            while (found := look(self._node)) is None:
                if self._node.over:
                    raise JobOver(self._node)
                if self._broken is not None:
                    raise ConnectionError(str(self._broken)) from self._broken
                received = self._received
                if not self._changed.wait(silence_s) and self._received == received:
                    raise TimeoutError
            return found

    def close(self) -> None:
        """Close the session. Messages queued before are still sent."""
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join(_CLOSE_S)

    # --- the thread of the loop ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._listen())
        except asyncio.CancelledError:
            pass
        except Exception as error:
            with self._changed:
                self._broken = error
                self._changed.notify_all()
        finally:
            self._loop.close()

    async def _listen(self) -> None:
        self._task = asyncio.current_task()
        session = self._open_session()
        try:
            with self._changed:
                self._session = session
                self._flush()
            while True:
                self._receive(await session.receive())
        finally:
            await asyncio.wait_for(session.close(), _CLOSE_S)

    def _receive(self, message: ToAgent) -> None:
        with self._changed:
            self._node, messages = handle_message(self._node, message)
            self._queue(messages)
            self._received += 1
            self._changed.notify_all()
        if isinstance(message, Refused) and message.retryable:
            self._loop.call_later(_JOIN_AGAIN_S, self._join_again)

    def _join_again(self) -> None:
        """Join again if no ranks run here. Otherwise torch's agent first reaps its ranks, then joins again."""
        with self._changed:
            if self._node.running is None:
                self._node, messages = next_rendezvous(self._node)
                self._queue(messages)

    def _queue(self, messages: tuple[FromAgent, ...]) -> None:
        self._unsent += messages
        if messages and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        with self._changed:
            if self._session is None:
                return
            for message in self._unsent:
                self._session.send(message)
            self._unsent.clear()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            self._loop.call_soon(self._cancel)


# --- the state of a node under torch's agent, and the messages that it sends ------------------------
#
# torch's agent cannot be queried, and it reports little. So the node state contains what both sides need: the
# generation that runs (`running`), and what the service has sent since then.

Transition = tuple["NodeState", tuple["FromAgent", ...]]


@dataclass(frozen=True, slots=True)
class NodeState:
    agent: AgentId
    joining: AgentJoined
    joined: bool = False
    running: Assignment | None = None  # given to torch's agent, whose ranks may be alive
    assigned: Assignment | None = None  # sealed, and not given to torch's agent yet
    store: StoreAddress | None = None  # of `assigned`
    stop: Stop | None = None  # of `running`
    dropped: bool = False  # the job continued without this node; the node may join again
    refused: Refused | None = None
    outcome: Outcome | None = None
    waits_for: str = ""  # the reason that the service sends

    @property
    def over(self) -> bool:
        return self.outcome is not None or self.refused is not None

    @property
    def must_rejoin(self) -> bool:
        """Whether the running ranks must stop, although torch's agent itself has no reason to stop them."""
        if self.running is None:
            return False
        ended_badly = self.outcome is not None and not self.outcome.succeeded
        is_replaced = self.stop is not None or self.assigned is not None
        return is_replaced or self.dropped or self.refused is not None or ended_badly


# --- messages from the service -----------------------------------------------------------------------


def handle_message(node: NodeState, message: ToAgent) -> Transition:
    match message:
        case Waiting(reason):
            return replace(node, waits_for=reason), ()
        case Assigned(assignment):
            return _assigned(node, assignment), ()
        case StoreAt(generation, store):
            mine = node.assigned is not None and node.assigned.generation == generation
            return (replace(node, store=store) if mine else node), ()
        case Stop():
            return _stopped(node, message)
        case Refused() if message.retryable:
            gone = replace(node, assigned=None, store=None, joined=False)
            return (gone, ()) if gone.running is None else (replace(gone, dropped=True), ())
        case Refused():
            return replace(node, refused=message), ()
        case Ended(outcome):
            return replace(node, outcome=outcome), ()
        case Examine(generation):  # the node cannot see torch's ranks; answer at once
            return node, (Examined(node.agent, generation, ()),)
        case Accused() | Notice():
            return node, ()
        case CheckpointRequested():  # torch's agent cannot forward this; the world grows at a restart
            return node, ()
        case _:
            assert_never(message)


def _assigned(node: NodeState, assignment: Assignment) -> NodeState:
    """Store a new assignment. A resumed session receives known assignments again."""
    known = max((a.generation for a in (node.running, node.assigned) if a is not None), default=0)
    if assignment.generation <= known:
        return node
    return replace(node, assigned=assignment, store=None)


def _stopped(node: NodeState, order: Stop) -> Transition:
    if node.running is not None and node.running.generation == order.generation:
        return replace(node, stop=order), ()
    if node.assigned is not None and node.assigned.generation == order.generation:
        node = replace(node, assigned=None, store=None)
    # That generation does not run here: it ended before torch's agent got it, or its ranks are already reaped.
    return node, (AgentStopped(node.agent, order.generation),)


# --- calls of torch's agent --------------------------------------------------------------------------


def next_rendezvous(node: NodeState) -> Transition:
    """`next_rendezvous`: torch's agent has reaped all earlier ranks."""
    node, messages = _reaped(node)
    if node.over or node.joined:
        return node, messages
    return replace(node, joined=True), (*messages, node.joining)


def _reaped(node: NodeState) -> Transition:
    ran = node.running
    if ran is None:
        return node, ()
    stopped = AgentStopped(node.agent, ran.generation)
    messages: tuple[FromAgent, ...] = (stopped,)
    if not node.must_rejoin:
        messages = (RankFailed(node.agent, ran.generation, _restart_request(node.agent, ran)), stopped)
    elif node.stop is None:
        messages = ()
    return replace(node, running=None, stop=None, dropped=False), messages


def _restart_request(agent: AgentId, ran: Assignment) -> Cause:
    """The cause for a request to restart. A more specific cause of another node is preferred."""
    reason = "torchrun restarts its ranks after a failure; see the log of torchrun on that node"
    return Cause(agent.node, ran.rank_offset, 0, FailureClass.CONSEQUENCE, reason, 1)


def give_to_torch(node: NodeState, assignment: Assignment) -> Transition:
    """Give the assignment to torch's agent, unless that world has ended in the meantime."""
    if node.assigned != assignment or node.over:
        return node, ()
    return replace(node, running=assignment, assigned=None, store=None, stop=None), ()


def finish(node: NodeState) -> Transition:
    """torch's agent has finished, and all its ranks succeeded."""
    if node.running is None or node.must_rejoin:
        return leave(node, "all its ranks have finished, and torchrun does not start them again")
    return node, (RanksFinished(node.agent, node.running.generation),)


def fail_job(node: NodeState, cause: Cause) -> Transition:
    """torch's agent does not restart again. By the rules of `_job_spec`, a failure of this class ends the job."""
    if node.running is None or node.over or node.dropped:
        return leave(node, cause.reason)
    agent, ran = node.agent, node.running
    cause = replace(cause, node=agent.node, rank=ran.rank_offset)
    return node, (RankFailed(agent, ran.generation, cause), AgentStopped(agent, ran.generation))


def leave(node: NodeState, reason: str) -> Transition:
    if node.over or not node.joined:
        return node, ()
    return node, (AgentLeft(node.agent, reason),)
