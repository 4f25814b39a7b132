"""`ddpctl why`: the story of the last failure of a job, from its state, its journal and its agents."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import grpc
import grpc.aio

from rendezvous.codec import decode
from rendezvous.control.ctl_text import cause_dict, printable_lines
from rendezvous.control.formats import as_dict, is_for_programs, show
from rendezvous.control.service import BadArgument, Caller, NoSuchJob, Service, job_named
from rendezvous.pb import rendezvous_pb2 as pb
from rendezvous.values.cause_text import cause_from_json, code_of_cause, described
from rendezvous.values.cause_text import ranks as ranks_text
from rendezvous.values.durations import short_duration
from rendezvous.values.error_codes import Code
from rendezvous.values.questions import RestartTimes
from rendezvous.values.types import Cause, Decision, DecisionKind, FailureClass

# The story of a failure as text: what failed, the evidence, what was decided, how long each part took. Pure.

PARTS = ("detect", "stop", "meet", "fork", "init", "first_step", "redo")
_LABEL = 12
_UNIT = re.compile(r"(?<=\d) (?=(?:[mu]?s|min)\b)")
_SHOWN_LINES = 60  # of a traceback


@dataclass(frozen=True, slots=True)
class Story:
    job: str
    generation: int  # that failed
    cause: Cause | None  # None: only a decision is known, such as a restart that an operator ordered
    decided: tuple[str, ...] = ()  # about this generation
    others: tuple[Cause, ...] = ()  # that failed as well; known once the job has ended
    times: RestartTimes | None = None
    restarts: int = 0
    health: tuple[str, ...] = ()


def slowest(times: Iterable[RestartTimes], generation: int) -> RestartTimes | None:
    """The times of the restart as a whole: each part takes as long as on the slowest node."""
    mine = [each for each in times if each.generation == generation]
    if not mine:
        return None
    found = RestartTimes(generation)
    for part in PARTS:
        known = [value for each in mine if (value := getattr(each, f"{part}_s")) is not None]
        if known and (part in ("detect", "redo", "first_step") or len(known) == len(mine)):
            found = replace(found, **{f"{part}_s": max(known)})
    return found


def with_journal(times: RestartTimes | None, notes: Sequence[Any], generation: int) -> RestartTimes | None:
    """Fill in what the agents have not said from the journal: the stop, and the time until the next world."""

    def first(kind: str, of: int) -> float | None:
        return next((each.at for each in notes if each.kind == kind and each.generation == of), None)

    stopping, stopped = first("stopping", generation - 1), first("stopped", generation - 1)
    stopped = stopped or first("stopped", generation)  # if the next world was sealed at the same time
    running = first("running", generation)
    found = times or RestartTimes(generation)
    if found.stop_s is None and stopping is not None and stopped is not None:
        found = replace(found, stop_s=max(0.0, stopped - stopping))
    if found.meet_s is None and stopped is not None and running is not None:
        found = replace(found, meet_s=max(0.0, running - stopped))
    return found if any(getattr(found, f"{part}_s") is not None for part in PARTS) else None


def story_text(story: Story, width: int = 100) -> str:
    rows = rows_of(story)
    lines = []
    for label, text in rows:
        whole = _UNIT.sub("\u00a0", text)  # a number and its unit stay in one line
        wrapped = textwrap.wrap(whole, max(40, width - _LABEL)) or [""]
        lines += [
            f"{label if not n else '':{_LABEL}}{line}".replace("\u00a0", " ")
            for n, line in enumerate(wrapped)
        ]
    cause = story.cause
    if cause is not None and cause.traceback:
        lines += ["", *["stacks:"] * (cause.failure is FailureClass.HANG), *_shortened(cause.traceback)]
    return "\n".join(lines)


def rows_of(story: Story) -> list[tuple[str, str]]:
    """Labels and texts."""
    cause = story.cause
    rows = [("job", f"{story.job}, generation {story.generation}")]
    if cause is not None:
        rows += _verdict(cause)
        rows += [("others", _others(story.others))] if story.others else []
    rows += [("health", text) for text in story.health]
    rows += [("decided", words) for words in story.decided]
    rows.append(("took", times_text(story.times)))
    return rows


def _verdict(cause: Cause) -> list[tuple[str, str]]:
    rows = [
        ("what failed", f"rank {cause.rank} on {cause.node}"),
        ("verdict", f"{cause.failure}: {described(cause)}"),
        ("code", f"{code_of_cause(cause)}; `ddpctl explain {code_of_cause(cause)}` says more"),
        ("certainty", "certain" if cause.doubt is None else "uncertain; it does not count against the node"),
        ("when", f"{cause.at}, {cause.ran_s:.1f} s after its start" if cause.at else ""),
        ("where", cause.place),
        ("step", "" if cause.step is None else str(cause.step)),
        ("exit code", str(cause.exit_code) if cause.exit_code else ""),
        ("hint", cause.hint),
        ("log", f"{cause.log} on {cause.node}" if cause.log else ""),
    ]
    return [(label, text) for label, text in rows if text]


def _others(others: Sequence[Cause]) -> str:
    reasons: dict[str, list[int]] = {}
    for cause in others:
        words = "stopped by the launcher" if cause.stopped else described(cause)
        reasons.setdefault(words, []).append(cause.rank)
    return "; ".join(f"{ranks_text(numbers)}: {words}" for words, numbers in reasons.items())


def times_text(times: RestartTimes | None) -> str:
    if times is None:
        return "not known: the ranks were not started again, or the service was restarted since"
    known = {part: getattr(times, f"{part}_s") for part in PARTS}
    words = [
        f"{part.replace('_', ' ')} {'unknown' if value is None else short_duration(value)}"
        for part, value in known.items()
    ]
    whole = [value for part, value in known.items() if part != "redo"]
    if None not in whole[1:]:
        sum_s = sum(value or 0.0 for value in known.values())
        words.append(f"together {short_duration(sum_s)}")
    return ", ".join(words)


def _shortened(text: str) -> list[str]:
    lines = text.rstrip().splitlines()
    if len(lines) > _SHOWN_LINES:
        half = _SHOWN_LINES // 2
        cut = f"... ({len(lines) - _SHOWN_LINES} lines: -o json has all) ..."
        lines = [*lines[:half], cut, *lines[-half:]]
    return [f"  {line}" for line in lines]


# --- the story of a failure from `failure.json`, which an agent writes when a job fails. Pure -------
#
# A job on one machine has no service that keeps its state; this file is what is left of it.

_VERSION = 1


class NotAStory(ValueError):
    """The file has something else. The message is for the user."""


def story_in(text: str) -> Story:
    try:
        found = json.loads(text)
        if found["version"] != _VERSION:
            raise NotAStory(
                f"it has version {found['version']} of the format; this ddpctl reads version {_VERSION}"
            )
        first = None if found["first_cause"] is None else cause_from_json(found["first_cause"])
        decided = [
            (int(each["generation"]), f"{each['kind']}: {each['reason']}") for each in found["decisions"]
        ]
        others = tuple(cause_from_json(each) for each in found["causes"])
        restarts, job = int(found["restarts"]), str(found["log_dir"])
    except NotAStory:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotAStory(f"it is not a failure.json of ddp-launch ({type(error).__name__}: {error})") from None
    generation = max((generation for generation, _ in decided), default=1)
    return Story(
        job=job.rstrip("/").rpartition("/")[2] or "unknown",
        generation=generation,
        cause=first,
        decided=tuple(words for of, words in decided if of == generation),
        others=tuple(each for each in others if first is None or each.rank != first.rank),
        restarts=restarts,
    )


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
