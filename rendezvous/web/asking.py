"""What the page asks once: the output of ranks, stacks, the story of a failure; and what it orders.

Each function is the page's side of a command of ddpctl, with the same calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rendezvous.control.asking import inquire
from rendezvous.control.commands import TRIAL_STEPS
from rendezvous.control.log_lines import as_dict as line_dict
from rendezvous.control.log_lines import lines_of, on_terminal
from rendezvous.control.why import story_of
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.values.questions import (
    CannotAnswer,
    Checkpointed,
    CheckpointWanted,
    LogPieces,
    LogPlace,
    LogStream,
    LogsWanted,
    Stacks,
    StacksWanted,
    StepSeen,
    StepWanted,
)
from rendezvous.web.views import step_view, story_view, summary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rendezvous.control.asking import Caller
    from rendezvous.control.log_lines import Line
    from rendezvous.web.requests import LogsRequest, OrderRequest

_STACKS_S, _LOGS_S, _STEP_S = 8.0, 5.0, 35.0
_CHECKPOINT_S, _MORE_S = 300.0, 5.0
_RELOAD_S = 60.0  # for its checkpoint, as `ddpctl reload` waits


async def logs(caller: Caller, wanted: LogsRequest) -> dict[str, Any]:
    """The lines since the places in the request, and the places for the next one."""
    places = tuple(LogPlace(g, r, LogStream(s), at) for g, r, s, at in wanted.places)
    asked = LogsWanted(wanted.ranks, tail=wanted.tail, places=places, wait_s=wanted.wait_s)
    answers = await inquire(caller, wanted.job, asked, ranks=wanted.ranks, wait_s=_LOGS_S + wanted.wait_s)
    told = [(node, each) for node, each in answers if isinstance(each, LogPieces)]
    after = {(p.generation, p.rank, str(p.stream)): p.offset for _, each in told for p in each.places}
    before = {(g, r, s): at for g, r, s, at in wanted.places}
    return {
        "lines": [_line(each) for each in lines_of((node, p) for node, each in told for p in each.pieces)],
        "places": [[*key, at] for key, at in sorted((before | after).items())],
        "more": any(each.more for _, each in told),
        "ended": bool(told) and all(each.ended for _, each in told),
        "silent": [f"node {node}: {each.reason}" for node, each in answers if isinstance(each, CannotAnswer)],
    }


def _line(line: Line) -> dict[str, Any]:
    return {**line_dict(line), "text": on_terminal(line.text, color=False)}


async def stacks(caller: Caller, job: str, rank: int) -> dict[str, Any]:
    ((node, told),) = await inquire(caller, job, StacksWanted(rank), ranks=[rank], wait_s=_STACKS_S)
    if isinstance(told, Stacks):
        return {"node": node, "text": told.text, "problem": ""}
    assert isinstance(told, CannotAnswer)
    return {"node": node, "text": "", "problem": told.reason}


async def step(caller: Caller, job: str, rank: int) -> dict[str, Any]:
    """The next whole step of a rank: its phases, and its collectives."""
    ((_, told),) = await inquire(caller, job, StepWanted(rank), ranks=[rank], wait_s=_STEP_S)
    if isinstance(told, StepSeen):
        return {**step_view(told), "problem": ""}
    return {"problem": told.reason if isinstance(told, CannotAnswer) else "the agent gave no answer"}


async def why(caller: Caller, job_id: str, generation: int) -> dict[str, Any] | None:
    """None: nothing has failed. Raises `NoSuchJob` if this generation has not failed."""
    job = (await caller.call("GetJob", pb.GetJobRequest(job_id=job_id))).job
    story = await story_of(caller, job_id, job, generation)
    return None if story is None else story_view(story, job)


# --- orders --------------------------------------------------------------------------------------------------


async def order(caller: Caller, wanted: OrderRequest, who: str) -> dict[str, Any]:
    """Carry out what a person has confirmed. The journal of the job shows who it was."""
    reason = f"{wanted.reason or 'no reason given'} ({who}, on the page)"
    if wanted.action == "checkpoint":
        return await _checkpoint(caller, wanted.job, reason)
    if wanted.action == "reload":
        return await _reload(caller, wanted)
    method, request = _request(wanted, reason)
    return {"job": summary((await caller.call(method, request)).job), "silent": []}


def _request(wanted: OrderRequest, reason: str) -> tuple[str, Any]:
    job, node = wanted.job, wanted.node
    requests: Mapping[str, tuple[str, Any]] = {
        "drain": ("DrainNode", pb.DrainNodeRequest(job_id=job, node=node, reason=reason)),
        "resume": ("ResumeNode", pb.ResumeNodeRequest(job_id=job, node=node)),
        "restart": ("RestartJob", pb.RestartJobRequest(job_id=job, reason=reason)),
        "abort": ("AbortJob", pb.AbortJobRequest(job_id=job, reason=reason)),
    }
    return requests[wanted.action]


async def _reload(caller: Caller, wanted: OrderRequest) -> dict[str, Any]:
    """As `ddpctl reload`. The service itself adds who it was. It refuses, and stops nothing, if a file is broken."""
    reason = f"{wanted.reason or 'no reason given'} (on the page)"
    request = pb.ReloadJobRequest(job_id=wanted.job, reason=reason, steps=TRIAL_STEPS, wait_s=_RELOAD_S)
    done = await caller.call("ReloadJob", request, longer_s=_RELOAD_S)
    return {"job": summary(done.job), "silent": [], "changed": list(done.changed), "kept": done.kept}


async def _checkpoint(caller: Caller, job: str, reason: str) -> dict[str, Any]:
    wanted = CheckpointWanted(reason, _CHECKPOINT_S)
    answers = await inquire(caller, job, wanted, wait_s=_CHECKPOINT_S + _MORE_S)
    late = f"not all ranks have taken the checkpoint within {_CHECKPOINT_S:g} s"
    silent = [
        f"node {node}: {told.reason if isinstance(told, CannotAnswer) else late}"
        for node, told in answers
        if not (isinstance(told, Checkpointed) and told.taken)
    ]
    took = [told.took_s for _, told in answers if isinstance(told, Checkpointed)]
    return {"job": None, "silent": silent, "took_s": max(took, default=0.0)}
