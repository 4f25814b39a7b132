"""Shorten the outcome of a failed job so that it fits into a message to thousands of agents. Pure.

Each step drops the least useful text, until the message fits. No step drops the first cause.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rendezvous.values.events import Ended

if TYPE_CHECKING:
    from collections.abc import Callable

    from rendezvous.values.events import ToAgent
    from rendezvous.values.types import Cause, Decision, Outcome

ENDED_BYTES = 128 * 1024


def fitted(message: ToAgent, size_of: Callable[[ToAgent], int], limit: int = ENDED_BYTES) -> ToAgent:
    if not isinstance(message, Ended):
        return message
    for shorten in (_same, _brief_decisions, _brief_causes, _few_causes, _first_cause_only):
        message = Ended(shorten(message.outcome))
        if size_of(message) <= limit:
            break
    return message


def _same(outcome: Outcome) -> Outcome:
    return outcome


def _brief_decisions(outcome: Outcome) -> Outcome:
    return replace(outcome, decisions=tuple(replace(d, cause=_brief(d.cause)) for d in outcome.decisions))


def _brief_causes(outcome: Outcome) -> Outcome:
    first = outcome.first_cause
    return replace(outcome, causes=tuple(c if c == first else _brief_cause(c) for c in outcome.causes))


def _few_causes(outcome: Outcome) -> Outcome:
    return replace(outcome, causes=outcome.causes[:32], decisions=_without_causes(outcome.decisions[-20:]))


def _first_cause_only(outcome: Outcome) -> Outcome:
    return replace(outcome, causes=outcome.causes[:1], decisions=())


def _without_causes(decisions: tuple[Decision, ...]) -> tuple[Decision, ...]:
    return tuple(replace(d, cause=None) for d in decisions)


def _brief(cause: Cause | None) -> Cause | None:
    return None if cause is None else _brief_cause(cause)


def _brief_cause(cause: Cause) -> Cause:
    reason, log = cause.reason[:300], cause.log[:300]
    return replace(cause, traceback="", reason=reason, hint="", log=log, suspects=())
