"""A job as JSON or YAML: the message of the service, with the error codes of its failures."""

from __future__ import annotations

from typing import Any

from rendezvous.codec import decode
from rendezvous.control.formats import as_dict
from rendezvous.values.outcome_codes import code_of_cause, code_of_outcome
from rendezvous.values.types import Cause, Outcome


def job_dict(job: Any) -> dict[str, Any]:
    found = as_dict(job)
    for shown, failure in zip(found.get("failures", ()), job.failures, strict=True):
        shown["cause"] = cause_dict(failure.cause)
    if job.HasField("outcome"):
        found["outcome"]["code"] = code_of_outcome(decode(Outcome, job.outcome))
    return found


def cause_dict(cause: Any) -> dict[str, Any]:
    return {**as_dict(cause), "code": code_of_cause(decode(Cause, cause))}
