"""The gRPC service Agents: read the first message of a stream and attach the stream to its job."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from rendezvous.access.auth import Denied, Right
from rendezvous.access.refusals import Reason
from rendezvous.codec import BadMessage, read_from_agent, to_agent_bytes
from rendezvous.rounds.join_limits import join_problem, reported_state_problem
from rendezvous.service.agent_stream import AgentStream, StreamAborted
from rendezvous.service.calls import count_open
from rendezvous.service.conversation import Conversations
from rendezvous.service.jobs import OwnedByOther
from rendezvous.service.limits import Counts, LimitReached, Limits, Rates
from rendezvous.session_replay import Redirect
from rendezvous.values.events import AgentJoined, Refused

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rendezvous.access.auth import Gate, Identity
    from rendezvous.service.calls import Calls
    from rendezvous.service.job import Job
    from rendezvous.service.jobs import Jobs

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
        raise Denied(grpc.StatusCode.PERMISSION_DENIED, words, Reason.REPLAYED_JOIN)

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
