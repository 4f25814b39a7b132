"""The stream on which one agent answers questions about its ranks (the call `Converse` of the service Agents).

Answers are large and may take seconds, so they have a stream of their own: heartbeats and decisions do not wait behind
them. Every question has one answer, at most as long as one message. A question without an answer in time fails for the
client that asked; nothing is kept of it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from rendezvous.access.auth import Right
from rendezvous.codec import BadMessage, question_message, read_answer
from rendezvous.service.agent_stream import Allowance, Counts, StreamAborted
from rendezvous.service.calls import NotFound, count_open
from rendezvous.values.questions import CannotAnswer, Present, Remark, RestartTimes

if TYPE_CHECKING:
    from collections.abc import Callable

    from rendezvous.access.auth import Gate, Identity
    from rendezvous.service.agent_stream import Limits
    from rendezvous.service.calls import Calls
    from rendezvous.service.jobs import Job, Jobs
    from rendezvous.values.questions import Told, Wanted
    from rendezvous.values.types import AgentId

_FIRST_MESSAGE_S = 10.0
_AT_ONCE = 32  # unanswered questions of one agent
_REMARKS_PER_S, _REMARKS_AT_ONCE = 2.0, 32


class Conversation:
    def __init__(self, agent: AgentId, context: Any, remark: Callable[[Remark | RestartTimes], None]) -> None:
        self.agent = agent
        self._context, self._remark = context, remark
        self._asked: dict[int, asyncio.Future[Told]] = {}
        self._last = 0
        self._outbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._allowance = Allowance(_REMARKS_PER_S, _REMARKS_AT_ONCE, at=asyncio.get_running_loop().time())

    async def ask(self, wanted: Wanted, wait_s: float) -> Told:
        """Ask, and wait for the answer."""
        if len(self._asked) >= _AT_ONCE:
            return CannotAnswer(
                f"{len(self._asked)} questions to this node are not answered yet: ask again later"
            )
        self._last += 1
        number = self._last
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._outbox.put_nowait(question_message(number, wanted).SerializeToString())
        try:
            return await asyncio.wait_for(answer, wait_s)
        except TimeoutError:
            return CannotAnswer(f"the agent did not answer within {wait_s:g} s")
        finally:
            del self._asked[number]

    def end(self) -> None:
        """End the stream: another replica owns the job, or the agent has opened another one."""
        self._outbox.put_nowait(None)

    async def run(self) -> None:
        reader = asyncio.get_running_loop().create_task(self._read())
        try:
            while (data := await self._outbox.get()) is not None:
                await self._context.write(data)
        except grpc.aio.BaseError:
            pass  # the client is gone
        finally:
            reader.cancel()
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_result(CannotAnswer("the connection to the agent broke: ask again"))
        if reader.done() and not reader.cancelled() and (error := reader.exception()) is not None:
            raise error

    async def _read(self) -> None:
        try:
            while (data := await self._context.read()) is not grpc.aio.EOF:
                self._take(*read_answer(data))
        except grpc.aio.BaseError:
            pass
        finally:
            self.end()

    def _take(self, number: int, told: Any) -> None:
        answer = self._asked.get(number)
        if isinstance(told, Remark | RestartTimes):
            if not self._allowance.take(asyncio.get_running_loop().time()):
                self._remark(told)
        elif isinstance(told, Present):
            raise BadMessage("`present` may only be in the first message")
        elif answer is not None and not answer.done():  # else it came too late
            answer.set_result(told)


class Conversations:
    def __init__(self, jobs: Jobs, gate: Gate, limits: Limits) -> None:
        self._jobs, self._gate = jobs, gate
        what = "streams for questions"
        self._streams = Counts(what, limits.streams_per_identity, limits.agents, option="--max-agents")

    def methods(self, calls: Calls) -> dict[str, Any]:
        return {"Converse": grpc.stream_stream_rpc_method_handler(calls.guard(self._converse))}

    async def _converse(self, _: Any, context: Any) -> None:
        identity = self._gate.identify(context)
        identity.require(Right.JOIN)
        with count_open(self._streams, identity):
            present = await self._read_first(context)
            if present is not None:
                await self._stay(self._job_of(present, identity), present.agent, context)

    async def _read_first(self, context: Any) -> Present | None:
        async with asyncio.timeout(_FIRST_MESSAGE_S):
            data = await context.read()
        if data is grpc.aio.EOF:
            return None
        _, present = read_answer(data)
        if not isinstance(present, Present):
            raise BadMessage("the first message of this stream must have `present`")
        return present

    def _job_of(self, present: Present, identity: Identity) -> Job:
        identity.require(Right.JOIN, present.job_id)
        job = self._jobs.if_open(present.job_id)
        if job is None or present.agent not in job.streams:
            raise NotFound(f"agent {present.agent} has not joined job {present.job_id!r} at this replica")
        return job

    async def _stay(self, job: Job, agent: AgentId, context: Any) -> None:
        conversation = Conversation(agent, context, lambda remark: job.remark(remark, agent.node))
        before = job.conversations.get(agent)
        if before is not None:
            before.end()
        job.conversations[agent] = conversation
        try:
            await conversation.run()
        except BadMessage as error:
            raise StreamAborted(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
        finally:
            if job.conversations.get(agent) is conversation:
                del job.conversations[agent]


async def ask(job: Job, agent: AgentId, wanted: Wanted, wait_s: float) -> Told:
    """Ask one agent of the job."""
    conversation = job.conversations.get(agent)
    if conversation is not None:
        return await conversation.ask(wanted, wait_s)
    release = job.state.spec.version if job.state.spec is not None else ""
    if agent not in job.streams:
        return CannotAnswer("the agent is not connected to this service now")
    return CannotAnswer(
        f"the agent has not opened its stream for questions: it has just connected, or its release ({release}) does "
        "not answer questions. Try again; if that does not help, install the release of the service on this node"
    )
