"""`ddpctl why`: the story of the last failure of a job, from its state, its journal and its agents."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from rendezvous.codec import decode
from rendezvous.control.ctl_text import cause_dict, printable_lines
from rendezvous.control.formats import as_dict, is_for_programs, show
from rendezvous.control.service import BadArgument, NoSuchJob, job_named
from rendezvous.control.why_text import NotAStory, Story, slowest, story_in, story_text, with_journal
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.values.error_codes import Code
from rendezvous.values.questions import RestartTimes
from rendezvous.values.types import Cause, Decision, DecisionKind

if TYPE_CHECKING:
    import argparse

    from rendezvous.control.service import Caller, Service

_NO_FAILURE = (DecisionKind.FINISH, DecisionKind.GROW)


async def run(service: Service, arguments: argparse.Namespace) -> int:
    if arguments.file:
        return _tell_file(arguments)
    name = await job_named(service, arguments.job, ended_too=True)
    job = (await service.call("GetJob", pb.GetJobRequest(job_id=name))).job
    story = await story_of(service, name, job, arguments.generation)
    if story is None:
        words = f"job {name}: {_without_failure(job.summary)}"
        show({} if is_for_programs(arguments.output) else printable_lines(words), arguments.output)
        return 0
    return _tell(story, story_as_dict(story, job), arguments.output)


def _without_failure(summary: Any) -> str:
    is_failed = summary.phase == pb.PHASE_ENDED and not summary.succeeded
    return f"no rank has failed; {summary.reason}" if is_failed else "nothing has failed"


def _tell(story: Story, as_json: Any, output: str) -> int:
    width = shutil.get_terminal_size((100, 24)).columns
    show(as_json if is_for_programs(output) else printable_lines(story_text(story, width)), output)
    return 0


def _tell_file(arguments: argparse.Namespace) -> int:
    """Of a job that has ended, from what its agent has written."""
    path = arguments.file
    if os.path.isdir(path):
        path = os.path.join(path, "failure.json")
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
        story = story_in(text)
    except OSError as error:
        raise BadArgument(f"--file: cannot read {path}: {error.strerror}") from None
    except NotAStory as error:
        raise BadArgument(f"--file: {path}: {error}") from None
    return _tell(story, json.loads(text), arguments.output)


async def story_of(service: Caller, name: str, job: Any, wanted: int) -> Story | None:
    """Of the last failure, or of that of a generation; None if nothing has failed. Raises `NoSuchJob`."""
    failures = [(each.generation, decode(Cause, each.cause)) for each in job.failures]
    decisions = [decode(Decision, each) for each in job.decisions]
    decisions = [each for each in decisions if each.kind not in _NO_FAILURE]
    generations = [generation for generation, _ in failures] + [each.generation for each in decisions]
    if wanted and wanted not in generations:
        known = ", ".join(map(str, sorted(set(generations)))) or "none"
        raise NoSuchJob(
            f"job {name}: no failure of generation {wanted} is known (known: {known})", code=Code.NOT_FOUND
        )
    if not generations:
        return None
    generation = wanted or max(generations)
    cause = next((cause for of, cause in reversed(failures) if of == generation), None)
    outcome = job.outcome if job.HasField("outcome") else None
    others = [decode(Cause, each) for each in outcome.causes] if outcome is not None else []
    is_last = generation == max(generations)
    return Story(
        name,
        generation,
        cause,
        tuple(f"{each.title}: {each.reason}" for each in decisions if each.generation == generation),
        tuple(each for each in others if is_last and cause is not None and each.rank != cause.rank),
        await _times(service, name, generation + 1),
        job.summary.restarts,
        tuple(text for node in job.nodes if cause and node.node == cause.node for text in node.health),
    )


async def _times(service: Caller, name: str, generation: int) -> RestartTimes | None:
    """Of the restart that has started this generation."""
    try:
        response = await service.call("GetRestarts", pb.GetRestartsRequest(job_id=name))
        known = [decode(RestartTimes, each) for each in response.times]
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:  # an older service
            raise
        known = []
    notes = [note async for note in service.notes(name, follow=False)]
    return with_journal(slowest(known, generation), notes, generation)


def story_as_dict(story: Story, job: Any) -> dict[str, Any]:
    causes = [each.cause for each in job.failures if each.generation == story.generation]
    decided = [as_dict(each) for each in job.decisions if each.generation == story.generation]
    times = None if story.times is None else asdict(story.times)
    return {
        "job_id": story.job,
        "generation": story.generation,
        "cause": cause_dict(causes[-1]) if causes else None,
        "others": [
            {"rank": each.rank, "node": each.node, "failure": str(each.failure), "reason": each.reason}
            for each in story.others
        ],
        "decisions": decided,
        "restart_times": times,
        "health": list(story.health),
    }
