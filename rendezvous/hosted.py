"""The service inside another process, an agent's: the deployed service's own code, over a store that dies with it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def serve(address: str, key_file: str = "") -> Callable[[], Awaitable[None]]:
    """Serves at HOST:PORT until the result is called, unless somebody does there already."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong we say ourselves, in fewer words
    from rendezvous.server import CannotListen, Server, ServerOptions, raise_file_limit
    from rendezvous.store.open import open_store

    raise_file_limit()
    server = Server(await open_store("memory"), ServerOptions(listen=(address,), key_file=key_file))
    try:
        await server.start()
    except CannotListen:
        return _nothing  # another agent of this host was faster
    return server.close


async def _nothing() -> None:
    pass
