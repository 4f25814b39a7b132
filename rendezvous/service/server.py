"""The gRPC server: its services, its ports, its transport settings, and its shutdown.

On SIGTERM the service closes its port for new streams. It redirects each agent to another replica, or asks it to
reconnect. The jobs stay in the store unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from functools import cache
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from rendezvous.access.auth import (
    Certificates,
    Denied,
    Gate,
    Identity,
    Reason,
    Refusals,
    Right,
    secret_credentials,
    server_credentials,
)
from rendezvous.access.secret import Secret
from rendezvous.codec import BadMessage, read_from_agent, to_agent_bytes
from rendezvous.diagnosing import goodput
from rendezvous.metrics import Metrics
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.replay.journal import Journals
from rendezvous.rounds.admission import join_problem, reported_state_problem
from rendezvous.service import condition
from rendezvous.service.agent_stream import (
    MESSAGE_BYTES,
    AgentStream,
    Counts,
    LimitReached,
    Rates,
    ServiceLimits,
    StreamAborted,
)
from rendezvous.service.calls import Calls, NotFound, count_open
from rendezvous.service.connections import Connections
from rendezvous.service.jobs import RESERVED, Conversations, Job, Jobs
from rendezvous.service.operations import Operations
from rendezvous.service.owner import OwnedByOther
from rendezvous.session_replay import Redirect
from rendezvous.store.protocol import Store, Values
from rendezvous.values.contracts import TIME_METADATA, UNUSABLE
from rendezvous.values.error_codes import Code, Coded
from rendezvous.values.events import AgentJoined, Refused
from rendezvous.values.late_dataclass import dataclass

_log = logging.getLogger("rendezvous")

AGENTS = "rendezvous.v1.Agents"
OPERATIONS = "rendezvous.v1.Operations"
SCRATCHPAD = "rendezvous.v1.Scratchpad"
HEALTH = "grpc.health.v1.Health"

_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", 256),  # of one connection
    ("grpc.so_reuseport", 0),  # a second service on the same port fails instead of sharing it
    ("grpc.http2.bdp_probe", 0),  # do not ping with each message to tune the windows ...
    ("grpc.http2.lookahead_bytes", MESSAGE_BYTES),  # ... a stream may have this much in flight
    ("grpc.server_handshake_timeout_ms", 40_000),  # longer than the agents of a large job wait for it
    ("grpc.http2.max_requests_per_read", 4),
    ("grpc.max_connection_idle_ms", 300_000),  # a connection without a stream
    ("grpc.keepalive_time_ms", 30_000),  # detects a peer that vanished
    ("grpc.keepalive_timeout_ms", 40_000),  # thousands may be joining
    ("grpc.http2.ping_timeout_ms", 40_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 3),
)
_STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class ServerOptions:
    listen: tuple[str, ...]
    advertise: str = ""  # default: the first of `listen`, with its actual port
    key_file: str = ""
    certificates: Certificates | None = None
    certificate_files: Mapping[str, str] = field(default_factory=dict)  # whose ends the metrics show
    secret: Secret | None = None  # of one job; replaces certificates and tokens
    history_s: float = 14 * 86_400.0
    history_jobs: int = 1000
    resume_grace_s: float = 1.0
    return_after_s: float = 0.5  # after a shutdown, agents reconnect no sooner
    reflection: bool = False
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    journals: Journals | None = None  # for `ddpctl replay`


class CannotListen(Coded):
    """An address cannot be used. The message is for the user who starts the service."""

    code = Code.CANNOT_LISTEN


class Server:
    """The gRPC server. In a running event loop, call `start`, then `close`."""

    def __init__(self, store: Store, options: ServerOptions) -> None:
        self.metrics = Metrics()
        self.refusals = Refusals(self.metrics)
        self.ports: list[int] = []
        self._options, self._ownership = options, store.ownership
        limits = options.limits
        self._most = _connections(len(options.listen))
        self._connections = Connections(self._most * len(options.listen), self._note_crowd)
        self.gate = gate = Gate(options.key_file, self._connections.admit)
        self.jobs = Jobs(
            store,
            limits,
            self.metrics,
            history_s=options.history_s,
            history_jobs=options.history_jobs,
            resume_grace_s=options.resume_grace_s,
            one_tenant=not options.key_file,
            journals=options.journals,
        )
        self.health = HealthAnswers((AGENTS, OPERATIONS, SCRATCHPAD))
        self.agents = Agents(self.jobs, gate, limits)
        self.operations = Operations(self.jobs, gate, limits)
        self.calls = Calls(gate, self.metrics, self.refusals, limits, self._connections.note_call)
        self._services: dict[str, Agents | Operations | Scratchpad | HealthAnswers | Reflection] = {
            AGENTS: self.agents,
            OPERATIONS: self.operations,
            SCRATCHPAD: Scratchpad(self.jobs, store, limits),
            HEALTH: self.health,
        }
        if options.reflection:
            described = Reflection(tuple(self._services))
            self._services |= dict.fromkeys(NAMES, described)
        self._server: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._delay = condition.Delay()
        self._declare_gauges()

    async def start(self) -> None:
        """Listen and serve. Raises `CannotListen`."""
        _collect_less_often()
        server = self._server = grpc.aio.server(
            options=(
                *_OPTIONS,
                *_pending_calls(self._options.limits),
                ("grpc.max_allowed_incoming_connections", self._most),
            )
        )
        for name, service in self._services.items():
            methods = grpc.method_handlers_generic_handler(name, service.methods(self.calls))
            server.add_generic_rpc_handlers((methods,))
        self.ports = [self._listen(server, address) for address in self._options.listen]
        self._ownership.reachable_at(self._options.advertise or self._first_port())
        await self.jobs.resume_all()
        await server.start()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self.jobs.maintain(), name="maintain jobs"),
            loop.create_task(self._connections.guard(self.ports), name="guard connections"),
            loop.create_task(self._delay.measure(), name="measure delay"),
        ]
        self.health.set(True)

    def _first_port(self) -> str:
        first = self._options.listen[0]
        return first if first.startswith("unix:") else f"{first.rpartition(':')[0]}:{self.ports[0]}"

    def _listen(self, server: grpc.aio.Server, address: str) -> int:
        certificates, secret = self._options.certificates, self._options.secret
        try:
            with _private(address):
                if secret is not None:
                    return server.add_secure_port(address, secret_credentials(secret))
                if certificates is None:
                    return server.add_insecure_port(address)
                return server.add_secure_port(address, server_credentials(certificates))
        except RuntimeError as error:  # which only refers to gRPC's own log
            raise CannotListen(_cannot_listen(address, _why_not(address) or str(error))) from error
        except OSError as error:
            raise CannotListen(f"cannot listen on {address}: {in_words(error)}") from error

    async def close(self) -> None:
        """Shut down. May be called after a `start` that failed."""
        self.health.set(False)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.jobs.close(self._options.return_after_s)
        if self._server is not None:
            await self._server.stop(_STOP_S)
        if self._options.journals is not None:
            await asyncio.to_thread(self._options.journals.close)

    def _note_crowd(self, address: str, words: str) -> None:
        self.refusals.note(Reason.CROWD, address, words)

    def _declare_gauges(self) -> None:
        metrics = self.metrics
        metrics.gauge(
            "key_file_usable",
            "0: the key file cannot be read, so keys that were removed from it are still valid.",
            lambda: float(not self.gate.problem),
        )
        condition.declare(
            metrics,
            self._delay,
            self._options.certificate_files,
            lambda: max((job.owner.store_wait_s for job in self.jobs), default=0.0),
        )
        metrics.gauge("streams", "Open agent streams.", lambda: self.agents.streams)
        metrics.gauges("jobs", "Open jobs, by phase.", "phase", self._jobs_by_phase)
        metrics.gauge(
            "backlog", "Queued events of all jobs together.", lambda: sum(j.owner.backlog for j in self.jobs)
        )
        metrics.gauges(
            "job_goodput",
            "Share of the time of all ranks of a job in steps that count, since its start.",
            "job_id",
            self._goodput_by_job,
        )
        metrics.gauge(
            "watchers", "Open WatchEvents streams.", lambda: sum(len(j.watchers) for j in self.jobs)
        )

    def _goodput_by_job(self) -> dict[str, float]:
        """Of jobs that have not ended, as far as their ranks show what they do."""
        running = [job for job in self.jobs if job.state.outcome is None]
        times = {job.job_id: goodput.whole(job.state.time) for job in running}
        return {job_id: time.spent.goodput for job_id, time in times.items() if time is not None}

    def _jobs_by_phase(self) -> dict[str, float]:
        counted: dict[str, float] = {}
        for job in self.jobs:
            phase = job.state.phase.value
            counted[phase] = counted.get(phase, 0) + 1
        return counted


def _pending_calls(limits: ServiceLimits) -> tuple[tuple[str, int], ...]:
    """Raise gRPC's limit on waiting calls.

    By default gRPC drops calls at random once a thousand of them wait. All agents of a large job may connect at the
    same moment. Dropped agents would reconnect and add more load.
    """
    most = limits.streams_per_identity
    return (
        ("grpc.server.max_pending_requests", most),
        ("grpc.server.max_pending_requests_hard_limit", most),
    )


@contextlib.contextmanager
def _private(address: str) -> Iterator[None]:
    """Restrict a Unix socket to this user, whatever the umask is."""
    before = os.umask(0o177) if address.startswith("unix:") else None
    try:
        yield
    finally:
        if before is not None:
            os.umask(before)


def in_words(error: OSError) -> str:
    """The kernel's message, without the numbers and brackets that libraries add."""
    words = (
        error.strerror if isinstance(error, socket.gaierror) or not error.errno else os.strerror(error.errno)
    )
    return ": ".join(filter(None, (error.filename, words or str(error))))


def _cannot_listen(address: str, reason: str) -> str:
    return f"cannot listen on {address}: {reason}. Check --listen, and whether another program uses it"


def _why_not(address: str) -> str:
    """The kernel's error for the same address; empty if it can be bound."""
    try:
        if address.startswith("unix:"):
            path = address.removeprefix("unix:").removeprefix("//")
            with socket.socket(socket.AF_UNIX) as probe:
                probe.bind(path)
                os.unlink(path)
        else:
            _bind_port(address)
    except OSError as error:
        return in_words(error)
    return ""


def _bind_port(address: str) -> None:
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    family, kind, _, _, where = found[0]
    with socket.socket(family, kind) as probe:
        probe.bind(where)
        probe.listen()


def _collect_less_often() -> None:
    """Make garbage collection rarer.

    The objects of a stream live as long as the stream. While thousands of agents join, traversing all these objects for
    every few hundred new ones would take 10 % of the CPU time.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _connections(ports: int) -> int:
    """How many connections of each port gRPC keeps: it closes others when it accepts them.

    A quarter of the descriptors is left for the store, the journals, the health port and the page.
    """
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(16, descriptors * 3 // 4 // max(1, ports))


def raise_file_limit() -> int:
    """Raise the soft limit on open files to the hard limit, since each agent is a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


# --- health -----------------------------------------------------------------------------------------
#
# grpc.health.v1.Health, without generated code: a request contains a service name, the answer a status number.
#
# So it cannot conflict with another copy of that schema in the same process.

SERVING = b"\x08\x01"
NOT_SERVING = b"\x08\x02"
_UNKNOWN_SERVICE = b"\x08\x03"
LIVE = "live"  # for liveness probes: a service that is temporarily unable to serve must not be killed for it
_WATCHES = 64


class HealthAnswers:
    """Health answers. They need no token, since probes send none. They contain only the status of the service."""

    def __init__(self, services: tuple[str, ...]) -> None:
        self._services = ("", *services)
        self._serving = False
        self._changed = asyncio.Event()
        self._watches = 0
        self._arrived: Callable[[Any], None] = lambda _context: None

    @property
    def serving(self) -> bool:
        return self._serving

    def set(self, serving: bool) -> None:
        self._serving = serving
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def methods(self, calls: Calls) -> dict[str, Any]:
        self._arrived = calls.arrived
        return {
            "Check": grpc.unary_unary_rpc_method_handler(self._check),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
        }

    def answer(self, service: str) -> bytes:
        if service == LIVE:
            return SERVING
        if service not in self._services:
            return _UNKNOWN_SERVICE
        return SERVING if self._serving else NOT_SERVING

    async def _check(self, data: bytes, context: Any) -> bytes:
        self._arrived(context)
        status = self.answer(_service(data))
        if status == _UNKNOWN_SERVICE:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service name")
        await context.send_initial_metadata(((TIME_METADATA, f"{time.time():.6f}"),))
        return status

    async def _watch(self, data: bytes, context: Any) -> None:
        self._arrived(context)
        if self._watches >= _WATCHES:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{_WATCHES} health watches are open, which is the limit: close some, or use Check",
            )
        service, sent = _service(data), b""
        self._watches += 1
        try:
            while True:
                changed = self._changed
                if (status := self.answer(service)) != sent:
                    sent = status
                    await context.write(status)
                await changed.wait()
        finally:
            self._watches -= 1


def _service(data: bytes) -> str:
    """Decode field 1, a short string: tag, length, text."""
    if len(data) < 2 or data[0] != 0x0A or data[1] != len(data) - 2:
        return "" if not data else "?"
    return data[2:].decode("utf-8", "replace")


# --- grpc.reflection: describes the services and their messages to tools such as grpcurl ------------
#
# The schema of reflection itself is built here, in a descriptor pool of its own. So it cannot conflict with another
# copy in the same process, and needs no further package. `v1` and `v1alpha` are the same on the wire.

NAMES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
_AT_ONCE = 16
_PACKAGE = "ddp.reflection"
_INT, _STRING, _BYTES, _MESSAGE = 5, 9, 12, 11  # FieldDescriptorProto.Type
_NOT_FOUND, _UNIMPLEMENTED = 5, 12

# message -> (field, number, type, "*" repeated, "?" one of several, or the name of its message)
_SCHEMA: dict[str, tuple[tuple[str, int, int, str], ...]] = {
    "Request": (
        ("host", 1, _STRING, ""),
        ("file_by_filename", 3, _STRING, "?"),
        ("file_containing_symbol", 4, _STRING, "?"),
        ("list_services", 7, _STRING, "?"),
    ),
    "Response": (
        ("valid_host", 1, _STRING, ""),
        ("original_request", 2, _MESSAGE, "Request"),
        ("file_descriptor_response", 4, _MESSAGE, "Files"),
        ("list_services_response", 6, _MESSAGE, "Services"),
        ("error_response", 7, _MESSAGE, "Error"),
    ),
    "Files": (("file_descriptor_proto", 1, _BYTES, "*"),),
    "Services": (("service", 1, _MESSAGE, "*Service"),),
    "Service": (("name", 1, _STRING, ""),),
    "Error": (("error_code", 1, _INT, ""), ("error_message", 2, _STRING, "")),
}


class Reflection:
    """Needs no token: the schema is public, and the service offers reflection only with `--reflection`."""

    def __init__(self, services: tuple[str, ...]) -> None:
        self._services = (*services, *NAMES)
        self._streams = 0

    def methods(self, calls: Calls) -> dict[str, Any]:
        return {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(calls.guard(self._serve))}

    async def _serve(self, _: Any, context: Any) -> None:
        if self._streams >= _AT_ONCE:
            raise LimitReached("too many reflection streams are open; try again later")
        self._streams += 1
        try:
            while (data := await context.read()) is not grpc.aio.EOF:
                await context.write(self.answer(data))
        finally:
            self._streams -= 1

    def answer(self, data: bytes) -> bytes:
        kinds = _kinds()
        request = kinds["Request"].FromString(data)
        response = kinds["Response"](valid_host=request.host, original_request=request)
        match request.WhichOneof("asked"):
            case "list_services":
                response.list_services_response.service.extend(
                    kinds["Service"](name=name) for name in self._services
                )
            case "file_by_filename" if request.file_by_filename == pb.DESCRIPTOR.name:
                response.file_descriptor_response.file_descriptor_proto.append(pb.DESCRIPTOR.serialized_pb)
            case "file_containing_symbol" if _is_ours(request.file_containing_symbol):
                response.file_descriptor_response.file_descriptor_proto.append(pb.DESCRIPTOR.serialized_pb)
            case None:
                response.error_response.error_code = _UNIMPLEMENTED
                response.error_response.error_message = "extensions are not supported"
            case _:
                response.error_response.error_code = _NOT_FOUND
                response.error_response.error_message = "unknown symbol or file"
        answer: bytes = response.SerializeToString()
        return answer


def _is_ours(symbol: str) -> bool:
    """Whether it is a message, an enum or a service of ours, or a part of one, such as a method."""
    for name in (symbol, symbol.rpartition(".")[0]):
        try:
            return bool(descriptor_pool.Default().FindFileContainingSymbol(name).name == pb.DESCRIPTOR.name)
        except KeyError:
            continue
    return False


@cache
def _kinds() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="ddp_reflection.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        if any(how == "?" for *_, how in fields):
            message.oneof_decl.add(name="asked")
        for field_name, number, kind, how in fields:
            field = message.field.add(name=field_name, number=number, type=kind)
            field.label = field.LABEL_REPEATED if how.startswith("*") else field.LABEL_OPTIONAL
            if how == "?":
                field.oneof_index = 0
            if kind == _MESSAGE:
                field.type_name = f".{_PACKAGE}.{how.lstrip('*')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _SCHEMA
    }


# --- the service Agents: attach a stream to its job, after its first message ------------------------

_FIRST_MESSAGE_S = 10.0
_NO_OWNER_YET_S = 0.2
_STREAM_METADATA = "rendezvous-stream"


class Agents:
    def __init__(self, jobs: Jobs, gate: Gate, limits: ServiceLimits) -> None:
        self._jobs, self._gate, self._limits = jobs, gate, limits
        self._streams = Counts("streams", limits.streams_per_identity, limits.agents, option="--max-agents")
        self._rates = Rates(limits.joins_per_s, limits.join_burst)
        self._conversations = Conversations(jobs, gate, limits)

    @property
    def streams(self) -> int:
        return self._streams.total

    def methods(self, calls: Calls) -> dict[str, Any]:
        # Raw bytes both ways: the codec decodes them, and a broadcast is encoded only once.
        attend: Any = grpc.stream_stream_rpc_method_handler(calls.guard(self._attend))
        return {"Attend": attend, **self._conversations.methods(calls)}

    async def _attend(self, _: Any, context: Any) -> None:
        identity = self._gate.identify(context)
        identity.require(Right.JOIN)
        with count_open(self._streams, identity):
            joined = await self._read_join(context)
            if joined is None:
                return
            identity.require(Right.JOIN, joined.spec.job_id)
            await self._await_turn(identity)
            words = join_problem(joined.agent, joined.spec, joined.facts) or reported_state_problem(
                joined.generation, joined.running
            )
            if words:
                await context.write(to_agent_bytes(Refused(words, UNUSABLE)))
                return
            job = await self._job_of(joined, context)
            if job is not None:
                self._require_new(job, joined, context)
                await self._stay(job, joined, context)

    async def _read_join(self, context: Any) -> AgentJoined | None:
        async with asyncio.timeout(_FIRST_MESSAGE_S):
            data = await context.read()
        if data is grpc.aio.EOF:
            return None
        message = read_from_agent(data, None)
        if not isinstance(message, AgentJoined):
            raise BadMessage("the first message of a stream must be a join")
        return message

    async def _await_turn(self, identity: Identity) -> None:
        wait_s = self._rates.take(identity.name, asyncio.get_running_loop().time())
        if wait_s > 0.0:
            await asyncio.sleep(wait_s)

    async def _job_of(self, joined: AgentJoined, context: Any) -> Job | None:
        job_id = joined.spec.job_id
        try:
            job = self._jobs.if_open(job_id) or await self._jobs.open(job_id)
        except OwnedByOther as error:
            await context.write(
                to_agent_bytes(Redirect(error.address, 0.0 if error.address else _NO_OWNER_YET_S, str(error)))
            )
            return None
        if len(job.streams) >= self._limits.agents_per_job and joined.agent not in job.streams:
            raise LimitReached(
                f"job {job_id!r} already has {len(job.streams)} agents, which is a fixed limit: start fewer nodes"
            )
        return job

    def _require_new(self, job: Job, joined: AgentJoined, context: Any) -> None:
        """Reject a replayed join: an agent numbers its streams, so a repeated number is not a new stream."""
        if job.is_new_stream(joined.agent, _number(context.invocation_metadata() or ())):
            return
        words = (
            f"replayed join: {joined.agent} already opened a stream with this number or a higher one. The message was "
            "sent twice, or two agents have the same identity. If it happens again, restart the agent"
        )
        raise Denied(words, Reason.REPLAYED_JOIN)

    async def _stay(self, job: Job, joined: AgentJoined, context: Any) -> None:
        owner, backlog = job.owner, self._limits.backlog

        def busy() -> bool:
            return owner.backlog > backlog

        stream = AgentStream(joined.agent, context, self._limits, owner.note_contact, owner.post, busy)
        job.attach(stream)
        try:
            owner.post(joined)
            await stream.run()
        except StreamAborted as aborted:
            aborted.whose = f"{joined.agent} in job {job.job_id}"
            raise
        finally:
            job.detach(stream)


def _number(metadata: Iterable[tuple[str, str | bytes]]) -> int:
    """The number of the stream; 0 if this client does not number its streams."""
    text = next((value for key, value in metadata if key == _STREAM_METADATA), "")
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 10 else 0


# --- the gRPC service Scratchpad: a few values and barriers per job, for scripts --------------------
#
# The store keeps the values. Only the replica that owns the job knows which members have entered a barrier, so a member
# enters again when its connection breaks. The service first stores that a barrier is complete, and then answers its
# members. So members that reconnect later pass the barrier too. A member counts while a call of it waits: one that has
# given up, or is just reconnecting, is not in the barrier.

_PARTIES = 100_000


class _Barrier:
    def __init__(self) -> None:
        self.members: Counter[str] = Counter()  # the calls of each that wait; it leaves with the last of them
        self.passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Scratchpad:
    def __init__(self, jobs: Jobs, store: Store, limits: ServiceLimits) -> None:
        self._jobs, self._store = jobs, store
        self._counts = Counts("barriers", limits.barriers_per_job, limits.barriers)
        self._barriers: dict[tuple[str, str], _Barrier] = {}

    def methods(self, calls: Calls) -> dict[str, Any]:
        return {
            "GetValue": calls.unary(Right.VALUES, pb.GetValueRequest, self._get),
            "PutValue": calls.unary(Right.VALUES, pb.PutValueRequest, self._put),
            "DeleteValue": calls.unary(Right.VALUES, pb.DeleteValueRequest, self._delete),
            "EnterBarrier": calls.unary(Right.VALUES, pb.EnterBarrierRequest, self._enter),
        }

    async def _values(self, job_id: str) -> Values:
        """The values of an existing job: clients must not fill the store with jobs that do not exist."""
        if await self._jobs.find(job_id) is None:
            raise NotFound(f"job {job_id!r} does not exist")
        return self._store.values(job_id)

    async def _get(self, request: Any, _: Identity) -> Any:
        values, key = await self._values(request.job_id), _key(request.key)
        value = await values.get(key)
        if request.wait_s > 0 and (value is None or value.version <= request.after_version):
            async with asyncio.timeout(min(request.wait_s, 3600.0)):
                value = await values.wait(key, request.after_version)
        if value is None:
            raise NotFound(f"value {key!r} does not exist")
        return pb.GetValueResponse(value=value.data, version=value.version)

    async def _put(self, request: Any, _: Identity) -> Any:
        values, key = await self._values(request.job_id), _key(request.key)
        if request.HasField("expected_version"):
            version = await values.compare_and_put(key, request.value, request.expected_version)
        else:
            version = await values.put(key, request.value)
        return pb.PutValueResponse(version=version)

    async def _delete(self, request: Any, _: Identity) -> Any:
        values = await self._values(request.job_id)
        return pb.DeleteValueResponse(deleted=await values.delete(_key(request.key)))

    # --- barriers ----------------------------------------------------------------------------------

    async def _enter(self, request: Any, _: Identity) -> Any:
        values, name = await self._values(request.job_id), _key(request.name)
        if not 1 <= request.parties <= _PARTIES:
            raise BadMessage(f"invalid number of parties {request.parties}: use 1 to {_PARTIES:,}")
        if not 0 < len(request.member) <= 256:
            raise BadMessage(f"invalid member name of {len(request.member)} characters: use 1 to 256")
        if not request.wait_s > 0:
            raise BadMessage(f"invalid wait_s {request.wait_s:g}: use a number of seconds above 0")
        mark = f"{RESERVED}barrier/{name}"
        with self._entered(request.job_id, name, request.member) as barrier:
            # Read after entering: if the barrier is passed later, its future reports that.
            if await values.get(mark) is not None:
                return pb.EnterBarrierResponse(arrived=request.parties)
            if len(barrier.members) >= request.parties and not barrier.passed.done():
                await values.put(mark, b"passed")
                if not barrier.passed.done():
                    barrier.passed.set_result(None)
            async with asyncio.timeout(min(request.wait_s, 3600.0)):
                await asyncio.shield(barrier.passed)
            return pb.EnterBarrierResponse(arrived=request.parties)

    @contextmanager
    def _entered(self, job_id: str, name: str, member: str) -> Iterator[_Barrier]:
        """Enter the barrier for the time of one call. It is removed when its last call ends, also after an error."""
        key = (job_id, name)
        if key not in self._barriers:
            self._counts.enter(job_id)
            self._barriers[key] = _Barrier()
        barrier = self._barriers[key]
        barrier.members[member] += 1
        try:
            yield barrier
        finally:
            barrier.members[member] -= 1
            if not barrier.members[member]:
                del barrier.members[member]
            if not barrier.members:
                del self._barriers[key]
                self._counts.leave(job_id)


def _key(key: str) -> str:
    if key.startswith(RESERVED):
        raise BadMessage(f"invalid name: names that begin with {RESERVED!r} are reserved for the service")
    if not 0 < len(key.encode()) <= 160:
        raise BadMessage(f"invalid name of {len(key.encode())} bytes: use 1 to 160 bytes")
    return key
