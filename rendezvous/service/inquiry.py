"""A question of a person to the agents of a job: who is asked, and their answers in one bounded message."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from rendezvous.codec import BadMessage, answer_message
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.rounds.policy import outcome_text
from rendezvous.service.calls import NotFound, NotNow
from rendezvous.service.conversation import ask
from rendezvous.values.questions import MOST_WAIT_S, CheckpointWanted, ProfileWanted, Remark

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rendezvous.service.job import Job
    from rendezvous.values.questions import Wanted
    from rendezvous.values.state import JobState
    from rendezvous.values.types import AgentId

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
