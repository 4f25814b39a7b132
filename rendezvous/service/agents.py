"""The gRPC service Agents: read the first message of a stream and attach the stream to its job."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from rendezvous.access.auth import Denied, Reason, Right
from rendezvous.codec import BadMessage, read_from_agent, to_agent_bytes
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.rounds.join_limits import join_problem, reported_state_problem
from rendezvous.service.agent_stream import AgentStream, Counts, LimitReached, Limits, Rates, StreamAborted
from rendezvous.service.calls import NotFound, count_open
from rendezvous.service.conversation import Conversations
from rendezvous.service.jobs import RESERVED, OwnedByOther
from rendezvous.session_replay import Redirect
from rendezvous.values.events import AgentJoined, Refused

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rendezvous.access.auth import Gate, Identity
    from rendezvous.service.calls import Calls
    from rendezvous.service.jobs import Job, Jobs
    from rendezvous.store.protocol import Store, Values


_FIRST_MESSAGE_S = 10.0
_NO_OWNER_YET_S = 0.2
_STREAM_METADATA = "rendezvous-stream"
_SPEC_UNUSABLE = 78


class Agents:
    def __init__(self, jobs: Jobs, gate: Gate, limits: Limits) -> None:
        self._jobs, self._gate, self._limits = jobs, gate, limits
        self._streams = Counts("streams", limits.streams_per_identity, limits.agents, option="--max-agents")
        self._rates = Rates(limits.joins_per_s, limits.join_burst)
        self._conversations = Conversations(jobs, gate, limits)

    @property
    def streams(self) -> int:
        return self._streams.total

    def methods(self, calls: Calls) -> dict[str, Any]:
        # Raw bytes both ways: the codec decodes them, and a broadcast is encoded only once.
        attend: Any = grpc.stream_stream_rpc_method_handler(calls.guard(self._attend))
        return {"Attend": attend, **self._conversations.methods(calls)}

    async def _attend(self, _: Any, context: Any) -> None:
        identity = self._gate.identify(context)
        identity.require(Right.JOIN)
        with count_open(self._streams, identity):
            joined = await self._read_join(context)
            if joined is None:
                return
            identity.require(Right.JOIN, joined.spec.job_id)
            await self._await_turn(identity)
            words = join_problem(joined.agent, joined.spec, joined.facts) or reported_state_problem(
                joined.generation, joined.running
            )
            if words:
                await context.write(to_agent_bytes(Refused(words, _SPEC_UNUSABLE)))
                return
            job = await self._job_of(joined, context)
            if job is not None:
                self._require_new(job, joined, context)
                await self._stay(job, joined, context)

    async def _read_join(self, context: Any) -> AgentJoined | None:
        async with asyncio.timeout(_FIRST_MESSAGE_S):
            data = await context.read()
        if data is grpc.aio.EOF:
            return None
        message = read_from_agent(data, None)
        if not isinstance(message, AgentJoined):
            raise BadMessage("the first message of a stream must be a join")
        return message

    async def _await_turn(self, identity: Identity) -> None:
        wait_s = self._rates.take(identity.name, asyncio.get_running_loop().time())
        if wait_s > 0.0:
            await asyncio.sleep(wait_s)

    async def _job_of(self, joined: AgentJoined, context: Any) -> Job | None:
        job_id = joined.spec.job_id
        try:
            job = self._jobs.if_open(job_id) or await self._jobs.open(job_id)
        except OwnedByOther as error:
            await context.write(
                to_agent_bytes(Redirect(error.address, 0.0 if error.address else _NO_OWNER_YET_S, str(error)))
            )
            return None
        if len(job.streams) >= self._limits.agents_per_job and joined.agent not in job.streams:
            raise LimitReached(
                f"job {job_id!r} already has {len(job.streams)} agents, which is a fixed limit: start fewer nodes"
            )
        return job

    def _require_new(self, job: Job, joined: AgentJoined, context: Any) -> None:
        """Reject a replayed join: an agent numbers its streams, so a repeated number is not a new stream."""
        if job.is_new_stream(joined.agent, _number(context.invocation_metadata() or ())):
            return
        words = (
            f"replayed join: {joined.agent} already opened a stream with this number or a higher one. The message was "
            "sent twice, or two agents have the same identity. If it happens again, restart the agent"
        )
        raise Denied(words, Reason.REPLAYED_JOIN)

    async def _stay(self, job: Job, joined: AgentJoined, context: Any) -> None:
        owner, backlog = job.owner, self._limits.backlog

        def busy() -> bool:
            return owner.backlog > backlog

        stream = AgentStream(joined.agent, context, self._limits, owner.note_contact, owner.post, busy)
        job.attach(stream)
        try:
            owner.post(joined)
            await stream.run()
        except StreamAborted as aborted:
            aborted.whose = f"{joined.agent} in job {job.job_id}"
            raise
        finally:
            job.detach(stream)


def _number(metadata: Iterable[tuple[str, str | bytes]]) -> int:
    """The number of the stream; 0 if this client does not number its streams."""
    text = next((value for key, value in metadata if key == _STREAM_METADATA), "")
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 10 else 0


# --- the gRPC service Scratchpad: a few values and barriers per job, for scripts --------------------
#
# The store keeps the values. Only the replica that owns the job knows which members have entered a barrier, so a member
# enters again when its connection breaks. The service first stores that a barrier is complete, and then answers its
# members. So members that reconnect later pass the barrier too. A member counts while a call of it waits: one that has
# given up, or is just reconnecting, is not in the barrier.

_PARTIES = 100_000


class _Barrier:
    def __init__(self) -> None:
        self.members: Counter[str] = (
            Counter()
        )  # the calls of each that wait; it is dropped with the last of them
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
            return pb.EnterBarrierResponse(arrived=request.parties)

    @contextmanager
    def _entered(self, job_id: str, name: str, member: str) -> Iterator[_Barrier]:
        """Enter the barrier for the time of one call. It is removed when its last call ends, also after an error."""
        key = (job_id, name)
        if key not in self._barriers:
            self._counts.enter(job_id)
            self._barriers[key] = _Barrier()
        barrier = self._barriers[key]
        barrier.members[member] += 1
        try:
            yield barrier
        finally:
            barrier.members[member] -= 1
            if not barrier.members[member]:
                del barrier.members[member]
            if not barrier.members:
                del self._barriers[key]
                self._counts.leave(job_id)


def _key(key: str) -> str:
    if key.startswith(RESERVED):
        raise BadMessage(f"invalid name: names that begin with {RESERVED!r} are reserved for the service")
    if not 0 < len(key.encode()) <= 160:
        raise BadMessage(f"invalid name of {len(key.encode())} bytes: use 1 to 160 bytes")
    return key
