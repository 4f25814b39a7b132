"""What the service asks of a store, whichever it is: in memory, in a file, in etcd.

Three kinds of bad news, and only these, reach a caller. `Conflict`: another writer
wrote. `Deposed`: the job is another replica's, or may be by now. `StoreError`: waiting would never help. That
the store cannot be reached is none of them: the call takes longer, tries again until it gets through, and is
cancelled by whoever has had enough. Nothing secret is ever written to a store.

Scripts may keep a few values per job. They are bounded, so that no script can fill the store up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from rendezvous.values.state import JobState

KEY_BYTES = 256
VALUE_BYTES = 64 * 1024
KEYS_PER_JOB = 1024


class Conflict(Exception):
    """The store holds another version than the one the writer had read."""


class JobStore(Protocol):
    """Where one job's state is kept. An unreachable store makes its callers wait; it does not fail them."""

    async def load(self) -> tuple[JobState, int]:
        """The state and its version; a job nobody wrote yet is `JobState()` at version 0."""

    async def save(self, state: JobState, expected_version: int) -> int:
        """The new version; `Conflict` if the stored one is not `expected_version`."""


class StoreError(Exception):
    """The store cannot be used like this: another format, a wrong password, somebody else's lock."""


class Deposed(Exception):
    """This replica does not own the job, or not any more: say nothing about it, let its agents go elsewhere."""


class LimitReached(ValueError):
    """A key, a value or their number is out of bounds."""


@dataclass(frozen=True, slots=True)
class Value:
    """`version` grows with every change, and never repeats, a deletion in between included."""

    data: bytes
    version: int


class Values(Protocol):
    """What one job's scripts keep."""

    async def get(self, key: str) -> Value | None: ...

    async def put(self, key: str, data: bytes) -> int:
        """The new version; raises `LimitReached`."""

    async def compare_and_put(self, key: str, data: bytes, expected_version: int) -> int:
        """The new version; `Conflict` if the key is at another one (0: absent)."""

    async def delete(self, key: str) -> bool: ...

    async def wait(self, key: str, after_version: int = 0) -> Value:
        """The value as soon as it is newer than `after_version`; the caller bounds the wait."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Who decides about a job. `fence` grows with each new owner."""

    address: str
    is_me: bool
    fence: int


class Ownership(Protocol):
    """Which of several replicas decides about a job. A store for one process owns every job.

    Lost is lost: each claim ends once, by `release`, by `forget` or by a call of `lost`, and never comes back
    to life by itself; the job has to be claimed anew, since anybody may have owned it meanwhile.
    """

    def listen(self, lost: Callable[[str], None], freed: Callable[[str], None]) -> None:
        """`lost(job_id)`: this replica may not speak for the job from now on; `freed`: nobody owns it."""

    def reachable_at(self, address: str) -> None:
        """Where agents find this replica: known once it listens, and before it claims anything."""

    async def claim(self, job_id: str) -> Owner:
        """Become the owner if nobody is; who it is now."""

    async def owner_of(self, job_id: str) -> Owner | None: ...

    def holds(self, job_id: str) -> bool:
        """Is this replica sure, at this instant, that it owns the job? To be asked before an agent is told anything.

        It may say no for a while without `lost` being called: the job is kept, but nothing may be said of it until
        the answer is yes again, or the job lost after all. Nobody else owned it in between.
        """

    async def release(self, job_id: str) -> None:
        """Let another replica have it at once (a graceful goodbye)."""


class Store(Protocol):
    """All jobs."""

    @property
    def ownership(self) -> Ownership: ...

    def job(self, job_id: str) -> JobStore:
        """For its owner, and for good bound to the claim in force now: once that is lost, `save` is `Deposed`.

        When a `save` returns, the replica is certain of the job (`holds`).
        """

    def values(self, job_id: str) -> Values: ...

    async def jobs(self) -> list[str]:
        """Every job that was saved and not forgotten, sorted."""

    async def forget(self, job_id: str) -> None:
        """The job's state and values; no error if there are none; `Deposed` if another replica owns it."""

    async def close(self) -> None: ...
