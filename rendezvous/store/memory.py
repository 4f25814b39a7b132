"""The store in memory, lost with the process: for one machine, tests, and services that need not survive a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rendezvous.store.protocol import (
    Conflict,
    Notices,
    SoleOwnership,
    Value,
    check_count,
    check_key,
    check_value,
)
from rendezvous.values.state import JobState

if TYPE_CHECKING:
    from rendezvous.store.protocol import JobStore, Ownership, Values


class MemoryJobStore:
    """The state of one job, with compare-and-swap, in the memory of this process."""

    def __init__(self) -> None:
        self._state, self._version = JobState(), 0

    async def load(self) -> tuple[JobState, int]:
        return self._state, self._version

    async def save(self, state: JobState, expected_version: int) -> int:
        if expected_version != self._version:
            raise Conflict
        self._state, self._version = state, expected_version + 1
        return self._version


class MemoryStore:
    def __init__(self, address: str = "") -> None:
        self.ownership: Ownership = SoleOwnership(address)
        self._jobs: dict[str, MemoryJobStore] = {}
        self._values: dict[str, MemoryValues] = {}
        self._version = 0

    def next_version(self) -> int:
        self._version += 1
        return self._version

    def job(self, job_id: str) -> JobStore:
        return self._jobs.setdefault(job_id, MemoryJobStore())

    def values(self, job_id: str) -> Values:
        return self._values.setdefault(job_id, MemoryValues(self))

    async def jobs(self) -> list[str]:
        return sorted([job_id for job_id, job in self._jobs.items() if (await job.load())[1]])

    async def delete(self, job_id: str) -> None:
        self._jobs.pop(job_id, None)
        self._values.pop(job_id, None)

    async def close(self) -> None:
        self._jobs.clear()
        self._values.clear()


class MemoryValues:
    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._held: dict[str, Value] = {}
        self._notices = Notices()

    async def get(self, key: str) -> Value | None:
        return self._held.get(key)

    async def put(self, key: str, data: bytes) -> int:
        check_key(key)
        check_value(data)
        if key not in self._held:
            check_count(len(self._held))
        value = self._held[key] = Value(data, self._store.next_version())
        self._notices.announce(key)
        return value.version

    async def compare_and_put(self, key: str, data: bytes, expected_version: int) -> int:
        held = self._held.get(key)
        if (held.version if held is not None else 0) != expected_version:
            raise Conflict
        return await self.put(key, data)

    async def delete(self, key: str) -> bool:
        return self._held.pop(key, None) is not None

    async def wait(self, key: str, after_version: int = 0) -> Value:
        return await self._notices.wait(key, after_version, lambda: self.get(key))
