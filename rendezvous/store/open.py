"""Open a store from its URL: memory, file:PATH, or SCHEME://... of a wing, such as etcd."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

import _ddp_launch_entry as doors
from rendezvous.store.protocol import StoreError
from rendezvous.values.error_codes import Code

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from rendezvous.store.protocol import Store


class OpenStore(Protocol):
    """The door `ddp_launch.store`, by scheme. `rest` is what follows SCHEME://; errors are `StoreError` or `BadUrl`."""

    def __call__(self, rest: str, address: str, environ: Mapping[str, str], /) -> Awaitable[Store]: ...


class BadUrl(StoreError):
    """The URL does not name a store that can be opened: it is wrong, whatever the state of the store is."""

    code = Code.STORE_URL_INVALID


class StoreMissing(BadUrl):
    code = Code.PACKAGE_MISSING


async def open_store(url: str, address: str = "", environ: Mapping[str, str] = os.environ) -> Store:
    """Open the store. `address` is where agents reach this replica."""
    scheme, colon, rest = url.partition(":")
    if url == "memory":
        from rendezvous.store.memory import MemoryStore

        return MemoryStore(address)
    if scheme == "file" and rest:
        from rendezvous.store.file import open_file_store

        return await open_file_store(rest.removeprefix("//"), address)
    if rest.startswith("//") and (open_it := _of_a_wing(scheme)):
        return await open_it(rest[2:], address, environ)
    others = "".join(f" or {name}://..." for name in doors.names(doors.STORE))
    raise BadUrl(f"unknown store {scheme}{colon}: use memory, file:PATH{others}")


def _of_a_wing(scheme: str) -> OpenStore | None:
    try:
        found: OpenStore | None = doors.find(doors.STORE, scheme)
    except doors.WingMissing as error:
        raise StoreMissing(str(error)) from None
    return found
