"""Causes and numbers as text for users: which ranks a cause names, and how certain that is. Pure."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from rendezvous.values.rank_view import RankPhase
from rendezvous.values.types import Doubt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rendezvous.values.types import Cause


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
