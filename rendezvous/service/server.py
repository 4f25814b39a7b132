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
from dataclasses import field
from functools import cache
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from rendezvous.access.auth import Certificates, Gate, Refusals, secret_credentials, server_credentials
from rendezvous.diagnosing import goodput
from rendezvous.metrics import Metrics
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.service.agent_stream import MESSAGE_BYTES, LimitReached, Limits
from rendezvous.service.agents import Agents, Scratchpad
from rendezvous.service.calls import Calls
from rendezvous.service.jobs import Jobs
from rendezvous.service.operations import Operations
from rendezvous.values.error_codes import Code, Coded
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.wire_names import TIME_METADATA

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rendezvous.access.secret import Secret
    from rendezvous.replay.journal import Journals
    from rendezvous.store.protocol import Store


_log = logging.getLogger("rendezvous")

AGENTS = "rendezvous.v1.Agents"
OPERATIONS = "rendezvous.v1.Operations"
SCRATCHPAD = "rendezvous.v1.Scratchpad"
HEALTH = "grpc.health.v1.Health"

_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", 4096),  # of one connection
    ("grpc.so_reuseport", 0),  # a second service on the same port fails instead of sharing it
    ("grpc.http2.bdp_probe", 0),  # do not ping with each message to tune the windows ...
    ("grpc.http2.lookahead_bytes", MESSAGE_BYTES),  # ... a stream may have this much in flight
    ("grpc.server_handshake_timeout_ms", 40_000),  # longer than the agents of a large job wait for it
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
    secret: Secret | None = None  # of one job; replaces certificates and tokens
    history_s: float = 14 * 86_400.0
    resume_grace_s: float = 1.0
    return_after_s: float = 0.5  # after a shutdown, agents reconnect no sooner
    reflection: bool = False
    limits: Limits = field(default_factory=Limits)
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
        self.gate = gate = Gate(options.key_file)
        self.jobs = Jobs(
            store,
            limits,
            self.metrics,
            history_s=options.history_s,
            resume_grace_s=options.resume_grace_s,
            one_tenant=not options.key_file,
            journals=options.journals,
        )
        self.health = Health((AGENTS, OPERATIONS, SCRATCHPAD))
        self.agents = Agents(self.jobs, gate, limits)
        self.operations = Operations(self.jobs, gate, limits)
        self.calls = Calls(gate, self.metrics, self.refusals, limits)
        self._services: dict[str, Agents | Operations | Scratchpad | Health | Reflection] = {
            AGENTS: self.agents,
            OPERATIONS: self.operations,
            SCRATCHPAD: Scratchpad(self.jobs, store, limits),
            HEALTH: self.health,
        }
        if options.reflection:
            described = Reflection(tuple(self._services))
            self._services |= dict.fromkeys(NAMES, described)
        self._server: grpc.aio.Server | None = None
        self._maintenance: asyncio.Task[None] | None = None
        self._declare_gauges()

    async def start(self) -> None:
        """Listen and serve. Raises `CannotListen`."""
        _collect_less_often()
        server = self._server = grpc.aio.server(
            options=(
                *_OPTIONS,
                *_pending_calls(self._options.limits),
                *_connections(len(self._options.listen)),
            )
        )
        for name, service in self._services.items():
            methods = grpc.method_handlers_generic_handler(name, service.methods(self.calls))
            server.add_generic_rpc_handlers((methods,))
        self.ports = [self._listen(server, address) for address in self._options.listen]
        self._ownership.reachable_at(self._options.advertise or self._first_port())
        await self.jobs.resume_all()
        await server.start()
        self._maintenance = asyncio.get_running_loop().create_task(self.jobs.maintain(), name="maintain jobs")
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
        if self._maintenance is not None:
            self._maintenance.cancel()
            await asyncio.wait([self._maintenance])
        await self.jobs.close(self._options.return_after_s)
        if self._server is not None:
            await self._server.stop(_STOP_S)
        if self._options.journals is not None:
            await asyncio.to_thread(self._options.journals.close)

    def _declare_gauges(self) -> None:
        metrics = self.metrics
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


def _pending_calls(limits: Limits) -> tuple[tuple[str, int], ...]:
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
            _bind_path(address.removeprefix("unix:").removeprefix("//"))
        else:
            _bind_port(address)
    except OSError as error:
        return in_words(error)
    return ""


def _bind_path(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.bind(path)
        os.unlink(path)


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


def _connections(ports: int) -> tuple[tuple[str, int]]:
    """At most this part of the descriptors for the connections of each port: others are closed when they are accepted.

    A quarter is left for the store, the journals, the health port and the page (`rendezvous.service.listener`).
    """
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (("grpc.max_allowed_incoming_connections", max(16, descriptors * 3 // 4 // ports)),)


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


class Health:
    """Health answers. They need no token, since probes send none. They contain only the status of the service."""

    def __init__(self, services: tuple[str, ...]) -> None:
        self._services = ("", *services)
        self._serving = False
        self._changed = asyncio.Event()
        self._watches = 0

    @property
    def serving(self) -> bool:
        return self._serving

    def set(self, serving: bool) -> None:
        self._serving = serving
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def methods(self, calls: Calls) -> dict[str, Any]:
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
        status = self.answer(_service(data))
        if status == _UNKNOWN_SERVICE:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service name")
        await context.send_initial_metadata(((TIME_METADATA, f"{time.time():.6f}"),))
        return status

    async def _watch(self, data: bytes, context: Any) -> None:
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
