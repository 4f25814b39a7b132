"""What an agent sees of the rendezvous: one ordered conversation, wherever the service runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rendezvous.events import FromAgent, ToAgent


class Session(Protocol):
    def send(self, message: FromAgent) -> None:
        """Never blocks; messages arrive in the order they were sent."""

    async def receive(self) -> ToAgent: ...

    async def close(self) -> None: ...
