"""Which replica owns a job, if several replicas use one etcd.

Every replica holds one lease (`etcd_lease`). A replica owns a job if it created the owner key of the job under its
lease: etcd deletes the key with the lease. The revision at which the key was created is the fencing token that etcd
checks on every write of the job. So two replicas may both believe that they own a job, but only one of them can write.

If a replica could not renew its lease in time, its ownership is uncertain. It sends no messages about its jobs until
etcd has renewed the lease. The same is true after a suspension (SIGSTOP, a paused virtual machine).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from functools import partial

import grpc
import grpc.aio

from ddp_launch_wings.etcd.client import (
    GRANT,
    KEEP_ALIVE,
    RANGE,
    REVOKE,
    TXN,
    Access,
    EtcdClient,
    Keys,
    Member,
    MemberOfThread,
    Metadata,
    NotFound,
    Unreachable,
    created_at,
    deleting,
    end_of,
    finish,
    name_in,
    one,
    one_error_if_reopened,
    pages_of,
    putting,
    reading,
    when,
)
from rendezvous.pb import etcd_pb2 as pb
from rendezvous.store.protocol import Owner, OwnershipLost, StoreError
from rendezvous.values.late_dataclass import dataclass

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
        if _has_failed(task):
            self.give_up(self._lease, "internal error of this replica")

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
                self.give_up(lease, "it has expired or was revoked")
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
                address = found.value.decode()  # empty: of an earlier lease of this replica
                other = "" if address == self._address else address
                return Owner(other, is_me=False, fence=found.create_revision)
            fence = found.create_revision  # by an attempt whose answer was lost
        if self._lease is not lease:
            return None
        claim = self._claims[job_id] = Claim(job_id, lease.id, fence)
        return self._mine(claim)

    def _mine(self, claim: Claim) -> Owner:
        return Owner(self._address, is_me=True, fence=claim.fence)

    async def owner_of(self, job_id: str) -> Owner | None:
        if (known := self.known_owner(job_id)) is not None:
            return known
        found = (await self._client.call(RANGE, one(self._keys.owner(job_id)))).kvs
        return Owner(found[0].value.decode(), is_me=False, fence=found[0].create_revision) if found else None

    def known_owner(self, job_id: str) -> Owner | None:
        claim = self._claims.get(job_id)
        return self._others.get(job_id) if claim is None else self._mine(claim)

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

    def notify(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def drop(self, job_id: str) -> Claim | None:
        claim = self._claims.pop(job_id, None)
        self.notify()
        return claim

    async def release(self, job_id: str) -> None:
        claim = self.drop(job_id)
        if claim is not None:
            key = self._keys.owner(job_id)
            await self._client.call(TXN, when([created_at(key, claim.fence)], [deleting(key)]))

    # --- the lease

    def leased(self, held: HeldLease) -> None:
        self._lease = held
        self._leased.set()

    def give_up(self, lease: HeldLease | None, why: str) -> None:
        if lease is None or self._lease is not lease:
            return
        self._lease = None
        self._leased.clear()
        self._keeper.give_up(lease)
        claims, self._claims = self._claims, {}
        self.notify()
        _log.warning("lost the etcd lease: %s. Other replicas take over its %d jobs", why, len(claims))
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
            self.drop(job_id)
            self._lost(job_id)


def _ignore(job_id: str) -> None:
    pass


def _has_failed(task: asyncio.Task[None]) -> bool:
    if task.cancelled() or task.exception() is None:
        return False
    words = "internal error: the task '%s' has failed; restart this replica"
    _log.critical(words, task.get_name(), exc_info=task.exception())
    return True


# --- hold a lease at etcd, in a thread of its own ---------------------------------------------------
#
# Theory of operation
# -------------------
# The event loop of a service that accepts thousands of agents may need a second for one turn, and a renewal takes
# several turns. The lease ends after two seconds without a renewal. So a thread renews it, with an event loop and
# connections of its own: it needs the interpreter for a moment, twice a second, and Python's threads pass the
# interpreter on every 5 ms.
#
# A replica whose loop hangs must not keep its jobs. So the loop of the service notes the time four times a second, and
# the thread revokes the lease if the loop has not turned for `HUNG_AFTER_S`. That is five times as long as its turns
# while 10,000 agents connect. A turn may also last because others use the CPUs: then its thread has had some CPU time,
# but not all, and has `STARVED_FOR_S`. In a process that is stopped, the thread does not run either.
#
# The lease protects what it protected before. It is certain only for its duration after the sending of a renewal that
# etcd has confirmed (`lease`), by a clock that also advances while the machine is suspended. What is written is
# checked by etcd: the owner key of the job must be the one that was created under this lease. A loop that awakes late
# therefore finds its lease uncertain or over, and its writes fail.
#
# During a leader election, etcd does not renew or end leases. So as long as a majority of the members is reachable,
# the thread waits. If it cannot reach a majority, it ends its lease for this replica before etcd may end it for all.
# As soon as it can reach etcd again, it revokes that lease. Otherwise the other replicas would wait until the lease
# expires, and a new leader extends leases by their full duration.

HUNG_AFTER_S, STARVED_FOR_S = 5.0, 15.0
_BLOCKED, _SPINNING = 0.05, 0.9  # the shares of CPU time of a thread that waits, or never ends
_TTL_S = 2  # the least that etcd grants with its default election timeout
_TURN_NOTED_EVERY_S = 0.25
_RENEWALS = 4  # at once, one begun after the other ...
_NEXT_RENEWAL_AFTER_S = 0.4  # ... without an answer
_LATE_S = 0.5  # a turn of the loop that takes longer shows that this replica is busy ...
_BUSY_FOR_S = 5.0
_PATIENCE_IF_BUSY = 3.0  # ... and so may be etcd's answers
_REVOKE_WITHIN_S = 1.0


def clock() -> float:
    """A clock that also advances while the machine is suspended, unlike `time.monotonic` on Linux."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def hangs(silent_s: float, cpu_s: float) -> bool:
    """Whether a loop hangs that has not turned for so long, and whose thread had so much CPU time meanwhile."""
    is_starved = _BLOCKED * silent_s < cpu_s < _SPINNING * silent_s
    return silent_s > (STARVED_FOR_S if is_starved else HUNG_AFTER_S)


def _cpu_clock() -> Callable[[], float]:
    """Reads the CPU time of this thread, from any thread. Where that is impossible, the thread counts as starved."""
    if not hasattr(time, "pthread_getcpuclockid"):  # macOS
        return lambda: clock() / 2
    return partial(time.clock_gettime, time.pthread_getcpuclockid(threading.get_ident()))


class HeldLease:
    """A lease, as the thread and the loop of the service see it. Only the thread sets `proven`."""

    def __init__(self, lease: Lease) -> None:
        self.id = lease.id
        self.proven = lease
        self.is_over = False  # never false again

    def is_certain(self) -> bool:
        return not self.is_over and self.proven.is_certain(clock())


class LeaseKeeper:
    """Holds one lease at a time. Create and close it in the loop of the service."""

    def __init__(self, access: Access, holder: EtcdOwnership) -> None:
        self._client, self._holder = EtcdClient(access, MemberOfThread), holder
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._of_thread = asyncio.new_event_loop()
        self._closing, self._given_up = asyncio.Event(), asyncio.Event()  # of the thread's loop
        self._held: HeldLease | None = None
        self._turned_at, self._busy_until = clock(), 0.0
        self._cpu_of_loop, self._cpu_at_turn = _cpu_clock(), 0.0
        self._note_turn()
        threading.Thread(target=self._run, name="etcd lease", daemon=True).start()

    def give_up(self, held: HeldLease) -> None:
        """The thread revokes this lease, and gets another one."""
        held.is_over = True
        self._in_thread(self._given_up.set)

    async def close(self) -> None:
        self._in_thread(self._closing.set)
        await asyncio.shield(self._done)
        self._next_note.cancel()

    def _in_thread(self, action: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self._of_thread.call_soon_threadsafe(action)

    def _note_turn(self) -> None:
        now = clock()
        if now - self._turned_at > _TURN_NOTED_EVERY_S + _LATE_S:
            self._busy_until = now + _BUSY_FOR_S
        self._turned_at, self._cpu_at_turn = now, self._cpu_of_loop()
        self._next_note = self._loop.call_later(_TURN_NOTED_EVERY_S, self._note_turn)

    # --- in the thread

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._of_thread) as runner:
                runner.run(self._until_closed())
        finally:
            self._tell(finish, self._done)

    async def _until_closed(self) -> None:
        keeping = asyncio.create_task(self._keep(), name="etcd lease")
        closing = asyncio.create_task(self._closing.wait())
        await asyncio.wait([keeping, closing], return_when=asyncio.FIRST_COMPLETED)
        for task in (keeping, closing):
            task.cancel()
        await asyncio.wait([keeping, closing])
        _has_failed(keeping)
        if self._held is not None:
            await self._revoke(self._held, _REVOKE_WITHIN_S)
        await self._client.close()

    def _tell(self, whom: Callable[..., None], *what: object) -> None:
        try:
            self._loop.call_soon_threadsafe(whom, *what)
        except RuntimeError:  # the service has ended without `close`
            self._closing.set()

    async def _keep(self) -> None:
        while True:
            try:
                await self._until_loop_turns()
                await self._hold(await self._grant())
            except StoreError as error:
                _log.warning("cannot hold a lease at etcd, trying again: %s", error)
                await asyncio.sleep(_AFTER_REFUSAL_S)

    async def _grant(self) -> HeldLease:
        while True:
            sent_at = clock()
            answer = await self._client.call(GRANT, pb.LeaseGrantRequest(TTL=_TTL_S))
            held = self._held = HeldLease(Lease(answer.ID, float(answer.TTL), sent_at))
            if held.is_certain():
                return held
            await self._revoke(held)

    async def _hold(self, held: HeldLease) -> None:
        """Renew the lease until it is over. Then revoke it, as etcd may still hold it."""
        self._tell(self._holder.leased, held)
        why = "internal error of this replica"
        try:
            why = await self._renew(held)
        except StoreError as error:
            why = str(error)
            raise
        finally:
            held.is_over = True
            self._tell(self._holder.give_up, held, why)
        await self._revoke(held)

    async def _renew(self, held: HeldLease) -> str:
        """Returns why the lease is over."""
        pause_s = held.proven.renewal_pause_s
        while True:
            await self._unless_given_up(held, pause_s)
            if held.is_over:
                return "this replica has given it up"
            if self._hangs():
                return "this replica has handled no message for seconds"
            answer = await first_renewal(self._client, held.id)
            if answer is not None:
                renewed = held.proven.renewed(*answer)
                if renewed is None:
                    return "it expired"
                held.proven = renewed
                self._tell(self._holder.notify)
            elif not held.is_certain() and not await self._most_members_answer():
                return "no majority of etcd answered in time"
            pause_s = 0.0 if answer is None else held.proven.renewal_pause_s

    async def _most_members_answer(self) -> bool:
        return await self._client.most_members_answer(
            _PATIENCE_IF_BUSY if clock() < self._busy_until else 1.0
        )

    async def _unless_given_up(self, held: HeldLease, pause_s: float) -> None:
        self._given_up.clear()
        if held.is_over:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._given_up.wait()

    async def _until_loop_turns(self) -> None:
        if not self._hangs():
            return
        _log.error(
            "this replica hangs: it has handled no message for %.1f s. It holds no etcd lease until it does, so other "
            "replicas take over its jobs. If it does not recover, restart it",
            clock() - self._turned_at,
        )
        while self._hangs():  # noqa: ASYNC110  # the loop that hangs cannot tell when it turns again
            await asyncio.sleep(_TURN_NOTED_EVERY_S)

    def _hangs(self) -> bool:
        return hangs(clock() - self._turned_at, self._cpu_of_loop() - self._cpu_at_turn)

    async def _revoke(self, held: HeldLease, within_s: float | None = None) -> None:
        self._held = None
        give_up_at = None if within_s is None else time.monotonic() + within_s
        with contextlib.suppress(StoreError, Unreachable):  # already gone, or it will expire
            await self._client.call(REVOKE, pb.LeaseRevokeRequest(ID=held.id), give_up_at=give_up_at)


async def first_renewal(client: EtcdClient, lease_id: int) -> tuple[float, float] | None:
    """Renew the lease. Returns when the answered request was sent, and its time to live; None without an answer.

    A member that is silent may be gone, so the next one is asked soon. But it may also be slow: an answer is valid for
    the rest of the time to live, counted from its own request. So no request is given up for the next one.
    """
    asked: set[asyncio.Task[tuple[float, float] | None]] = set()
    try:
        for _ in range(_RENEWALS):
            if asked:
                client.switch_from(client.member())
            asked.add(asyncio.create_task(_one_renewal(client, lease_id)))
            done, asked = await asyncio.wait(
                asked, timeout=_NEXT_RENEWAL_AFTER_S, return_when=asyncio.FIRST_COMPLETED
            )
            if answers := [answer for task in done if (answer := task.result()) is not None]:
                return max(answers)
        return None
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def _one_renewal(client: EtcdClient, lease_id: int) -> tuple[float, float] | None:
    sent_at, within_s = clock(), _RENEWALS * _NEXT_RENEWAL_AFTER_S
    give_up_at = time.monotonic() + within_s
    request = pb.LeaseKeepAliveRequest(ID=lease_id)
    try:
        answer = await client.call(KEEP_ALIVE, request, attempt_s=within_s, give_up_at=give_up_at)
    except Unreachable:
        return None
    return sent_at, float(answer.TTL)


# --- how long a replica can be certain that its lease is valid, by its own clock alone --------------
#
# etcd counts the time of a lease from when it handled the last renewal, which is after the renewal was sent. So for
# `ttl_s` after sending, the lease is certainly valid, even if the network has failed since. We use a little less,
# because two clocks do not run at exactly the same rate.
#
# After that time the lease may or may not be valid. Only etcd ends leases. It never ends them during a leader
# election, and a new leader extends them. If etcd grants a renewal, the lease was valid all the time.

_MARGIN = 0.1  # of the time to live


@dataclass(frozen=True, slots=True)
class Lease:
    id: int
    ttl_s: float
    proven_at: float  # when the renewal that etcd last confirmed was sent

    @property
    def certain_until(self) -> float:
        return self.proven_at + self.ttl_s * (1.0 - _MARGIN)

    @property
    def renewal_pause_s(self) -> float:
        """The interval between renewals, so that three of them fit into the time for which the lease is certain."""
        return self.ttl_s / 4

    def is_certain(self, now: float) -> bool:
        return now < self.certain_until

    def renewed(self, sent_at: float, ttl_s: float) -> Lease | None:
        """The lease after a renewal; None if it has ended. After a late answer it may be uncertain."""
        return Lease(self.id, ttl_s, max(sent_at, self.proven_at)) if ttl_s > 0.0 else None


# --- follow all keys below a prefix, and every change of them ---------------------------------------
#
# It first delivers all keys (`Snapshot`), read in pages. Then it delivers `Changes`, starting with the revision after
# that of the first page: what has changed while the other pages were read may be delivered twice. After a broken stream
# it continues after the last event, at any member that answers. (The revision in the header of an answer is that of the
# store. A watch that catches up has events before it left to send.) If etcd has compacted the revisions in between, it
# delivers another `Snapshot`, so the caller need not handle that case. etcd sends large answers in fragments, which may
# divide one revision. So a fragment is continued with its own revision, and its events may be delivered twice.
#
# A watch delivers nothing if nothing changes, but also if its member hangs or is separated from the others. So the
# follower sends a progress request if no event arrives, and switches to another member if it is not answered. With
# `hasleader`, a member that has no leader ends the stream.

Stream = grpc.aio.StreamStreamCall[pb.WatchRequest, pb.WatchResponse]

_PATH = "/etcdserverpb.Watch/Watch"
_IDLE_S = 0.5
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Snapshot:
    revision: int
    entries: tuple[pb.KeyValue, ...]


@dataclass(frozen=True, slots=True)
class Changes:
    events: tuple[pb.Event, ...]


class _Compacted(Exception):
    pass


class Follower:
    """Calls `on_event`, which must neither block nor raise, with a `Snapshot` and then with `Changes`.

    With `keys_only` the entries of the snapshot have no values.
    """

    def __init__(
        self,
        client: EtcdClient,
        prefix: bytes,
        on_event: Callable[[Snapshot | Changes], None],
        *,
        keys_only: bool = False,
    ) -> None:
        self._client, self._prefix, self._on_event, self._keys_only = client, prefix, on_event, keys_only
        self._next = 0  # the first revision not yet received

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            revision, entries = await pages_of(self._client, self._prefix, keys_only=self._keys_only)
            self._next = revision + 1
            self._on_event(Snapshot(revision, entries))
            try:
                while True:
                    await self._one_member()
                    await asyncio.sleep(_PAUSE_S)
            except _Compacted:
                continue

    async def _one_member(self) -> None:
        member = self._client.member()
        used: Metadata = ()
        try:
            with one_error_if_reopened():
                used = await self._client.metadata()
                await self._one_stream(member, used)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                self._client.sign_in_again(used)
                return
        self._client.switch_from(member)

    async def _one_stream(self, member: Member, metadata: Metadata) -> None:
        """Follow one stream until the member ends it, or stops answering."""
        metadata = (*metadata, ("hasleader", "true"))
        stream = await member.stream(_PATH, pb.WatchRequest, pb.WatchResponse, metadata)
        try:
            async with asyncio.timeout(2 * _IDLE_S):
                await stream.write(_from(self._prefix, self._next))
            await self._listen(stream)
        except TimeoutError:
            return
        finally:
            stream.cancel()

    async def _listen(self, stream: Stream) -> None:
        """Receive messages. Reading is a separate task because cancelling a read ends the stream."""
        asked = False
        reading = asyncio.ensure_future(stream.read())
        try:
            while True:
                await asyncio.wait([reading], timeout=_IDLE_S)
                if reading.done():
                    if not self._handle(reading):
                        return
                    reading, asked = asyncio.ensure_future(stream.read()), False
                elif asked:
                    return
                else:
                    async with asyncio.timeout(_IDLE_S):
                        await stream.write(pb.WatchRequest(progress_request=pb.WatchProgressRequest()))
                    asked = True
        finally:
            reading.cancel()
            await asyncio.wait([reading])

    def _handle(self, reading: asyncio.Future[object]) -> bool:
        """Handle one message; False if the stream has ended."""
        if reading.cancelled():
            return False
        response = reading.result()
        if not isinstance(response, pb.WatchResponse):
            return False
        if response.compact_revision:
            raise _Compacted
        if response.canceled:
            return False
        if response.events:
            self._next = response.events[-1].kv.mod_revision + (not response.fragment)
            self._on_event(Changes(tuple(response.events)))
        return True


def _from(prefix: bytes, revision: int) -> pb.WatchRequest:
    request = pb.WatchCreateRequest(
        key=prefix, range_end=end_of(prefix), start_revision=revision, fragment=True
    )
    return pb.WatchRequest(create_request=request)
