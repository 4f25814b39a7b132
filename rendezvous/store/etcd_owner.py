"""Which replica owns a job, when several serve from one etcd.

Every replica holds one lease. Owning a job is having created its owner key under that lease: the key goes when
the lease does, and the revision at which it was created is the fence that every write of the job is checked
against, inside etcd. So two replicas may both believe that they own a job, but only one of them can write.

Belief is kept honest by the clock: a replica that could not renew its lease in time is in doubt, and says nothing
about its jobs until etcd has renewed it after all. One that was frozen (SIGSTOP, a paused virtual machine) wakes up
in doubt, and hears that its time is over. While etcd elects a leader nobody can be told anything, and no lease ends;
so as long as most members are within reach the doubt is waited out. A replica that does not even reach them is cut
off, and gives its jobs up before another can have them. What was given up is revoked as soon as etcd can be
reached, so that nobody has to wait for its end: a new leader would let it stand for an election and a lease more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rendezvous.pb import etcd_pb2 as pb
from rendezvous.store.etcd_client import NotFound, Unreachable
from rendezvous.store.etcd_follow import Changes, Follower, Picture
from rendezvous.store.etcd_requests import created_at, deleting, name_in, one, putting, reading, when
from rendezvous.store.etcd_wire import GRANT, KEEP_ALIVE, RANGE, REVOKE, TXN
from rendezvous.store.lease import Lease
from rendezvous.store.protocol import Deposed, Owner, StoreError

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
    """Counts on while the machine is suspended, which `time.monotonic` does not."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class EtcdOwnership:
    def __init__(self, client: EtcdClient, keys: Keys, address: str) -> None:
        self._client, self._keys, self._address = client, keys, address
        self._lease: Lease | None = None
        self._leased = asyncio.Event()
        self._given_up = asyncio.Event()
        self._news = asyncio.Event()  # of the lease, or of a claim
        self._claims: dict[str, Claim] = {}
        self._others: dict[str, Owner] = {}  # as far as heard
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
        """Only a fault of ours ends a task before its time; without it nothing can be owned."""
        if not task.cancelled() and task.exception() is not None:
            _log.critical("%s has failed", task.get_name(), exc_info=task.exception())
            self._give_up("this replica cannot keep it any more")

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
                self._give_up("etcd does not know it any more")
                continue
            if owner is not None:
                return owner

    async def _put_or_read(self, job_id: str, lease: Lease) -> Owner | None:
        """None: the lease was over before the answer came; once more."""
        key = self._keys.owner(job_id)
        put = putting(key, self._address.encode(), lease.id)
        answer = await self._client.call(TXN, when([created_at(key, 0)], [put], [reading(one(key))]))
        fence = answer.header.revision
        if not answer.succeeded:
            (found,) = answer.responses[0].response_range.kvs
            if found.lease != lease.id:
                return Owner(self._elsewhere(found.value), is_me=False, fence=found.create_revision)
            fence = found.create_revision  # by an attempt whose answer was lost
        if self._lease is None or self._lease.id != lease.id:
            return None
        claim = self._claims[job_id] = Claim(job_id, lease.id, fence)
        return self._mine(claim)

    def _elsewhere(self, address: bytes) -> str:
        """A key of a lease that we have given up, or of an earlier life of ours, says nothing: nobody is there yet."""
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

    def is_kept(self, claim: Claim) -> bool:
        """Neither lost nor released, though perhaps in doubt: then etcd judges."""
        return self._claims.get(claim.job_id) is claim

    async def certain(self, claim: Claim) -> None:
        """As soon as it is sure that the claim stands; `Deposed` once it is lost."""
        while self.is_kept(claim):
            if self.holds(claim.job_id):
                return
            await self._news.wait()
        raise Deposed(f"job {claim.job_id!r} is not owned by this replica any more")

    def _tell_news(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _let_go(self, job_id: str) -> Claim | None:
        claim = self._claims.pop(job_id, None)
        self._tell_news()
        return claim

    async def release(self, job_id: str) -> None:
        claim = self._let_go(job_id)
        if claim is not None:
            key = self._keys.owner(job_id)
            await self._client.call(TXN, when([created_at(key, claim.fence)], [deleting(key)]))

    def let_go(self, job_id: str) -> None:
        """Its owner key was deleted together with the job."""
        self._let_go(job_id)

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
        """Until it is over."""
        pause_s = lease.renewal_pause_s
        while self._lease is not None:
            await self._unless_given_up(pause_s)
            sent_at = clock()
            ttl_s = await self._ttl_of(lease)
            if ttl_s is not None:
                renewed = lease.renewed(sent_at, ttl_s)
                if renewed is None:
                    self._give_up("it ran out")
                    return
                lease = renewed
                self._proven(lease)
            elif not lease.is_certain(clock()) and not await self._client.most_members_answer():
                self._give_up("it could not be renewed in time")
                return
            pause_s = 0.0 if ttl_s is None else lease.renewal_pause_s

    async def _ttl_of(self, lease: Lease) -> float | None:
        """Renewed by asking; None: no answer, this time. Each question is young, for its age is what it proves."""
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
            self._tell_news()

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
        self._tell_news()
        _log.warning("the lease at etcd is given up: %s; jobs that were owned here: %d", why, len(claims))
        for job_id in claims:
            self._lost(job_id)

    async def _revoke(self, lease: Lease, within_s: float | None = None) -> None:
        give_up_at = None if within_s is None else time.monotonic() + within_s
        try:
            await self._client.call(REVOKE, pb.LeaseRevokeRequest(ID=lease.id), give_up_at=give_up_at)
        except (NotFound, Unreachable):
            pass  # gone already, or soon by itself

    # --- the others

    async def _follow_owners(self) -> None:
        follower = Follower(self._client, self._keys.all_owners, self._heard)
        while True:
            try:
                await follower.run()
            except StoreError as error:
                _log.warning("owners cannot be watched: %s", error)
                await asyncio.sleep(_AFTER_REFUSAL_S)

    def _heard(self, news: Picture | Changes) -> None:
        if isinstance(news, Picture):
            self._see(news)
            return
        for event in news.events:
            job_id = name_in(event.kv.key, self._keys.all_owners)
            if event.type == pb.Event.PUT:
                self._owned(job_id, event.kv)
            else:
                self._unowned(job_id, event.kv.mod_revision)

    def _see(self, picture: Picture) -> None:
        entries = {name_in(kv.key, self._keys.all_owners): kv for kv in picture.entries}
        for job_id in sorted({*self._others, *self._claims} - entries.keys()):
            self._unowned(job_id, picture.revision)
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
        """Somebody has removed our key, though our lease stands."""
        claim = self._claims.get(job_id)
        if claim is not None and claim.fence < revision:
            self._let_go(job_id)
            self._lost(job_id)


def _ignore(job_id: str) -> None:
    pass
