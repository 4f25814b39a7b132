"""The service inside the process of an agent: the code of the deployed service, with a store in memory."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rendezvous.client.credential_files import ENV, OptionsUnusable
from rendezvous.grpc_io import choose_engine, silence_grpc

if TYPE_CHECKING:
    from rendezvous.access.secret import Secret
    from rendezvous.replay.journal import Journals
    from rendezvous.service.owner import OpenJob

_PRIVATE_TOKEN_S = 366 * 86_400.0  # it is only valid while this process runs


@dataclass(frozen=True, slots=True)
class PrivateService:
    port: int
    token: str  # for the agents of this job
    close: Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Serving:
    close: Callable[[], Awaitable[None]]
    job_of: Callable[[str], OpenJob | None]  # the job, if it is served here


@dataclass(frozen=True, slots=True)
class ServiceCredentials:
    """The credentials that protect a service run by an agent."""

    secret: Secret | None = None
    certificate: str = ""  # paths, as for `ddp-rendezvous serve`
    key: str = ""
    client_ca: str = ""
    token_keys: str = ""

    @property
    def suffices(self) -> bool:
        """Whether it is safe to accept other machines: connections are encrypted, and clients are authenticated."""
        return self.secret is not None or bool(self.certificate and (self.token_keys or self.client_ca))


def protection(environ: Mapping[str, str], secret: Secret | None) -> ServiceCredentials:
    """Read the credentials from the environment. Raises `OptionsUnusable`."""
    found = ServiceCredentials(
        secret,
        *(environ.get(f"{ENV}{name}", "") for name in ("TLS_CERT", "TLS_KEY", "CLIENT_CA", "TOKEN_KEYS")),
    )
    if bool(found.certificate) != bool(found.key):
        raise OptionsUnusable(f"{ENV}TLS_CERT and {ENV}TLS_KEY must be set together: set both or neither")
    if found.certificate and secret is not None:
        raise OptionsUnusable(f"{ENV}SECRET_FILE conflicts with {ENV}TLS_CERT: unset one of the two")
    return found


async def serve(address: str, protected: ServiceCredentials, journals: Journals | None = None) -> Serving:
    """Serve at HOST:PORT until it is closed, unless another agent serves there already.

    Raises `OptionsUnusable`.
    """
    _before_grpc()
    from rendezvous.access.auth import Certificates
    from rendezvous.service.server import CannotListen, Server, ServerOptions, raise_file_limit
    from rendezvous.store.open import open_store

    raise_file_limit()
    certificates = None
    if protected.certificate:
        certificates = Certificates(protected.certificate, protected.key, protected.client_ca)
    options = ServerOptions(
        (address,),
        key_file=protected.token_keys,
        certificates=certificates,
        secret=protected.secret,
        journals=journals,
    )
    try:
        server = Server(await open_store("memory"), options)
    except ValueError as error:
        raise OptionsUnusable(str(error), code=getattr(error, "code", None)) from error
    try:
        await server.start()
    except CannotListen as error:
        if isinstance(error.__cause__, OSError):
            raise OptionsUnusable(str(error)) from error  # a certificate that cannot be read
        return Serving(_nothing, lambda _: None)  # another agent of this host serves there
    return Serving(server.close, server.jobs.if_open)


async def serve_privately(job_id: str) -> PrivateService:
    """Serve on a free port of loopback, only for holders of the returned token."""
    _before_grpc()
    from rendezvous.access.auth import Grant, Role, add_key, new_grant_id, read_keys, sign
    from rendezvous.service.server import Server, ServerOptions, raise_file_limit
    from rendezvous.store.open import open_store

    raise_file_limit()
    folder = tempfile.mkdtemp(prefix="ddp-launch-")
    key_file = os.path.join(folder, "keys")
    add_key(key_file)
    grant = Grant(new_grant_id(), job_id, Role.AGENT, time.time() + _PRIVATE_TOKEN_S)
    token = sign(grant, read_keys(key_file)[-1])
    server = Server(await open_store("memory"), ServerOptions(listen=("127.0.0.1:0",), key_file=key_file))
    await server.start()

    async def close() -> None:
        await server.close()
        shutil.rmtree(folder, ignore_errors=True)

    return PrivateService(server.ports[0], token, close)


async def _nothing() -> None:
    pass


def _before_grpc() -> None:
    choose_engine()
    silence_grpc()
