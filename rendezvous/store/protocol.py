"""The interface of a store: in memory, in a file, or in etcd.

A call raises only three kinds of errors. `Conflict`: another process wrote. `OwnershipLost`: another replica owns the
job, or may own it by now. `StoreError`: a retry cannot help. An unreachable store is not an error: the call retries
until it succeeds, and the caller cancels it if it takes too long. Secrets are never written to a store.

Scripts may keep a few values per job. They are limited, so that a script cannot fill the store.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import field
from typing import Protocol

from rendezvous.rounds.snapshot import (
    SnapshotUnreadable,
    apply_changes,
    are_changes,
    decode_state,
    encode_changes,
    encode_state,
)
from rendezvous.values.error_codes import Code, Coded
from rendezvous.values.job_state import JobState
from rendezvous.values.late_dataclass import dataclass

KEY_BYTES = 256
VALUE_BYTES = 64 * 1024
KEYS_PER_JOB = 1024


class Conflict(Exception):
    """The stored version is not the one that the writer had read."""


class JobStore(Protocol):
    """The state of one job. If the store is unreachable, calls wait and do not fail."""

    async def load(self) -> tuple[JobState, int]:
        """The state and its version; `JobState()` at version 0 if it was never written."""

    async def save(self, state: JobState, expected_version: int) -> int:
        """The new version; `Conflict` if the stored one is not `expected_version`."""


class StoreError(Coded):
    """The store cannot be used, for example because of its format, a wrong password, or the lock of another process."""

    code = Code.STORE_UNUSABLE


class OwnershipLost(Exception):
    """This replica does not own the job. It must not send messages about the job, and must redirect its agents."""


class ValuesFull(ValueError):
    """A key or a value is too large, or the job has too many values."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value. `version` grows with every change and never repeats, not even after a deletion."""

    data: bytes
    version: int


class Values(Protocol):
    """The values of the scripts of one job."""

    async def get(self, key: str) -> Value | None: ...

    async def put(self, key: str, data: bytes) -> int:
        """The new version; raises `ValuesFull`."""

    async def compare_and_put(self, key: str, data: bytes, expected_version: int) -> int:
        """The new version. `Conflict` if the key has another version (0: the key does not exist)."""

    async def delete(self, key: str) -> bool: ...

    async def wait(self, key: str, after_version: int = 0) -> Value:
        """Wait for a version above `after_version`, and return the value. No timeout: the caller sets it."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The replica that owns a job. `fence` grows with each new owner."""

    address: str
    is_me: bool
    fence: int


class Ownership(Protocol):
    """Which of several replicas owns a job. With a store for one process, that process owns every job.

    Each claim ends once, by `release`, by `Store.delete` or by a call of `lost`. A lost claim never becomes valid
    again. Claim the job again, since another replica may have owned it in the meantime.
    """

    def listen(self, lost: Callable[[str], None], freed: Callable[[str], None]) -> None:
        """Register callbacks. `lost(job_id)`: this replica does not own the job any more; `freed`: it has no owner."""

    def reachable_at(self, address: str) -> None:
        """Set the address of this replica. Call it after the replica listens and before it claims a job."""

    async def claim(self, job_id: str) -> Owner:
        """Become the owner if there is none. Returns the owner."""

    async def owner_of(self, job_id: str) -> Owner | None: ...

    def known_owner(self, job_id: str) -> Owner | None:
        """The owner, as far as this replica has been told, without asking the store."""

    def holds(self, job_id: str) -> bool:
        """Whether it is certain now that this replica owns the job. Check it before each message.

        The result can be false temporarily. Then do not send messages until it is true again or `lost` is called. No
        other replica owns the job during that time.
        """

    async def release(self, job_id: str) -> None:
        """Give the job up, so that another replica can own it at once."""


class Store(Protocol):
    """All jobs."""

    @property
    def ownership(self) -> Ownership: ...

    def job(self, job_id: str) -> JobStore:
        """The state of a job for its owner. After the current claim is lost, `save` raises `OwnershipLost`.

        When `save` returns, it is certain that this replica owns the job (`holds`).
        """

    def values(self, job_id: str) -> Values: ...

    async def jobs(self) -> dict[str, int]:
        """All stored jobs, sorted, and the version of each."""

    async def delete(self, job_id: str) -> None:
        """Delete the state and values of a job, if there are any. Raises `OwnershipLost` if another replica owns it."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StoreContents:
    """All that a store keeps, as rows of the tables of `rendezvous.store.file`: for backups."""

    last: int  # the last version number that was used
    jobs: list[tuple[str, int, bytes]] = field(default_factory=list)
    bases: list[tuple[str, bytes]] = field(default_factory=list)
    values: list[tuple[str, str, int, bytes]] = field(default_factory=list)


# --- limits on the values of scripts, checked in one place for every store --------------------------


def check_key(key: str) -> None:
    n = len(key.encode("utf-8", "surrogatepass"))
    if not 0 < n <= KEY_BYTES:
        raise ValuesFull(f"invalid key of {n} bytes: use 1 to {KEY_BYTES} bytes")


def check_value(data: bytes) -> None:
    if len(data) > VALUE_BYTES:
        raise ValuesFull(f"the value has {len(data)} bytes: at most {VALUE_BYTES} are permitted")


def check_count(held: int) -> None:
    """Check before one more is added."""
    if held >= KEYS_PER_JOB:
        raise ValuesFull(f"the job already has {KEYS_PER_JOB} values, which is the limit: delete some first")


# --- notices ----------------------------------------------------------------------------------------
#
# Wait for keys to change. A waiter subscribes before it reads, so it does not miss a change between the two.


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
                rest = [w for w in self._waiting.pop(key, []) if w is not changed]
                if rest:
                    self._waiting[key] = rest


# --- ownership without other replicas: this process owns every job ----------------------------------


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

    def known_owner(self, job_id: str) -> Owner | None:
        return self._me

    def holds(self, job_id: str) -> bool:
        return True

    async def release(self, job_id: str) -> None:
        """Does nothing: there is no other replica."""


# A job's state as the bytes that the stores keep (compressed by `rendezvous.rounds.snapshot`).
#
# The state of a small job is one value. That of a large one is two: the *base*, a whole snapshot, and what has changed
# since then (`rendezvous.rounds.snapshot`). Most writes replace the changes only. A store writes both values in
# one transaction, so that they always belong together.
#
# Writing and reading a state of thousands of nodes takes up to 0.1 s, so it is done in a thread.

MANY_NODES = 256
_MANY_BYTES = 32 * 1024
_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Base:
    state: JobState
    id: bytes


@dataclass(frozen=True, slots=True)
class Packed:
    """`base`: to be stored in the same transaction. Empty: to be deleted; None: the stored one stays, if any."""

    value: bytes
    base: bytes | None
    basis: _Base | None  # of the next write, if this one succeeds


class Packer:
    """Packs the states of one job for one writer, one write after another.

    After `pack`, the base counts as unknown until `stored` is called. So after a write that failed, or whose outcome is
    not known, the next one writes all of the state.
    """

    def __init__(self) -> None:
        self._basis: _Base | None = None
        self._has_base = False  # as far as is known

    async def pack(self, state: JobState) -> Packed:
        basis, self._basis = self._basis, None
        if len(state.members) < MANY_NODES:
            return Packed(encode_state(state), b"" if self._has_base else None, None)
        return await asyncio.to_thread(_packed, state, basis)

    def stored(self, packed: Packed) -> None:
        self._basis = packed.basis
        self._has_base = packed.basis is not None

    async def unpack(self, value: bytes, base: bytes, job_id: str) -> JobState:
        """`base` is empty if there is none. Raises `StoreError`."""
        self._basis, self._has_base = None, bool(base)
        try:
            if len(value) + len(base) < _MANY_BYTES:
                return _unpacked(value, base)
            return await asyncio.to_thread(_unpacked, value, base)
        except SnapshotUnreadable as error:
            raise StoreError(f"cannot read the stored state of job {job_id!r}: {error}") from error


def _packed(state: JobState, basis: _Base | None) -> Packed:
    if basis is not None and (changes := encode_changes(basis.state, basis.id, state)) is not None:
        return Packed(changes, None, basis)
    basis = _Base(state, os.urandom(_ID_BYTES))
    nothing = encode_changes(state, basis.id, state)
    assert nothing is not None
    return Packed(nothing, basis.id + encode_state(state), basis)


def _unpacked(value: bytes, base: bytes) -> JobState:
    if not are_changes(value):
        return decode_state(value)
    if not base:
        raise SnapshotUnreadable(
            "the snapshot that its changes belong to is missing. Restore the store from a backup"
        )
    return apply_changes(value, base[:_ID_BYTES], decode_state(base[_ID_BYTES:]))
