"""torch's interface to a rendezvous, implemented over one of our sessions."""

from __future__ import annotations

import atexit
import logging
import os
import re
import socket
import sys
import uuid
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

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

from rendezvous.client.options import client_options
from rendezvous.client.session import connect
from rendezvous.torchrun.link import JobOver, Link
from rendezvous.torchrun.standing import Standing, come, finish, give_up, hand_out, leave
from rendezvous.values.events import AgentJoined, StoreOpened
from rendezvous.values.types import (
    UNLIMITED,
    AgentId,
    Cause,
    CrashLoop,
    DecisionKind,
    FailureClass,
    JobSpec,
    NodeFacts,
    PolicyAction,
    PolicyRule,
    RestartBudget,
    ScaleUp,
    StoreAddress,
)
from rendezvous.values.wire_names import PORT

if TYPE_CHECKING:
    from collections.abc import Callable

    from rendezvous.torchrun.link import Answer
    from rendezvous.values.events import Refused
    from rendezvous.values.types import Assignment, Outcome

_log = logging.getLogger(__name__)

NAME = "ddp"
_FAREWELL_S = 10.0
_TRY_AGAIN = 75
_NO_ERROR_FILE = "<N/A>"
# torch's agent stops its ranks with a grace of 30 s, then kills and waits for up to 30 s more.
_STOP_BUDGET_S = 75.0
_FINAL = (FailureClass.USER_EXCEPTION, FailureClass.SIGNAL, FailureClass.EXIT_CODE)
_OPTIONS = {  # of torchrun, by setting
    "budget": "--rdzv-conf max_restarts",
    "last_call_s": "--rdzv-conf last_call_timeout",
    "join_timeout_s": "--rdzv-conf join_timeout",
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
            Standing(agent, joining),
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

    # --- meeting -------------------------------------------------------------------------------------

    def next_rendezvous(self) -> RendezvousInfo:
        self._link.do(come)
        while True:
            assignment = self._await(lambda standing: standing.assigned)
            info = self._meet(assignment)
            if info is not None:
                return info

    def _await(self, look: Callable[[Standing], Answer | None]) -> Answer:
        try:
            return self._link.wait_for(look, self._join_timeout_s)
        except JobOver as over:
            raise _ending(over.standing) from None
        except TimeoutError as error:
            words = f"not a word from the rendezvous service for {self._join_timeout_s:g} s"
            raise RendezvousTimeoutError(words) from error
        except ConnectionError as error:
            raise RendezvousConnectionError(str(error)) from error

    def _meet(self, assignment: Assignment) -> RendezvousInfo | None:
        """Complete this world. Return None if it broke before it was complete; another one follows."""
        if assignment.node_rank == 0:
            self._open_store(assignment)
        told = self._await(partial(_told_of, assignment))
        if not isinstance(told, StoreAddress) or not self._connected(told, assignment):
            return None
        standing = self._link.do(partial(hand_out, assignment=assignment))
        return self._info(assignment, told) if standing.running == assignment else None

    def _open_store(self, assignment: Assignment) -> None:
        host = assignment.store_host
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self._read_timeout)
        opened = StoreAddress(host, self._store.port)
        generation = assignment.generation
        self._link.do(lambda s: (s, (StoreOpened(s.agent, generation, opened),)))

    def _connected(self, address: StoreAddress, assignment: Assignment) -> bool:
        if assignment.node_rank == 0:
            return True
        try:
            self._store = TCPStore(
                address.host, address.port, wait_for_workers=False, timeout=self._read_timeout
            )
        except RuntimeError as error:  # torch's DistError is one
            if self._link.standing.assigned != assignment:
                return False
            words = f"no way to the store of node rank 0 at {address.host}:{address.port}: {error}"
            raise RendezvousConnectionError(words) from error
        return True

    def _info(self, assignment: Assignment, address: StoreAddress) -> RendezvousInfo:
        assert self._store is not None
        rank, store = assignment.node_rank, PrefixStore("torchrun", self._store)
        if self.use_agent_store:
            ranks_meet_at = RendezvousStoreInfo(address.host, address.port)
        else:
            ranks_meet_at = RendezvousStoreInfo.build(rank, store, assignment.store_host)
        return RendezvousInfo(store, rank, assignment.n_nodes, ranks_meet_at)

    def num_nodes_waiting(self) -> int:
        """A value above 0 makes torch's agent stop its ranks and join again, without using its restart budget."""
        standing = self._link.standing
        if not standing.must_come_again:
            return 0
        if standing.running is not None and self._warned_of != standing.running.generation:
            self._warned_of = standing.running.generation
            _log.warning("%s", _why(standing))
        return 1

    # --- parting -------------------------------------------------------------------------------------

    def is_closed(self) -> bool:
        return self._link.standing.over

    def set_closed(self) -> None:
        self._link.do(finish)

    def shutdown(self) -> bool:
        """Report how the agent ended. torch does not pass this on, but calls this while it handles the exception."""
        atexit.unregister(self._ended_by_signal)
        error = sys.exc_info()[1]
        if error is None:
            self._link.do(finish)
        elif isinstance(error, ChildFailedError):
            self._link.do(partial(give_up, cause=_final_cause(error)))
        else:
            self._link.do(partial(leave, reason=f"its torchrun ended: {type(error).__name__}: {error}"))
        self._hear_out()
        self._link.close()
        self._store = None
        return True

    def _hear_out(self) -> None:
        """Wait until the service confirms the end, so that node rank 0 keeps its store open while others need it."""
        if self._link.standing.running is None:
            return
        try:
            self._link.wait_for(lambda s: s.stop, _FAREWELL_S)
        except JobOver:
            pass
        except (TimeoutError, ConnectionError) as error:
            _log.warning("the rendezvous service did not answer the goodbye: %s", error or "no word of it")

    def _ended_by_signal(self) -> None:
        """Leave after a signal: torch's launcher does not call `shutdown` then. Its ranks are stopped by now."""
        self._link.do(partial(leave, reason="its torchrun was ended by a signal"))
        self._link.close()


def _told_of(assignment: Assignment, standing: Standing) -> StoreAddress | bool | None:
    """The store of this world; False if the world is no longer assigned, None while the store is unknown."""
    return standing.store if standing.assigned == assignment else False


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
    """The job spec. It switches off the rules that torch's agent has itself."""
    limit = params.get_as_int("max_restarts")
    return JobSpec(
        job_id=params.run_id,
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        version=f"torchrun {torch.__version__.partition('+')[0]}",
        budget=RestartBudget(UNLIMITED if limit is None else limit),
        crash_loop=CrashLoop(times=0),
        join_timeout_s=join_timeout_s,
        last_call_s=float(params.get_as_int("last_call_timeout", 2) or 0),
        replacement_timeout_s=join_timeout_s,
        stop_budget_s=_STOP_BUDGET_S,
        scale_up=ScaleUp.IMMEDIATE,
        node_failure_limit=0,
        rules=tuple(PolicyRule(failure, PolicyAction.FAIL) for failure in _FINAL),
    )


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


# --- in words ----------------------------------------------------------------------------------------


def _ending(standing: Standing) -> BaseException:
    outcome = standing.outcome
    if outcome is None:
        refused = standing.refused
        assert refused is not None
        return (RendezvousConnectionError if refused.exit_code == _TRY_AGAIN else RendezvousStateError)(
            _refusal(refused)
        )
    if outcome.succeeded:
        # A standby node. RendezvousGracefulExitError is meant for it, but then torch 2.13's launcher uses the
        # agent's missing result, and fails with an AttributeError.
        return SystemExit(0)
    words = _in_words(outcome)
    return RendezvousTimeoutError(words) if outcome.exit_code == _TRY_AGAIN else RendezvousClosedError(words)


def _in_words(outcome: Outcome) -> str:
    first = outcome.first_cause
    if first is None:
        return f"the job is over: {outcome.reason}"
    # Our own rule ends the job on a final failure; the outcome's reason would only repeat that rule.
    more = "" if first.failure in _FINAL else f" ({outcome.reason})"
    return f"the job is over: on {first.node}, {first.reason}{more}"


def _why(standing: Standing) -> str:
    if standing.stop is not None:
        decision = standing.stop.decision
        if decision.kind is DecisionKind.FAIL and decision.cause is not None:
            return f"the job fails: on {decision.cause.node}, {decision.cause.reason}"
        return f"{decision.reason}; torchrun stops its ranks and meets again"
    if standing.refused is not None:
        return f"the rendezvous refuses this node: {_refusal(standing.refused)}"
    return "the job went on without this node; torchrun stops its ranks and joins again"


def _refusal(refused: Refused) -> str:
    """The refusal as text, with torchrun's options: they differ from those of ddp-launch, as does --max-restarts."""
    found = refused.disagreement
    option = _OPTIONS.get(found.setting) if found is not None else None
    if found is None or option is None:
        return refused.reason
    return (
        f"the job's nodes disagree about {option}: the job has {found.of_job}, this node has {found.of_node}"
    )


def _final_cause(error: ChildFailedError) -> Cause:
    """The cause of a final failure. The standing sets `node` and `rank`: the service counts the node as one rank."""
    rank, failure = error.get_first_failure()
    code = failure.exitcode
    told = failure.error_file != _NO_ERROR_FILE
    if told:
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
        reason=f"rank {rank}: {what}; torchrun has no restart left",
        exit_code=128 - code if code < 0 else code,
        signal=-code if code < 0 else 0,
        at=datetime.fromtimestamp(failure.timestamp).isoformat(sep=" "),
        log=failure.error_file if told else "",
    )
