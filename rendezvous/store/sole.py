"""Ownership without other replicas: this process owns every job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rendezvous.store.protocol import Owner

if TYPE_CHECKING:
    from collections.abc import Callable


class SoleOwnership:
    def __init__(self, address: str = "") -> None:
        self._me = Owner(address, is_me=True, fence=1)

    def listen(self, lost: Callable[[str], None], freed: Callable[[str], None]) -> None:
        """No other replica can take over or release a job, so the callbacks are not used."""

    def reachable_at(self, address: str) -> None:
        self._me = Owner(address, is_me=True, fence=1)

    async def claim(self, job_id: str) -> Owner:
        return self._me

    async def owner_of(self, job_id: str) -> Owner | None:
        return self._me

    def holds(self, job_id: str) -> bool:
        return True

    async def release(self, job_id: str) -> None:
        """Does nothing: there is no other replica."""
