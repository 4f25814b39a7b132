"""Hold a lease at etcd, in a thread of its own.

Theory of operation
-------------------
The event loop of a service that accepts thousands of agents may need a second for one turn, and a renewal takes several
turns. The lease ends after two seconds without a renewal. So a thread renews it, with an event loop and connections of
its own: it needs the interpreter for a moment, twice a second, and Python's threads pass the interpreter on every 5 ms.

A replica whose loop hangs must not keep its jobs. So the loop of the service notes the time four times a second, and
the thread renews the lease only if the loop has turned within the last `HUNG_AFTER_S`. That is many times longer than
its turns while 10,000 agents connect. In a process that is stopped, the thread does not run either.

The lease protects what it protected before. It is certain only for its duration after the sending of a renewal that
etcd has confirmed (`lease`), by a clock that also advances while the machine is suspended. What is written is checked
by etcd: the owner key of the job must be the one that was created under this lease. A loop that awakes late therefore
finds its lease uncertain or over, and its writes fail.

During a leader election, etcd does not renew or end leases. So as long as a majority of the members is reachable, the
thread waits. If it cannot reach a majority, it ends its lease for this replica before etcd may end it for all. As soon
as it can reach etcd again, it revokes that lease. Otherwise the other replicas would wait until the lease expires, and
a new leader extends leases by their full duration.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Protocol

from rendezvous.pb import etcd_pb2 as pb
from rendezvous.store.etcd_client import EtcdClient, Unreachable
from rendezvous.store.etcd_wire import GRANT, KEEP_ALIVE, REVOKE, MemberOfThread, finish
from rendezvous.store.lease import Lease
from rendezvous.store.protocol import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rendezvous.store.etcd_wire import Access

_log = logging.getLogger(__name__)
HUNG_AFTER_S = 15.0
_TTL_S = 2  # the least that etcd grants with its default election timeout
_TURN_NOTED_EVERY_S = 0.25
_RENEWALS = 4  # at once, one begun after the other ...
_NEXT_RENEWAL_AFTER_S = 0.4  # ... without an answer
_LATE_S = 0.5  # a turn of the loop that takes longer shows that this replica is busy ...
_BUSY_FOR_S = 5.0
_PATIENCE_IF_BUSY = 3.0  # ... and so may be etcd's answers
_REVOKE_WITHIN_S = 1.0
_AFTER_REFUSAL_S = 1.0


def clock() -> float:
    """A clock that also advances while the machine is suspended, unlike `time.monotonic` on Linux."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class HeldLease:
    """A lease, as the thread and the loop of the service see it. Only the thread sets `proven`."""

    def __init__(self, lease: Lease) -> None:
        self.id = lease.id
        self.proven = lease
        self.is_over = False  # never false again

    def is_certain(self) -> bool:
        return not self.is_over and self.proven.is_certain(clock())


class Holder(Protocol):
    """Is told in the loop of the service what becomes of the lease."""

    def leased(self, held: HeldLease) -> None: ...
    def renewed(self) -> None: ...
    def lease_ended(self, held: HeldLease, why: str) -> None: ...


class LeaseKeeper:
    """Holds one lease at a time. Create and close it in the loop of the service."""

    def __init__(self, access: Access, holder: Holder) -> None:
        self._client, self._holder = EtcdClient(access, MemberOfThread), holder
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._of_thread = asyncio.new_event_loop()
        self._closing, self._given_up = asyncio.Event(), asyncio.Event()  # of the thread's loop
        self._held: HeldLease | None = None
        self._turned_at, self._busy_until = clock(), 0.0
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
        self._turned_at = now
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
        if not keeping.cancelled():
            _log.critical(
                "internal error: the task '%s' has failed; restart this replica",
                keeping.get_name(),
                exc_info=keeping.exception(),
            )
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
            self._tell(self._holder.lease_ended, held, why)
        await self._revoke(held)

    async def _renew(self, held: HeldLease) -> str:
        """Returns why the lease is over."""
        pause_s = held.proven.renewal_pause_s
        while True:
            await self._unless_given_up(held, pause_s)
            await self._until_loop_turns()
            if held.is_over:
                return "this replica has given it up"
            answer = await first_renewal(self._client, held.id)
            if answer is not None:
                renewed = held.proven.renewed(*answer)
                if renewed is None:
                    return "it expired"
                held.proven = renewed
                self._tell(self._holder.renewed)
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
            "this replica hangs: it has handled no message for %g s. Its etcd lease is not renewed until it does, so "
            "other replicas take over its jobs. If it does not recover, restart it",
            HUNG_AFTER_S,
        )
        while self._hangs():  # noqa: ASYNC110  # the loop that hangs cannot tell when it turns again
            await asyncio.sleep(_TURN_NOTED_EVERY_S)

    def _hangs(self) -> bool:
        return clock() - self._turned_at > HUNG_AFTER_S

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
