"""Wait for keys to change. A waiter subscribes before it reads, so it does not miss a change between the two."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rendezvous.store.protocol import Value


class Notices:
    def __init__(self) -> None:
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}

    def announce(self, key: str) -> None:
        for changed in self._waiting.pop(key, ()):
            if not changed.done():
                changed.set_result(None)

    def announce_all(self) -> None:
        for key in list(self._waiting):
            self.announce(key)

    async def wait(self, key: str, after_version: int, read: Callable[[], Awaitable[Value | None]]) -> Value:
        while True:
            changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(key, []).append(changed)
            try:
                value = await read()
                if value is not None and value.version > after_version:
                    return value
                await changed
            finally:
                self._forget(key, changed)

    def _forget(self, key: str, changed: asyncio.Future[None]) -> None:
        rest = [w for w in self._waiting.pop(key, []) if w is not changed]
        if rest:
            self._waiting[key] = rest
