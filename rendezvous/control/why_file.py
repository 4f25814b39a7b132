"""The story of a failure from `failure.json`, which an agent writes when a job fails. Pure.

A job on one machine has no service that keeps its state; this file is what is left of it.
"""

from __future__ import annotations

import json
from typing import Any

from rendezvous.control.why_text import Story
from rendezvous.values.types import Cause, Doubt, FailureClass

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
        first = None if found["first_cause"] is None else _cause(found["first_cause"])
        decided = [
            (int(each["generation"]), f"{each['kind']}: {each['reason']}") for each in found["decisions"]
        ]
        others = tuple(_cause(each) for each in found["causes"])
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


def _cause(found: dict[str, Any]) -> Cause:
    doubt = found["doubt"]
    return Cause(
        node=str(found["node"]),
        rank=int(found["rank"]),
        local_rank=int(found["local_rank"]),
        failure=FailureClass(found["class"]),
        reason=str(found["reason"]),
        exit_code=int(found["exit_code"]),
        signal=int(found["signal"]),
        traceback=str(found["traceback"]),
        step=found.get("step"),
        ran_s=float(found.get("ran_s") or 0.0),
        at=str(found.get("at") or ""),
        log=str(found.get("log") or ""),
        hint=str(found.get("hint") or ""),
        doubt=None if doubt is None else Doubt(doubt),
        suspects=tuple(int(rank) for rank in found["suspects"]),
        stopped=bool(found["stopped"]),
        place=str(found.get("place") or ""),
    )
