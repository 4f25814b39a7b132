"""The error code of a failure, a refusal or the end of a job. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rendezvous.values.contracts import TRY_AGAIN
from rendezvous.values.error_codes import Code
from rendezvous.values.events import RefusalKind
from rendezvous.values.types import DecisionKind, FailureClass

if TYPE_CHECKING:
    from rendezvous.values.events import Refused
    from rendezvous.values.types import Cause, Outcome

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
