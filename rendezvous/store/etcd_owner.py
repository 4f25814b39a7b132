"""Which replica owns a job, if several replicas use one etcd.

Every replica holds one lease (`etcd_lease`). A replica owns a job if it created the owner key of the job under its
lease: etcd deletes the key with the lease. The revision at which the key was created is the fencing token that etcd
checks on every write of the job. So two replicas may both believe that they own a job, but only one of them can write.

If a replica could not renew its lease in time, its ownership is uncertain. It sends no messages about its jobs until
etcd has renewed the lease. The same is true after a suspension (SIGSTOP, a paused virtual machine).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from rendezvous.pb import etcd_pb2 as pb
from rendezvous.store.etcd_client import NotFound
from rendezvous.store.etcd_follow import Changes, Follower, Snapshot
from rendezvous.store.etcd_lease import LeaseKeeper
from rendezvous.store.etcd_requests import created_at, deleting, name_in, one, putting, reading, when
from rendezvous.store.etcd_wire import RANGE, TXN
from rendezvous.store.protocol import Owner, OwnershipLost, StoreError
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable

    from rendezvous.store.etcd_client import EtcdClient
    from rendezvous.store.etcd_lease import HeldLease
    from rendezvous.store.etcd_requests import Keys

_log = logging.getLogger(__name__)
_AFTER_REFUSAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Claim:
    job_id: str
    lease_id: int
    fence: int


class EtcdOwnership:
    def __init__(self, client: EtcdClient, keys: Keys, address: str) -> None:
        self._client, self._keys, self._address = client, keys, address
        self._lease: HeldLease | None = None
        self._leased = asyncio.Event()
        self._news = asyncio.Event()  # of the lease, or of a claim
        self._claims: dict[str, Claim] = {}
        self._others: dict[str, Owner] = {}  # as far as known
        self._lost: Callable[[str], None] = _ignore
        self._freed: Callable[[str], None] = _ignore
        self._following = asyncio.create_task(self._follow_owners(), name="etcd owners")
        self._following.add_done_callback(self._ended)
        self._keeper = LeaseKeeper(client.access, self)

    def listen(self, lost: Callable[[str], None], freed: Callable[[str], None]) -> None:
        self._lost, self._freed = lost, freed

    def reachable_at(self, address: str) -> None:
        self._address = address

    async def close(self) -> None:
        self._following.cancel()
        await asyncio.wait([self._following])
        self._lease = None
        await self._keeper.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """The task ends early only because of a bug. Without it this replica does not notice who owns a job."""
        if not task.cancelled() and task.exception() is not None:
            _log.critical(
                "internal error: the task '%s' has failed; restart this replica",
                task.get_name(),
                exc_info=task.exception(),
            )
            self._give_up(self._lease, "internal error of this replica")

    # --- claims

    async def claim(self, job_id: str) -> Owner:
        while True:
            if job_id in self._claims:
                return self._mine(self._claims[job_id])
            await self._leased.wait()
            lease = self._lease
            if lease is None:
                continue
            try:
                owner = await self._put_or_read(job_id, lease)
            except NotFound:
                self._give_up(lease, "it has expired or was revoked")
                continue
            if owner is not None:
                return owner

    async def _put_or_read(self, job_id: str, lease: HeldLease) -> Owner | None:
        """Create or read the owner key. None if the lease ended before the answer; the caller tries again."""
        key = self._keys.owner(job_id)
        put = putting(key, self._address.encode(), lease.id)
        answer = await self._client.call(TXN, when([created_at(key, 0)], [put], [reading(one(key))]))
        fence = answer.header.revision
        if not answer.succeeded:
            (found,) = answer.responses[0].response_range.kvs
            if found.lease != lease.id:
                return Owner(self._other_owner(found.value), is_me=False, fence=found.create_revision)
            fence = found.create_revision  # by an attempt whose answer was lost
        if self._lease is not lease:
            return None
        claim = self._claims[job_id] = Claim(job_id, lease.id, fence)
        return self._mine(claim)

    def _other_owner(self, address: bytes) -> str:
        """The address of another owner. Empty if the key is from an earlier lease of this replica."""
        return "" if address.decode() == self._address else address.decode()

    def _mine(self, claim: Claim) -> Owner:
        return Owner(self._address, is_me=True, fence=claim.fence)

    async def owner_of(self, job_id: str) -> Owner | None:
        if job_id in self._claims:
            return self._mine(self._claims[job_id])
        if job_id in self._others:
            return self._others[job_id]
        found = (await self._client.call(RANGE, one(self._keys.owner(job_id)))).kvs
        return Owner(found[0].value.decode(), is_me=False, fence=found[0].create_revision) if found else None

    def holds(self, job_id: str) -> bool:
        return job_id in self._claims and self._lease is not None and self._lease.is_certain()

    def claim_of(self, job_id: str) -> Claim | None:
        return self._claims.get(job_id)

    def is_held(self, claim: Claim) -> bool:
        """Whether the claim is still held. It may be uncertain; then etcd decides."""
        return self._claims.get(claim.job_id) is claim

    async def wait_until_certain(self, claim: Claim) -> None:
        """Wait until the claim is certain. Raises `OwnershipLost` if it is lost."""
        while self.is_held(claim):
            if self.holds(claim.job_id):
                return
            await self._news.wait()
        raise OwnershipLost(f"this replica no longer owns job {claim.job_id!r}")

    def _notify(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _remove_claim(self, job_id: str) -> Claim | None:
        claim = self._claims.pop(job_id, None)
        self._notify()
        return claim

    async def release(self, job_id: str) -> None:
        claim = self._remove_claim(job_id)
        if claim is not None:
            key = self._keys.owner(job_id)
            await self._client.call(TXN, when([created_at(key, claim.fence)], [deleting(key)]))

    def drop(self, job_id: str) -> None:
        """Drop the claim after its owner key was deleted together with the job."""
        self._remove_claim(job_id)

    # --- the lease

    def leased(self, held: HeldLease) -> None:
        self._lease = held
        self._leased.set()

    def renewed(self) -> None:
        self._notify()

    def lease_ended(self, held: HeldLease, why: str) -> None:
        self._give_up(held, why)

    def _give_up(self, lease: HeldLease | None, why: str) -> None:
        if lease is None or self._lease is not lease:
            return
        self._lease = None
        self._leased.clear()
        self._keeper.give_up(lease)
        claims, self._claims = self._claims, {}
        self._notify()
        _log.warning(
            "lost the etcd lease: %s. Other replicas take over its %d jobs",
            why,
            len(claims),
        )
        for job_id in claims:
            self._lost(job_id)

    # --- the others

    async def _follow_owners(self) -> None:
        follower = Follower(self._client, self._keys.all_owners, self._on_event)
        while True:
            try:
                await follower.run()
            except StoreError as error:
                _log.warning("cannot watch which replicas own jobs, trying again: %s", error)
                await asyncio.sleep(_AFTER_REFUSAL_S)

    def _on_event(self, news: Snapshot | Changes) -> None:
        if isinstance(news, Snapshot):
            self._replace_all(news)
            return
        for event in news.events:
            job_id = name_in(event.kv.key, self._keys.all_owners)
            if event.type == pb.Event.PUT:
                self._owned(job_id, event.kv)
            else:
                self._unowned(job_id, event.kv.mod_revision)

    def _replace_all(self, snapshot: Snapshot) -> None:
        entries = {name_in(kv.key, self._keys.all_owners): kv for kv in snapshot.entries}
        for job_id in sorted({*self._others, *self._claims} - entries.keys()):
            self._unowned(job_id, snapshot.revision)
        for job_id, kv in entries.items():
            self._owned(job_id, kv)

    def _owned(self, job_id: str, kv: pb.KeyValue) -> None:
        claim = self._claims.get(job_id)
        if claim is not None and claim.fence == kv.create_revision:
            return
        self._drop(job_id, kv.create_revision)
        self._others[job_id] = Owner(kv.value.decode(), is_me=False, fence=kv.create_revision)

    def _unowned(self, job_id: str, revision: int) -> None:
        if self._others.pop(job_id, None) is not None:
            self._freed(job_id)
        self._drop(job_id, revision)

    def _drop(self, job_id: str, revision: int) -> None:
        """Drop the claim: our owner key was removed, although our lease is valid."""
        claim = self._claims.get(job_id)
        if claim is not None and claim.fence < revision:
            self._remove_claim(job_id)
            self._lost(job_id)


def _ignore(job_id: str) -> None:
    pass
