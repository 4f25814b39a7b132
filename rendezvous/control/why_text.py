"""The story of a failure as text: what failed, the evidence, what was decided, how long each part took. Pure."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rendezvous.values.cause_text import cause_from_json, code_of_cause, described
from rendezvous.values.cause_text import ranks as ranks_text
from rendezvous.values.durations import short_duration
from rendezvous.values.questions import RestartTimes
from rendezvous.values.types import Cause, FailureClass

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


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
