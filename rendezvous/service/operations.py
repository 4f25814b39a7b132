"""The gRPC service Operations: read and control jobs, for users and their tools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc

from rendezvous.access.auth import Gate, Identity, Right
from rendezvous.access.secret import NAME
from rendezvous.codec import BadMessage, answer_message, encode, wanted_in
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.rounds.event_log import LoggedEvent
from rendezvous.rounds.policy import outcome_text
from rendezvous.rounds.view import summary_of, view_of
from rendezvous.service.agent_stream import Counts, LimitReached, ServiceLimits
from rendezvous.service.calls import Calls, NotFound, NotNow, count_open
from rendezvous.service.jobs import Job, Jobs, ask
from rendezvous.service.owner import OwnedByOther, Watcher
from rendezvous.values.events import (
    Event,
    JobAborted,
    JobResized,
    NodeDrained,
    NodeResumed,
    RestartOrdered,
)
from rendezvous.values.job_state import JobState, Phase
from rendezvous.values.questions import (
    ACTS,
    MOST_WAIT_S,
    CheckpointWanted,
    DrillWanted,
    ProfileWanted,
    Remark,
    Wanted,
)
from rendezvous.values.types import AgentId

_REASON_CHARS = 500
_HOLDERS = {f"certificate {NAME}": "a holder of the job secret"}  # its certificate has no name
_JOBS_LISTED = 10_000


class Operations:
    def __init__(self, jobs: Jobs, gate: Gate, limits: ServiceLimits) -> None:
        self._jobs, self._gate = jobs, gate
        self._watches = Counts("watches", limits.watches_per_identity)
        self._questions = Counts("questions that wait for answers", limits.questions_per_identity)

    def methods(self, calls: Calls) -> dict[str, Any]:
        unary = {name: calls.unary(*call) for name, call in self.unary_calls().items()}
        return unary | {"WatchEvents": grpc.unary_stream_rpc_method_handler(calls.guard(self._watch))}

    def unary_calls(self) -> dict[str, tuple[Right, Any, Callable[[Any, Identity], Awaitable[Any]]]]:
        """By method: the right that it needs, the type of its request, and what answers it."""
        read, control = Right.READ, Right.CONTROL
        return {
            "ListJobs": (read, pb.ListJobsRequest, self._list),
            "GetJob": (read, pb.GetJobRequest, self._get),
            "DrainNode": (control, pb.DrainNodeRequest, self._drain),
            "ResumeNode": (control, pb.ResumeNodeRequest, self._resume),
            "ResizeJob": (control, pb.ResizeJobRequest, self._resize),
            "RestartJob": (control, pb.RestartJobRequest, self._restart),
            "Ask": (read, pb.AskRequest, self._ask),
            "GetRestarts": (read, pb.GetRestartsRequest, self._restarts),
            "AbortJob": (control, pb.AbortJobRequest, self._abort),
        }

    async def _find(self, job_id: str) -> Job:
        job = await self._jobs.find(job_id)
        if job is None:
            raise NotFound(f"job {job_id!r} does not exist: `ddpctl list` shows the jobs")
        return job

    # --- reading -----------------------------------------------------------------------------------

    async def _list(self, _: Any, identity: Identity) -> Any:
        jobs, others = await self._jobs.listed()
        found = [encode(each) for each in jobs if identity.may(Right.READ, each.job_id)]
        elsewhere = [
            pb.JobElsewhere(job_id=job_id, address=address)
            for job_id, address in others.items()
            if identity.may(Right.READ, job_id)
        ]
        return pb.ListJobsResponse(jobs=found[:_JOBS_LISTED], elsewhere=elsewhere[:_JOBS_LISTED])

    async def _get(self, request: Any, _: Identity) -> Any:
        job = await self._find(request.job_id)
        now = asyncio.get_running_loop().time()
        after = request.points_after if request.HasField("points_after") else None
        view = view_of(request.job_id, job.state, now, job.past(), job.heard(now), after)
        return pb.GetJobResponse(job=encode(view))

    async def _watch(self, data: bytes, context: Any) -> None:
        identity = self._gate.identify(context)
        request = pb.WatchEventsRequest.FromString(data)
        async with aclosing(self.events(request, identity)) as responses:
            async for response in responses:
                await context.write(response.SerializeToString())

    async def events(self, request: Any, identity: Identity) -> AsyncGenerator[Any, None]:
        """The journal of a job."""
        identity.require(Right.READ, request.job_id)
        with count_open(self._watches, identity):
            job = await self._find(request.job_id)
            watcher = job.watch(request.after_seq if request.journal_id in ("", job.journal_id) else 0)
            if not request.follow:
                watcher.put(None)
            try:
                async for note in _notes_of(watcher):
                    yield pb.WatchEventsResponse(note=encode(note), journal_id=job.journal_id)
            finally:
                job.watchers.discard(watcher)

    async def _ask(self, request: Any, identity: Identity) -> Any:
        wanted = wanted_in(request.question)
        if isinstance(wanted, ACTS):
            identity.require(Right.CONTROL, request.job_id)
        job = await self._find(request.job_id)
        if isinstance(wanted, DrillWanted):
            wanted = replace(wanted, by=_name_of(identity.name))
        if remark := asked_by(_name_of(identity.name), wanted, job.state.generation):
            job.remark(remark)
        with count_open(self._questions, identity):
            return await inquire(job, request, wanted)

    async def _restarts(self, request: Any, _: Identity) -> Any:
        known = (await self._find(request.job_id)).restart_times
        return pb.GetRestartsResponse(times=[encode(known[key]) for key in sorted(known)])

    # --- orders ------------------------------------------------------------------------------------

    async def _ordered(self, job_id: str, order: Event) -> Any:
        job = await self._find(job_id)
        after = await job.execute(order)
        if after.outcome is not None and not isinstance(order, JobAborted):
            raise NotNow(f"job {job_id!r} has ended: {outcome_text(after.outcome)}")
        if after.phase is Phase.FORMING and isinstance(order, RestartOrdered):
            raise NotNow(f"job {job_id!r} has no ranks to restart: it still waits for its nodes")
        return encode(summary_of(job_id, after))

    async def _drain(self, request: Any, identity: Identity) -> Any:
        order = NodeDrained(_node(request), _reason(request, identity))
        return pb.DrainNodeResponse(job=await self._ordered(request.job_id, order))

    async def _resume(self, request: Any, _: Identity) -> Any:
        return pb.ResumeNodeResponse(job=await self._ordered(request.job_id, NodeResumed(_node(request))))

    async def _resize(self, request: Any, _: Identity) -> Any:
        if not 1 <= request.min_nodes <= request.max_nodes <= 100_000:
            raise BadMessage(
                f"invalid size {request.min_nodes}:{request.max_nodes}: use 1 <= MIN <= MAX <= 100,000 nodes"
            )
        order = JobResized(request.min_nodes, request.max_nodes)
        return pb.ResizeJobResponse(job=await self._ordered(request.job_id, order))

    async def _restart(self, request: Any, identity: Identity) -> Any:
        order = RestartOrdered(_reason(request, identity))
        return pb.RestartJobResponse(job=await self._ordered(request.job_id, order))

    async def _abort(self, request: Any, identity: Identity) -> Any:
        order = JobAborted(_reason(request, identity))
        return pb.AbortJobResponse(job=await self._ordered(request.job_id, order))


async def _notes_of(watcher: Watcher) -> AsyncIterator[LoggedEvent]:
    while not watcher.fell_behind:
        note = await watcher.queue.get()
        if note is None and watcher.job_moved:
            raise OwnedByOther("")
        if note is None:
            return
        yield note
    raise LimitReached("this watcher reads too slowly and has missed events; watch again")


def _node(request: Any) -> str:
    node: str = request.node
    if not 0 < len(node) <= 256 or not node.isprintable():
        raise BadMessage("invalid node name: use 1 to 256 printable characters")
    return node


def _words(request: Any) -> str:
    return "".join(c if c.isprintable() else " " for c in request.reason[:_REASON_CHARS]).strip()


def _reason(request: Any, identity: Identity) -> str:
    return reason_text(_words(request), identity.name)


def reason_text(words: str, who: str) -> str:
    """The reason, as it stands after "aborted by an operator: ". It ends with who gave the order."""
    return f"{words or 'no reason given'} (ordered by {_name_of(who)})"


def _name_of(who: str) -> str:
    return _HOLDERS.get(who, who)


# --- inquiry ----------------------------------------------------------------------------------------
#
# A question of a person to the agents of a job: who is asked, and their answers in one bounded message.

_DEFAULT_WAIT_S = 5.0
_MOST_BYTES = 3_500_000  # a client must accept 4 MiB
_NAMED = 1000  # nodes and ranks in one request


async def inquire(job: Job, request: Any, wanted: Wanted) -> Any:
    if len(request.nodes) > _NAMED or len(request.ranks) > _NAMED:
        raise BadMessage(f"too many nodes or ranks: name at most {_NAMED}, or none to ask all nodes")
    wait_s = min(request.wait_s, MOST_WAIT_S) if request.wait_s > 0 else _DEFAULT_WAIT_S
    if job.state.outcome is not None and not job.conversations:
        raise NotNow(f"job {job.job_id!r} has ended, so no agent answers: {outcome_text(job.state.outcome)}")
    agents = asked(job.job_id, job.state, request.nodes, request.ranks)
    told = await asyncio.gather(*(ask(job, agent, wanted, wait_s) for agent in agents))
    response, size = pb.AskResponse(), 0
    for agent, each in zip(agents, told, strict=True):
        answer = pb.NodeAnswer(node=agent.node, answer=answer_message(0, each))
        size += answer.ByteSize()
        if size > _MOST_BYTES:
            response.left_out += 1
        else:
            response.answers.append(answer)
    return response


def asked(job_id: str, state: JobState, nodes: Sequence[str], ranks: Sequence[int]) -> list[AgentId]:
    """The agents to ask, by node rank: those that are named, or that run the named ranks, or all of the world."""
    world = state.world
    if world is None:
        raise NotNow(f"job {job_id!r} has no ranks yet: it still waits for its nodes")
    placed = {place.agent.node for place in world.placements}
    if away := [node for node in nodes if node not in placed]:
        has = "stands by and runs no ranks" if away[0] in state.members else "is not in the job"
        raise NotFound(f"node {away[0]!r} {has}: `ddpctl status {job_id}` shows the nodes")
    if wrong := [rank for rank in ranks if not 0 <= rank < world.size]:
        raise NotFound(f"job {job_id!r} has no rank {wrong[0]}: its ranks are 0 to {world.size - 1}")
    everyone = not nodes and not ranks
    return [
        place.agent
        for place in world.placements
        if everyone
        or place.agent.node in nodes
        or any(place.rank_offset <= rank < place.rank_offset + place.facts.nproc for rank in ranks)
    ]


def asked_by(name: str, wanted: Wanted, generation: int) -> Remark | None:
    """For the journal: who did more than look."""
    match wanted:
        case CheckpointWanted(reason):
            return Remark(
                generation, "checkpoint", f"{name} asks for a checkpoint: {reason or 'no reason given'}"
            )
        case ProfileWanted(rank, seconds):
            return Remark(generation, "profile", f"{name} profiles rank {rank} for {seconds:g} s")
        case _:
            return None
