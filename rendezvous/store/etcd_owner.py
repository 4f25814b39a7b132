"""Which replica owns a job, if several replicas use one etcd.

Every replica holds one lease. A replica owns a job if it created the owner key of the job under its lease: etcd deletes
the key with the lease. The revision at which the key was created is the fencing token that etcd checks on every write
of the job. So two replicas may both believe that they own a job, but only one of them can write.

If a replica could not renew its lease in time, its ownership is uncertain. It sends no messages about its jobs until
etcd has renewed the lease. The same is true after a suspension (SIGSTOP, a paused virtual machine). During a leader
election, etcd does not renew or end leases. So as long as a majority of the members is reachable, the replica waits. If
it cannot reach a majority, it stops using its jobs before its lease can expire. As soon as it can reach etcd again, it
revokes that lease. Otherwise the other replicas would wait until the lease expires, and a new leader extends leases by
their full duration.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from rendezvous.pb import etcd_pb2 as pb
from rendezvous.store.etcd_client import NotFound, Unreachable
from rendezvous.store.etcd_follow import Changes, Follower, Snapshot
from rendezvous.store.etcd_requests import created_at, deleting, name_in, one, putting, reading, when
from rendezvous.store.etcd_wire import GRANT, KEEP_ALIVE, RANGE, REVOKE, TXN
from rendezvous.store.lease import Lease
from rendezvous.store.protocol import Owner, OwnershipLost, StoreError
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable

    from rendezvous.store.etcd_client import EtcdClient
    from rendezvous.store.etcd_requests import Keys

_log = logging.getLogger(__name__)
_TTL_S = 2  # the least that etcd grants with its default election timeout
_RENEWAL_ATTEMPT_S = 0.4
_REVOKE_WITHIN_S = 1.0
_AFTER_REFUSAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Claim:
    job_id: str
    lease_id: int
    fence: int


def clock() -> float:
    """A clock that also advances while the machine is suspended, unlike `time.monotonic` on Linux."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class EtcdOwnership:
    def __init__(self, client: EtcdClient, keys: Keys, address: str) -> None:
        self._client, self._keys, self._address = client, keys, address
        self._lease: Lease | None = None
        self._leased = asyncio.Event()
        self._given_up = asyncio.Event()
        self._news = asyncio.Event()  # of the lease, or of a claim
        self._claims: dict[str, Claim] = {}
        self._others: dict[str, Owner] = {}  # as far as known
        self._lost: Callable[[str], None] = _ignore
        self._freed: Callable[[str], None] = _ignore
        self._tasks = [
            asyncio.create_task(self._keep_lease(), name="etcd lease"),
            asyncio.create_task(self._follow_owners(), name="etcd owners"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    def listen(self, lost: Callable[[str], None], freed: Callable[[str], None]) -> None:
        self._lost, self._freed = lost, freed

    def reachable_at(self, address: str) -> None:
        self._address = address

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        lease, self._lease = self._lease, None
        if lease is not None:
            await self._revoke(lease, _REVOKE_WITHIN_S)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task ends early only because of a bug. Without the task this replica cannot own jobs."""
        if not task.cancelled() and task.exception() is not None:
            _log.critical(
                "internal error: the task '%s' has failed; restart this replica",
                task.get_name(),
                exc_info=task.exception(),
            )
            self._give_up("internal error of this replica")

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
                self._give_up("it has expired or was revoked")
                continue
            if owner is not None:
                return owner

    async def _put_or_read(self, job_id: str, lease: Lease) -> Owner | None:
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
        if self._lease is None or self._lease.id != lease.id:
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
        return job_id in self._claims and self._lease is not None and self._lease.is_certain(clock())

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

    async def _keep_lease(self) -> None:
        while True:
            try:
                lease = await self._grant()
                await self._renew(lease)
                await self._revoke(lease)
            except StoreError as error:
                self._give_up(str(error))
                await asyncio.sleep(_AFTER_REFUSAL_S)

    async def _grant(self) -> Lease:
        while True:
            sent_at = clock()
            answer = await self._client.call(GRANT, pb.LeaseGrantRequest(TTL=_TTL_S))
            lease = Lease(answer.ID, float(answer.TTL), sent_at)
            if lease.is_certain(clock()):
                break
            await self._revoke(lease)
        self._given_up.clear()
        self._lease = lease
        self._leased.set()
        return lease

    async def _renew(self, lease: Lease) -> None:
        """Renew the lease until it is over."""
        pause_s = lease.renewal_pause_s
        while self._lease is not None:
            await self._unless_given_up(pause_s)
            sent_at = clock()
            ttl_s = await self._ttl_of(lease)
            if ttl_s is not None:
                renewed = lease.renewed(sent_at, ttl_s)
                if renewed is None:
                    self._give_up("it expired")
                    return
                lease = renewed
                self._proven(lease)
            elif not lease.is_certain(clock()) and not await self._client.most_members_answer():
                self._give_up("no majority of etcd answered in time")
                return
            pause_s = 0.0 if ttl_s is None else lease.renewal_pause_s

    async def _ttl_of(self, lease: Lease) -> float | None:
        """Renew the lease once; None without an answer. The timeout is short: the lease counts from the request on."""
        give_up_at = time.monotonic() + _RENEWAL_ATTEMPT_S
        request = pb.LeaseKeepAliveRequest(ID=lease.id)
        try:
            answer = await self._client.call(
                KEEP_ALIVE, request, attempt_s=_RENEWAL_ATTEMPT_S, give_up_at=give_up_at
            )
        except Unreachable:
            return None
        return float(answer.TTL)

    def _proven(self, lease: Lease) -> None:
        if self._lease is not None:
            self._lease = lease
            self._notify()

    async def _unless_given_up(self, pause_s: float) -> None:
        try:
            async with asyncio.timeout(pause_s):
                await self._given_up.wait()
        except TimeoutError:
            pass

    def _give_up(self, why: str) -> None:
        if self._lease is None:
            return
        self._lease = None
        self._leased.clear()
        self._given_up.set()
        claims, self._claims = self._claims, {}
        self._notify()
        _log.warning(
            "lost the etcd lease: %s. Other replicas take over its %d jobs",
            why,
            len(claims),
        )
        for job_id in claims:
            self._lost(job_id)

    async def _revoke(self, lease: Lease, within_s: float | None = None) -> None:
        give_up_at = None if within_s is None else time.monotonic() + within_s
        try:
            await self._client.call(REVOKE, pb.LeaseRevokeRequest(ID=lease.id), give_up_at=give_up_at)
        except (NotFound, Unreachable):
            pass  # already gone, or it will expire

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
