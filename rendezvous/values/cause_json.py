"""A `Cause` as JSON: in failure.json, which `ddpctl why` reads again, and in the events of a job. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rendezvous.values.cause_text import signal_name
from rendezvous.values.outcome_codes import code_of_cause
from rendezvous.values.types import Cause, Doubt, FailureClass

if TYPE_CHECKING:
    from collections.abc import Mapping


def cause_json(cause: Cause) -> dict[str, Any]:
    return {
        "code": code_of_cause(cause),
        "node": cause.node,
        "rank": cause.rank,
        "local_rank": cause.local_rank,
        "class": str(cause.failure),
        "reason": cause.reason,
        "doubt": None if cause.doubt is None else str(cause.doubt),
        "suspects": list(cause.suspects),
        "stopped": cause.stopped,
        "exit_code": cause.exit_code,
        "signal": cause.signal,
        "signal_name": signal_name(cause.signal) if cause.signal else None,
        "traceback": cause.traceback,
        "step": cause.step,
        "place": cause.place,
        "ran_s": cause.ran_s,
        "at": cause.at,
        "log": cause.log,
        "hint": cause.hint,
    }


def cause_from_json(found: Mapping[str, Any]) -> Cause:
    """Raises KeyError, TypeError or ValueError if it is something else. A file of release 0.1.0 lacks some keys."""
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
