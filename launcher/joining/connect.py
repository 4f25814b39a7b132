"""Opens the agent's session: finds the rendezvous, serves it where that falls to this host, and connects.

A host that finds the given address to be its own serves there, in this process and on the very code of the
deployed service; should the port be taken, another agent of this host was faster, and this one connects to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, assert_never

from launcher.joining import addresses
from launcher.joining.endpoint import (
    Deployed,
    Embedded,
    Endpoint,
    MayServe,
    NoMeetingPoint,
    meeting_point,
    parse_endpoint,
)
from rendezvous.client.options import ENV, ClientOptions, OptionsUnusable, client_options
from rendezvous.client.session import connect
from rendezvous.embedded import EmbeddedRendezvous
from rendezvous.hosted import protection, serve
from rendezvous.values.types import AgentId

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from launcher.settings.spec import LaunchSpec
    from rendezvous.client.session import Session

_LOOPBACK = "127.0.0.1"
_SLOTS = 256  # agents of one job on one host


@dataclass(frozen=True, slots=True)
class Met:
    session: Session
    agent: AgentId
    host: str  # this node's name, as its output lines show it
    address: str  # where the other nodes reach this one
    leave: Callable[[], Awaitable[None]]
    endpoints: tuple[str, ...] = ()  # of the service; none where it is in this process
    options: ClientOptions = field(default_factory=ClientOptions)


class CannotMeet(Exception):
    """A message for the user, with its exit code."""

    def __init__(self, text: str, exit_code: int = 2) -> None:
        super().__init__(text)
        self.exit_code = exit_code


async def meet(spec: LaunchSpec, incarnation: str) -> Met:
    """Raises `CannotMeet`."""
    host = socket.gethostname()
    if spec.interface and not spec.local_addr:
        spec = replace(spec, local_addr=_address_of(spec.interface))
    elif spec.max_nodes == 1 and (spec.master_addr or spec.local_addr):
        await asyncio.to_thread(_check_own, spec)
    fqdn = await _fqdn(spec, host)
    try:
        place = meeting_point(spec.rendezvous, spec.max_nodes, fqdn, os.environ, spec.has_ssh_control)
    except NoMeetingPoint as error:
        raise CannotMeet(str(error)) from None
    match place:
        case Embedded():
            agent = AgentId(host, incarnation)
            session = EmbeddedRendezvous().connect(agent)
            return Met(session, agent, host, spec.local_addr or _LOOPBACK, session.close)
        case MayServe(endpoint, why):
            return await _serve_or_connect(spec, host, incarnation, endpoint, why)
        case Deployed(endpoints):
            return await _connect(spec, host, incarnation, endpoints, _options(spec))
        case _:
            assert_never(place)


def _address_of(interface: str) -> str:
    address = addresses.address_of_interface(interface)
    if not address:
        known = addresses.interfaces()
        problem = (
            "it has no address"
            if interface in known
            else f"this machine does not have it; it has {', '.join(known)}"
        )
        raise CannotMeet(f"--interface {interface}: {problem}")
    return address


def _check_own(spec: LaunchSpec) -> None:
    """Check that the store of a single node can listen on the given address."""
    given = f"--master-addr {spec.master_addr}" if spec.master_addr else f"--local-addr {spec.local_addr}"
    if obstacle := addresses.obstacle_to_listening(spec.master_addr or spec.local_addr):
        raise CannotMeet(f"{given}: {obstacle}, and the job has only this machine. Omit the option.")


async def _fqdn(spec: LaunchSpec, host: str) -> str:
    """Ask the resolver only if needed: a slow one must not delay a job on one machine."""
    matters = spec.max_nodes > 1 and not spec.rendezvous
    return await asyncio.to_thread(socket.getfqdn, host) if matters else host


async def _serve_or_connect(
    spec: LaunchSpec, host: str, incarnation: str, endpoint: Endpoint, why: str
) -> Met:
    options = _options(spec)
    own = await asyncio.to_thread(addresses.own_address_of, endpoint.host, endpoint.port)
    if not own or not addresses.is_free(own, endpoint.port):
        return await _connect(spec, host, incarnation, (endpoint,), options, own)
    own, listen = _for_others_too(endpoint, own)
    try:
        protected = protection(os.environ, options.secret)
        if not (protected.suffices or options.insecure or addresses.is_loopback(listen)):
            raise CannotMeet(_open_to_strangers(endpoint, why))
        stop_serving = await serve(str(Endpoint(listen, endpoint.port)), protected)
    except OptionsUnusable as error:
        raise CannotMeet(str(error)) from None
    try:
        met = await _connect(spec, host, incarnation, (Endpoint(own, endpoint.port),), options, own)
    except BaseException:
        await stop_serving()
        raise

    async def leave() -> None:
        await met.leave()
        await stop_serving()

    return replace(met, leave=leave)


async def beside(met: Met, spec: LaunchSpec) -> Met:
    """A second session of this node, of another job: `spec` has its id."""
    endpoints = tuple(parse_endpoint(endpoint) for endpoint in met.endpoints)
    addressed = replace(spec, local_addr=met.address)
    return await _connect(
        addressed, socket.gethostname(), met.agent.incarnation, endpoints, met.options, met.address
    )


def _for_others_too(endpoint: Endpoint, own: str) -> tuple[str, str]:
    """Our address and the one to listen on. Debian's /etc/hosts gives a host's own name an address of loopback."""
    outward = ""
    if addresses.is_loopback(own) and not addresses.is_loopback(endpoint.host):
        outward = addresses.outward_address()
    return (outward, "0.0.0.0") if outward else (own, own)


def _open_to_strangers(endpoint: Endpoint, why: str) -> str:
    return (
        f"{why}: serving on {endpoint} would let anyone who reaches it join the job; give every node the same "
        "--secret-file FILE (`ddp-rendezvous secret FILE` makes one), or use --insecure if the network is trusted"
    )


def _environ(spec: LaunchSpec) -> dict[str, str]:
    said = {f"{ENV}SECRET_FILE": spec.secret_file, f"{ENV}INSECURE": "1" if spec.insecure else ""}
    return {**os.environ, **{name: value for name, value in said.items() if value}}


def _options(spec: LaunchSpec) -> ClientOptions:
    try:
        return client_options(_environ(spec), give_up_s=spec.join_timeout_s)
    except OptionsUnusable as error:
        raise CannotMeet(str(error)) from None


async def _connect(
    spec: LaunchSpec,
    host: str,
    incarnation: str,
    endpoints: tuple[Endpoint, ...],
    options: ClientOptions,
    own: str = "",
) -> Met:
    address = spec.local_addr or own or await asyncio.to_thread(_source_address, endpoints) or _LOOPBACK
    slot = _Slot.of(spec.run_id, host)
    agent = AgentId(slot.name, incarnation)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # our own messages report errors
    named = tuple(str(endpoint) for endpoint in endpoints)
    session = connect(named, agent, options)

    async def leave() -> None:
        await session.close()
        slot.close()

    return Met(session, agent, slot.name, address, leave, named, options)


def _source_address(endpoints: tuple[Endpoint, ...]) -> str:
    found = (addresses.source_address(endpoint.host, endpoint.port) for endpoint in endpoints)
    return next((address for address in found if address), "")


class _Slot:
    """A node name that no other agent of this job has on this host: "node1", then "node1#1".

    Held by a socket in the abstract namespace, which the kernel gives back however its owner ends; so an agent that
    was killed and is started anew finds its old name, and with it its old place in the job.
    """

    def __init__(self, name: str, sock: socket.socket) -> None:
        self.name = name
        self._sock = sock

    @classmethod
    def of(cls, run_id: str, host: str) -> _Slot:
        for number in range(_SLOTS):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            with contextlib.suppress(OSError):
                sock.bind(f"\0ddp-launch/{os.getuid()}/{run_id}/{host}/{number}"[:107])
                return cls(host if number == 0 else f"{host}#{number}", sock)
            sock.close()
        raise CannotMeet(f"{_SLOTS} agents of job {run_id} already run on this host. Use another --rdzv-id.")

    def close(self) -> None:
        self._sock.close()
