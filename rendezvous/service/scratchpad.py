"""The gRPC service Scratchpad: a few values and barriers per job, for scripts.

The store keeps the values. Only the replica that owns the job knows which members have entered a barrier, so a member
enters again when its connection breaks. The service first stores that a barrier is complete, and then answers its
members. So members that reconnect later pass the barrier too.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rendezvous.access.auth import Right
from rendezvous.codec import BadMessage
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.service.calls import NotFound
from rendezvous.service.jobs import RESERVED
from rendezvous.service.limits import Counts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rendezvous.access.auth import Identity
    from rendezvous.service.calls import Calls
    from rendezvous.service.jobs import Jobs
    from rendezvous.service.limits import Limits
    from rendezvous.store.protocol import Store, Values

_PARTIES = 100_000


class _Barrier:
    def __init__(self) -> None:
        self.members: set[str] = set()
        self.calls = 0  # waiting in the barrier; it is dropped with the last of them
        self.passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Scratchpad:
    def __init__(self, jobs: Jobs, store: Store, limits: Limits) -> None:
        self._jobs, self._store = jobs, store
        self._counts = Counts("barriers", limits.barriers_per_job, limits.barriers)
        self._barriers: dict[tuple[str, str], _Barrier] = {}

    def methods(self, calls: Calls) -> dict[str, Any]:
        return {
            "GetValue": calls.unary(Right.VALUES, pb.GetValueRequest, self._get),
            "PutValue": calls.unary(Right.VALUES, pb.PutValueRequest, self._put),
            "DeleteValue": calls.unary(Right.VALUES, pb.DeleteValueRequest, self._delete),
            "EnterBarrier": calls.unary(Right.VALUES, pb.EnterBarrierRequest, self._enter),
        }

    async def _values(self, job_id: str) -> Values:
        """The values of an existing job: clients must not fill the store with jobs that do not exist."""
        if await self._jobs.find(job_id) is None:
            raise NotFound(f"job {job_id!r} does not exist")
        return self._store.values(job_id)

    async def _get(self, request: Any, _: Identity) -> Any:
        values, key = await self._values(request.job_id), _key(request.key)
        value = await values.get(key)
        if request.wait_s > 0 and (value is None or value.version <= request.after_version):
            async with asyncio.timeout(min(request.wait_s, 3600.0)):
                value = await values.wait(key, request.after_version)
        if value is None:
            raise NotFound(f"value {key!r} does not exist")
        return pb.GetValueResponse(value=value.data, version=value.version)

    async def _put(self, request: Any, _: Identity) -> Any:
        values, key = await self._values(request.job_id), _key(request.key)
        if request.HasField("expected_version"):
            version = await values.compare_and_put(key, request.value, request.expected_version)
        else:
            version = await values.put(key, request.value)
        return pb.PutValueResponse(version=version)

    async def _delete(self, request: Any, _: Identity) -> Any:
        values = await self._values(request.job_id)
        return pb.DeleteValueResponse(deleted=await values.delete(_key(request.key)))

    # --- barriers ----------------------------------------------------------------------------------

    async def _enter(self, request: Any, _: Identity) -> Any:
        values, name = await self._values(request.job_id), _key(request.name)
        if not 1 <= request.parties <= _PARTIES:
            raise BadMessage(f"invalid number of parties {request.parties}: use 1 to {_PARTIES:,}")
        if not 0 < len(request.member) <= 256:
            raise BadMessage(f"invalid member name of {len(request.member)} characters: use 1 to 256")
        if not request.wait_s > 0:
            raise BadMessage(f"invalid wait_s {request.wait_s:g}: use a number of seconds above 0")
        mark = f"{RESERVED}barrier/{name}"
        with self._entered(request.job_id, name, request.member) as barrier:
            # Read after entering: if the barrier is passed later, its future reports that.
            if await values.get(mark) is not None:
                return pb.EnterBarrierResponse(arrived=request.parties)
            if len(barrier.members) >= request.parties and not barrier.passed.done():
                await values.put(mark, b"passed")
                if not barrier.passed.done():
                    barrier.passed.set_result(None)
            async with asyncio.timeout(min(request.wait_s, 3600.0)):
                await asyncio.shield(barrier.passed)
            return pb.EnterBarrierResponse(arrived=len(barrier.members))

    @contextmanager
    def _entered(self, job_id: str, name: str, member: str) -> Iterator[_Barrier]:
        """Enter the barrier for the time of one call. It is removed when its last call ends, also after an error."""
        key = (job_id, name)
        if key not in self._barriers:
            self._counts.enter(job_id)
            self._barriers[key] = _Barrier()
        barrier = self._barriers[key]
        barrier.members.add(member)
        barrier.calls += 1
        try:
            yield barrier
        finally:
            barrier.calls -= 1
            if not barrier.calls:
                del self._barriers[key]
                self._counts.leave(job_id)


def _key(key: str) -> str:
    if key.startswith(RESERVED):
        raise BadMessage(f"invalid name: names that begin with {RESERVED!r} are reserved for the service")
    if not 0 < len(key.encode()) <= 160:
        raise BadMessage(f"invalid name of {len(key.encode())} bytes: use 1 to 160 bytes")
    return key
