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
from rendezvous.values.job_state import JobState

if TYPE_CHECKING:
    from rendezvous.store.protocol import JobStore, Ownership, Values


class MemoryJobStore:
    """One job of `held`, with compare-and-swap. A job that was never saved takes no memory."""

    def __init__(self, held: dict[str, tuple[JobState, int]] | None = None, job_id: str = "") -> None:
        self._held, self._job_id = {} if held is None else held, job_id

    async def load(self) -> tuple[JobState, int]:
        return self._held.get(self._job_id, (JobState(), 0))

    async def save(self, state: JobState, expected_version: int) -> int:
        if expected_version != (await self.load())[1]:
            raise Conflict
        self._held[self._job_id] = state, expected_version + 1
        return expected_version + 1


class MemoryStore:
    def __init__(self, address: str = "") -> None:
        self.ownership: Ownership = SoleOwnership(address)
        self._jobs: dict[str, tuple[JobState, int]] = {}
        self._values: dict[str, MemoryValues] = {}
        self._version = 0

    def next_version(self) -> int:
        self._version += 1
        return self._version

    def job(self, job_id: str) -> JobStore:
        return MemoryJobStore(self._jobs, job_id)

    def values(self, job_id: str) -> Values:
        return self._values.setdefault(job_id, MemoryValues(self))

    async def jobs(self) -> dict[str, int]:
        return {job_id: self._jobs[job_id][1] for job_id in sorted(self._jobs)}

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
