"""The service inside another process, an agent's: the deployed service's own code, over a store that dies with it."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rendezvous.grpc_io import choose_engine, hush

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_PRIVATE_TOKEN_S = 366 * 86_400.0  # it goes with the process that made it


@dataclass(frozen=True, slots=True)
class PrivateService:
    port: int
    token: str  # of an agent of the one job
    close: Callable[[], Awaitable[None]]


async def serve(address: str, key_file: str = "") -> Callable[[], Awaitable[None]]:
    """Serves at HOST:PORT until the result is called, unless somebody does there already."""
    _before_grpc()
    from rendezvous.server import CannotListen, Server, ServerOptions, raise_file_limit
    from rendezvous.store.open import open_store

    raise_file_limit()
    server = Server(await open_store("memory"), ServerOptions(listen=(address,), key_file=key_file))
    try:
        await server.start()
    except CannotListen:
        return _nothing  # another agent of this host was faster
    return server.close


async def serve_privately(job_id: str) -> PrivateService:
    """On loopback, on a port of the kernel's choice, for whoever has the token that is made here."""
    _before_grpc()
    from rendezvous.server import Server, ServerOptions, raise_file_limit
    from rendezvous.store.open import open_store
    from rendezvous.tokens import Grant, Role, add_key, new_grant_id, read_keys, sign

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
    hush()
