"""The rendezvous service inside an agent: the deployed service's own code, over a store that dies with the agent."""

from __future__ import annotations

import ipaddress
import os
from typing import TYPE_CHECKING

from launcher.meet import CannotMeet
from rendezvous.client import ENV

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from launcher.meeting import Endpoint


async def serve(endpoint: Endpoint, by_scheduler: bool) -> Callable[[], Awaitable[None]]:
    """Serves unless somebody does there already; the result ends it, once everyone has heard how the job ended."""
    key_file = os.environ.get(f"{ENV}TOKEN_KEY_FILE", "")
    _refuse_strangers(endpoint, key_file, by_scheduler)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong we say ourselves, in fewer words
    from rendezvous.server import CannotListen, Server, ServerOptions, raise_file_limit
    from rendezvous.store.open import open_store

    raise_file_limit()
    server = Server(await open_store("memory"), ServerOptions(listen=(str(endpoint),), key_file=key_file))
    try:
        await server.start()
    except CannotListen:
        return _nothing  # the port is taken: by another agent of this host, or the connection will tell
    return server.close


async def _nothing() -> None:
    pass


def _refuse_strangers(endpoint: Endpoint, key_file: str, by_scheduler: bool) -> None:
    """Whoever reaches an open port can join the job: beyond loopback somebody must have said that this is fine."""
    if key_file or by_scheduler or os.environ.get(f"{ENV}INSECURE", "") not in ("", "0", "false", "no"):
        return
    if ipaddress.ip_address(endpoint.host.partition("%")[0]).is_loopback:
        return
    raise CannotMeet(
        f"--rendezvous: serving on {endpoint} would let anyone who reaches it join the job; set {ENV}INSECURE=1 on "
        f"every node where the network is trusted, or {ENV}TOKEN_KEY_FILE here and {ENV}TOKEN on every node"
    )
