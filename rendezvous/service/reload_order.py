"""What comes before a reload is ordered: the files are compiled on all nodes, and the ranks take a checkpoint.

If anything of this fails, the call is refused, and no rank is stopped. The decision itself is that of the round machine
(rendezvous/rounds/reloading.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rendezvous.codec import BadMessage, told_in
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.rounds.reloading import MOST_STEPS
from rendezvous.service.calls import NotNow
from rendezvous.service.inquiry import inquire
from rendezvous.values.events import ReloadOrdered
from rendezvous.values.questions import (
    CannotAnswer,
    Checkpointed,
    CheckpointWanted,
    SourcesSeen,
    SourcesWanted,
)
from rendezvous.values.state import Phase

if TYPE_CHECKING:
    from rendezvous.service.job import Job
    from rendezvous.values.questions import FromConversation, Wanted

_COMPILED_WITHIN_S = 20.0
_MORE_S = 5.0  # than the agent waits for the checkpoint
_LONGEST_WAIT_S = 500.0
_NOTHING = "nothing was stopped"
_NOT_RUNNING = {
    Phase.FORMING: "waits for nodes",
    Phase.SEALED: "is just starting its ranks",
    Phase.STOPPING: "is just stopping its ranks, to restart or to end",
}


async def prepared(job: Job, request: Any, name: str, why: str) -> tuple[Any, ReloadOrdered]:
    """The answer without the job, and the order. `name`: who asks. Raises `NotNow`, with all reasons against it."""
    if not 0 <= request.steps <= MOST_STEPS or not 0 <= request.wait_s <= _LONGEST_WAIT_S:
        raise BadMessage(
            f"invalid reload: use 0 to {MOST_STEPS:,} steps, and a wait of at most {_LONGEST_WAIT_S:g} s"
        )
    _check_phase(job)
    reason = f"{name} reloads the script{f': {why}' if why else ''}"
    seen = await _sources(job)
    has_checkpoint = all(each.watches for each in seen)
    if has_checkpoint:
        await _take_checkpoint(job, reason, request.wait_s)
    _check_phase(job)
    kept = all(each.keeps for each in seen)
    response = pb.ReloadJobResponse(checkpoint=has_checkpoint, kept=kept, changed=seen[0].changed)
    return response, ReloadOrdered(reason, request.steps if kept else 0)


def _check_phase(job: Job) -> None:
    phase = job.state.phase
    if phase is not Phase.RUNNING and phase is not Phase.ENDED:  # the order itself says how the job has ended
        raise NotNow(f"job {job.job_id!r} {_NOT_RUNNING[phase]}. Try again when its ranks run")


async def _sources(job: Job) -> list[SourcesSeen]:
    told = await _ask_all(job, SourcesWanted(), _COMPILED_WITHIN_S)
    seen: list[SourcesSeen] = []
    problems: list[str] = []
    for node, each in told:
        if isinstance(each, SourcesSeen) and not each.problem:
            seen.append(each)
        elif isinstance(each, SourcesSeen):
            problems.append(f"node {node}: {each.problem}")
        else:
            problems.append(f"node {node}: {_why(each)}")
    if problems:
        raise NotNow(f"the script cannot be reloaded, so {_NOTHING}: {'; '.join(problems[:8])}")
    if other := [
        node for node, each in told if isinstance(each, SourcesSeen) and each.checksum != seen[0].checksum
    ]:
        raise NotNow(
            f"the files of the script on node {other[0]} differ from those on node {told[0][0]}, so {_NOTHING}. Copy "
            "the same files to all nodes first"
        )
    return seen


async def _take_checkpoint(job: Job, reason: str, wait_s: float) -> None:
    late = f"not all ranks have taken a checkpoint within {wait_s:g} s (--wait)"
    for node, each in await _ask_all(job, CheckpointWanted(reason, wait_s), wait_s + _MORE_S):
        if not (isinstance(each, Checkpointed) and each.taken):
            why = late if isinstance(each, Checkpointed) else _why(each)
            raise NotNow(f"node {node}: {why}; {_NOTHING}")


async def _ask_all(job: Job, wanted: Wanted, wait_s: float) -> list[tuple[str, FromConversation]]:
    response = await inquire(job, pb.AskRequest(job_id=job.job_id, wait_s=wait_s), wanted)
    return [(each.node, told_in(each.answer)) for each in response.answers]


def _why(told: FromConversation) -> str:
    return told.reason if isinstance(told, CannotAnswer) else "its agent gave an answer to another question"
