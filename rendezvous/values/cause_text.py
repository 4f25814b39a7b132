"""Causes and numbers as text for users, with their error codes, and as JSON. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from rendezvous.values.contracts import TRY_AGAIN
from rendezvous.values.error_codes import Code
from rendezvous.values.events import RefusalKind, Refused
from rendezvous.values.rank_view import RankPhase
from rendezvous.values.types import Cause, DecisionKind, Doubt, FailureClass, Outcome

# --- as text ---------------------------------------------------------------------------------------
#
# Causes and numbers as text for users: which ranks a cause names, and how certain that is. Pure.

_NAMED = 8  # ranks, in one line
# Errors of a rank that has waited for the whole timeout of its group; lower case. They need no other sign of a library.
OUT_OF_TIME_IN_A_LIBRARY = (
    "wait timeout after",
    "failed to pass monitoredbarrier",
    "watchdog caught collective operation timeout",
    "timed out in blocking wait",
    "has not joined",
)
OUT_OF_TIME = (*OUT_OF_TIME_IN_A_LIBRARY, "timed out waiting")
_PLACES = {
    RankPhase.STARTING: "in its startup",
    RankPhase.DATA: "in its data loader",
    RankPhase.FORWARD: "in its forward pass",
    RankPhase.BACKWARD: "in its backward pass",
    RankPhase.COMMUNICATE: "in a collective",
    RankPhase.OPTIMIZER: "in its optimizer",
    RankPhase.CHECKPOINT: "in its checkpoint",
    RankPhase.EVALUATION: "in its evaluation",
    RankPhase.IDLE: "in code of the script between two phases of a step",
    RankPhase.EXITING: "in its exit after the end of the script",
}


def described(cause: Cause) -> str:
    """The reason of a failure, with a prefix if the cause is uncertain."""
    match cause.doubt:
        case None | Doubt.SHARED_ERROR:
            return cause.reason
        case Doubt.NO_RANK:
            return f"no rank is the cause: {cause.reason}"
        case Doubt.CULPRIT | Doubt.MAY_WAIT:
            who = f"{ranks(cause.suspects)}: " if cause.suspects else ""
            return f"cause uncertain: {who}{cause.reason}"


def ranks(numbers: Sequence[int]) -> str:
    """Ranks as text: "rank 1", "ranks 0, 2 and 3", "ranks 0-1022"."""
    ordered = sorted(numbers)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    words: list[str] = []
    for span in spans:
        close = len(span) == 1 or span[1] == span[0] + 1
        words += [str(rank) for rank in span] if close else [f"{span[0]}-{span[1]}"]
    if len(words) > _NAMED:
        return f"{len(ordered)} ranks ({', '.join(words[:_NAMED])}, ...)"
    if len(words) == 1:
        return f"ranks {words[0]}"
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"


def place_of(phase: RankPhase, section: str) -> str:
    """Where a rank is, by the phase on its page, and by the section that its script has named."""
    return f'in the section "{section}"' if phase is RankPhase.SECTION else _PLACES[phase]


# --- a number with its noun: "1 rank", "2 ranks" ----------------------------------------------------


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def signal_name(number: int) -> str:
    if number in signal.valid_signals():
        known = signal.Signals(number) if number in signal.Signals.__members__.values() else None
        return known.name if known is not None else f"SIGRTMIN+{number - signal.SIGRTMIN}"
    return f"signal {number}"


# --- its error code --------------------------------------------------------------------------------
#
# The error code of a failure, a refusal or the end of a job. Pure.

_OF_CLASS = {
    FailureClass.OUT_OF_MEMORY: Code.RANK_OUT_OF_MEMORY,
    FailureClass.HARDWARE: Code.RANK_HARDWARE,
    FailureClass.NETWORK: Code.RANK_NETWORK,
    FailureClass.USER_EXCEPTION: Code.RANK_EXCEPTION,
    FailureClass.SIGNAL: Code.RANK_SIGNAL,
    FailureClass.EXIT_CODE: Code.RANK_EXIT_CODE,
    FailureClass.HANG: Code.RANK_HANG,
    FailureClass.NODE_LOST: Code.NODE_LOST,
    FailureClass.CONSEQUENCE: Code.ONLY_CONSEQUENCES,
}
_OF_REFUSAL = {RefusalKind.JOB_OVER: Code.JOB_HAS_ENDED, RefusalKind.DISAGREEMENT: Code.NODES_DISAGREE}


def code_of_cause(cause: Cause) -> Code:
    return _OF_CLASS[cause.failure]


def code_of_outcome(outcome: Outcome) -> Code | None:
    """None for success."""
    if outcome.succeeded:
        return None
    if was_requested(outcome):
        return Code.ENDED_ON_REQUEST
    cause = first_cause(outcome)
    if cause is not None:
        return code_of_cause(cause)
    if consequences(outcome):
        return Code.ONLY_CONSEQUENCES
    return Code.COULD_NOT_START_TOGETHER if outcome.exit_code == TRY_AGAIN else Code.JOB_FAILED


def code_of_refusal(refused: Refused) -> Code:
    if refused.kind is not None:
        return _OF_REFUSAL[refused.kind]
    return Code.SERVICE_UNREACHABLE if refused.exit_code == TRY_AGAIN else Code.REJECTED


def first_cause(outcome: Outcome) -> Cause | None:
    """The first cause that is not a consequence of another failure, whatever the order of reports."""
    reported = (*([outcome.first_cause] if outcome.first_cause else ()), *outcome.causes)
    return next((cause for cause in reported if cause.failure is not FailureClass.CONSEQUENCE), None)


def was_requested(outcome: Outcome) -> bool:
    """Whether an operator or a signal ended the job. No rank failed; ranks were only stopped."""
    if any(decision.is_interrupt for decision in outcome.decisions):
        return True  # whatever ranks report after Ctrl-C
    if first_cause(outcome) is not None:
        return False
    if causes := consequences(outcome):
        return all(cause.stopped for cause in causes)
    return not any(d.kind is DecisionKind.FAIL and d.cause is not None for d in outcome.decisions)


def consequences(outcome: Outcome) -> tuple[Cause, ...]:
    return outcome.causes or ((outcome.first_cause,) if outcome.first_cause else ())


# --- as JSON ---------------------------------------------------------------------------------------
#
# A `Cause` as JSON: in failure.json, which `ddpctl why` reads again, and in the events of a job. Pure.


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
