"""The store in memory, and the store that a URL names."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Mapping
from typing import Protocol

import _ddp_launch_entry as doors
from rendezvous.store.protocol import (
    Conflict,
    JobStore,
    Notices,
    Ownership,
    SoleOwnership,
    Store,
    StoreError,
    Value,
    Values,
    check_count,
    check_key,
    check_value,
)
from rendezvous.values.error_codes import Code
from rendezvous.values.job_state import JobState

# --- in memory -------------------------------------------------------------------------------------
#
# The store in memory, lost with the process: for one machine, tests, and services that need not survive a restart.


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


# --- by URL ----------------------------------------------------------------------------------------
#
# Open a store from its URL: memory, file:PATH, or SCHEME://... of a wing, such as etcd.


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
        pass

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
