"""Opens the agent's session: finds the rendezvous, serves it if this host is responsible for it, and connects.

If the given address belongs to this host, this process serves there, with the same code as the deployed service. If
the port is already in use, another agent of this host serves, and this agent connects to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import field, replace
from functools import partial
from typing import assert_never

from launcher.joining import addresses
from launcher.joining.join import (
    Deployed,
    Embedded,
    Endpoint,
    MayServe,
    NoRendezvous,
    find_rendezvous,
    parse_endpoint,
)
from launcher.settings.spec import LaunchSpec
from rendezvous.client.credential_files import ENV, ClientOptions, OptionsUnusable, client_options
from rendezvous.client.session import Session, connect
from rendezvous.embedded import EmbeddedRendezvous
from rendezvous.local import offer
from rendezvous.replay.journal import Journals, journal_of
from rendezvous.service.owner import OpenJob
from rendezvous.values.error_codes import Code, Coded
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.types import AgentId

_LOOPBACK = "127.0.0.1"
_SLOTS = 256  # agents of one job on one host


@dataclass(frozen=True, slots=True)
class ServiceConnection:
    session: Session
    agent: AgentId
    host: str  # this node's name, as its output lines show it
    address: str  # the address at which other nodes reach this node
    leave: Callable[[], Awaitable[None]]
    endpoints: tuple[str, ...] = ()  # of the service; empty if it runs in this process
    options: ClientOptions = field(default_factory=ClientOptions)
    job: EmbeddedRendezvous | None = None  # if it runs in this process, for this machine only
    served: Callable[[], OpenJob | None] = lambda: None  # the job, if no service keeps it after the end


class CannotConnect(Coded):
    """A message for the user, with its exit code."""

    def __init__(self, text: str, exit_code: int = 2, *, code: Code) -> None:
        super().__init__(text, code=code)
        self.exit_code = exit_code


async def open_session(
    spec: LaunchSpec, incarnation: str, journals: Journals | None = None
) -> ServiceConnection:
    """Find the rendezvous and open the session of this node. Raises `CannotConnect`.

    `journals`: for a service in this process.
    """
    host = socket.gethostname()
    if spec.interface and not spec.local_addr:
        spec = replace(spec, local_addr=_address_of(spec.interface))
    elif spec.job.max_nodes == 1 and (spec.master_addr or spec.local_addr):
        await asyncio.to_thread(_check_own, spec)
    fqdn = await _fqdn(spec, host)
    try:
        place = find_rendezvous(
            spec.rendezvous,
            spec.job.max_nodes,
            fqdn,
            os.environ,
            spec.has_ssh_control,
            spec.rendezvous_option,
        )
    except NoRendezvous as error:
        raise CannotConnect(str(error), code=Code.NO_RENDEZVOUS_ADDRESS) from None
    match place:
        case Embedded():
            agent = AgentId(host, incarnation)
            journal = None if journals is None else journal_of(journals, spec.job.job_id)
            rendezvous = EmbeddedRendezvous(spec.job.job_id, journal)
            session = rendezvous.connect(agent)
            withdraw = await offer(rendezvous)

            async def leave() -> None:
                await withdraw()
                await session.close()

            return ServiceConnection(
                *(session, agent, host, spec.local_addr or _LOOPBACK, leave),
                job=rendezvous,
                served=lambda: rendezvous,
            )
        case MayServe(endpoint, why):
            return await _serve_or_connect(spec, host, incarnation, endpoint, why, journals)
        case Deployed(endpoints):
            return await _connect(spec, host, incarnation, endpoints, _options(spec))
        case _:
            assert_never(place)


def _address_of(interface: str) -> str:
    address = addresses.address_of_interface(interface)
    if not address:
        known = addresses.interfaces()
        problem = (
            "the interface has no address; configure one, or use another interface"
            if interface in known
            else f"this machine does not have this interface; use one of {', '.join(known)}"
        )
        raise CannotConnect(f"--interface {interface}: {problem}", code=Code.ADDRESS_UNUSABLE)
    return address


def _check_own(spec: LaunchSpec) -> None:
    """Check that the store of a single node can listen on the given address."""
    given = f"--master-addr {spec.master_addr}" if spec.master_addr else f"--local-addr {spec.local_addr}"
    if obstacle := addresses.obstacle_to_listening(spec.master_addr or spec.local_addr):
        raise CannotConnect(
            f"{given}: {obstacle}. The job runs only on this machine, so the option is not needed: omit it.",
            code=Code.ADDRESS_UNUSABLE,
        )


async def _fqdn(spec: LaunchSpec, host: str) -> str:
    """Use the resolver only if needed: a slow resolver must not delay a job on one machine."""
    matters = spec.job.max_nodes > 1 and not spec.rendezvous
    return await asyncio.to_thread(socket.getfqdn, host) if matters else host


async def _serve_or_connect(
    spec: LaunchSpec, host: str, incarnation: str, endpoint: Endpoint, why: str, journals: Journals | None
) -> ServiceConnection:
    from rendezvous.hosted import protection, serve  # a job on one machine needs none of it

    options = _options(spec)
    own = await asyncio.to_thread(addresses.own_address_of, endpoint.host, endpoint.port)
    if not own or not addresses.is_free(own, endpoint.port):
        return await _connect(spec, host, incarnation, (endpoint,), options, own)
    own, listen = _addresses_to_serve(endpoint, own)
    try:
        protected = protection(os.environ, options.secret)
        if not (protected.suffices or options.insecure or addresses.is_loopback(listen)):
            raise CannotConnect(_secret_needed(endpoint, why), code=Code.SECRET_UNUSABLE)
        serving = await serve(str(Endpoint(listen, endpoint.port)), protected, journals)
    except OptionsUnusable as error:
        raise CannotConnect(str(error), code=error.code) from None
    try:
        connection = await _connect(spec, host, incarnation, (Endpoint(own, endpoint.port),), options, own)
    except BaseException:
        await serving.close()
        raise

    async def leave() -> None:
        await connection.leave()
        await serving.close()

    return replace(connection, leave=leave, served=partial(serving.job_of, spec.job.job_id))


async def open_session_of(connection: ServiceConnection, spec: LaunchSpec) -> ServiceConnection:
    """Open a second session of this node, for another job: `spec` has the ID of that job."""
    endpoints = tuple(parse_endpoint(endpoint) for endpoint in connection.endpoints)
    addressed = replace(spec, local_addr=connection.address)
    return await _connect(
        addressed,
        socket.gethostname(),
        connection.agent.incarnation,
        endpoints,
        connection.options,
        connection.address,
    )


def _addresses_to_serve(endpoint: Endpoint, own: str) -> tuple[str, str]:
    """Return the address to advertise and the address to listen on.

    They differ if the host's own name resolves to loopback, as it does with the /etc/hosts of Debian.
    """
    reachable = ""
    if addresses.is_loopback(own) and not addresses.is_loopback(endpoint.host):
        reachable = addresses.address_for_others()
    return (reachable, "0.0.0.0") if reachable else (own, own)


def _secret_needed(endpoint: Endpoint, why: str) -> str:
    return (
        f"{why}: the job has no secret, so any machine that can connect to {endpoint} could join it. In a trusted "
        "network, add --insecure on every node. Otherwise create a secret with `ddp-rendezvous secret FILE`, and give "
        "--secret-file FILE on every node."
    )


def _environ(spec: LaunchSpec) -> dict[str, str]:
    chosen = {f"{ENV}SECRET_FILE": spec.secret_file, f"{ENV}INSECURE": "1" if spec.insecure else ""}
    return {**os.environ, **{name: value for name, value in chosen.items() if value}}


def _options(spec: LaunchSpec) -> ClientOptions:
    try:
        return client_options(_environ(spec), give_up_s=spec.job.join_timeout_s)
    except OptionsUnusable as error:
        raise CannotConnect(str(error), code=error.code) from None


async def _connect(
    spec: LaunchSpec,
    host: str,
    incarnation: str,
    endpoints: tuple[Endpoint, ...],
    options: ClientOptions,
    own: str = "",
) -> ServiceConnection:
    address = spec.local_addr or own or await asyncio.to_thread(_source_address, endpoints) or _LOOPBACK
    slot = _Slot.of(spec.job.job_id, host)
    agent = AgentId(slot.name, incarnation)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # our own messages report errors
    named = tuple(str(endpoint) for endpoint in endpoints)
    session = connect(named, agent, options)

    async def leave() -> None:
        await session.close()
        slot.close()

    return ServiceConnection(session, agent, slot.name, address, leave, named, options)


def _source_address(endpoints: tuple[Endpoint, ...]) -> str:
    found = (addresses.source_address(endpoint.host, endpoint.port) for endpoint in endpoints)
    return next((address for address in found if address), "")


class _Slot:
    """A node name that no other agent of this job has on this host: "node1", then "node1#1".

    A socket in the abstract namespace reserves the name. The kernel releases it when the process ends. So an agent
    that starts again after a kill gets its old node name, and with it its old node rank.
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
        raise CannotConnect(
            f"{_SLOTS} agents of job {run_id} already run on this host, which is the maximum. Use another --rdzv-id.",
            code=Code.LIMIT_REACHED,
        )

    def close(self) -> None:
        self._sock.close()
