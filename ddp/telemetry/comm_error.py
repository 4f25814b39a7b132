"""`ddp.CommError`: a failed collective, with its bucket and parameters, and the peer that failed.

A communication library reports an address, or a rank within a group, in its own format. `CommError` replaces that error
and is chained to it. It names the peer and its host, the bucket and its parameters, and, if the launcher aborted
communication, the reason. It is also a DistBackendError wherever torch would raise one.
"""

from __future__ import annotations

from contextlib import ContextDecorator

import torch.distributed as dist

from ddp.telemetry import guard
from ddp.telemetry.coded import CodedError
from ddp.telemetry.comm_words import (
    Explanation,
    Operation,
    explain_failure,
    first_line,
    is_communication_error,
)

__all__ = ["CommError", "Operation", "explain", "explaining"]


class CommError(CodedError, RuntimeError):
    """A collective failed because of another rank, or was aborted. `__cause__` is the error of the library."""

    code = "DDP-7001"

    def __init__(self, explanation: Explanation, doing: Operation, original: str) -> None:
        super().__init__(f"{explanation.text}\n  original error: {original}")
        self.explanation = explanation
        self.cause = explanation.cause
        self.peer_rank = None if explanation.peer is None else explanation.peer.rank
        self.peer_host = "" if explanation.peer is None else explanation.peer.host
        self.collective = doing.collective
        self.group = doing.group
        self.sequence = doing.sequence
        self.bucket = doing.bucket
        self.parameters = doing.parameters

    def __reduce__(self) -> tuple[type[RuntimeError], tuple[str]]:
        return RuntimeError, (str(self),)  # another process has none of these peers


class BackendCommError(CommError, dist.DistBackendError):
    """The same, for scripts that catch torch's DistBackendError."""


for _each in (CommError, BackendCommError):
    _each.__module__ = "ddp"
BackendCommError.__name__ = BackendCommError.__qualname__ = "CommError"


def explain(error: RuntimeError, doing: Operation) -> None:
    """Raise a CommError if `error` is a failure of communication; otherwise return, so that the caller re-raises."""
    if isinstance(error, CommError):
        if error.bucket is None and doing.bucket is not None:
            _raise_with_bucket(error, doing)
    elif is_communication_error(error):
        explanation = explain_failure(error, doing, guard.start())
        kind: type[CommError] = BackendCommError if isinstance(error, dist.DistError) else CommError
        raise kind(explanation, doing, first_line(str(error))) from error


def _raise_with_bucket(error: CommError, doing: Operation) -> None:
    """Raise the same error with the bucket added. The code that waited has the collective, but not the bucket."""
    whole = Operation(
        doing.collective,
        doing.group or error.group,
        error.sequence,
        doing.bucket,
        doing.n_buckets,
        doing.parameters,
    )
    before = error.explanation
    without_bucket = str(Operation(error.collective, error.group, error.sequence))
    explanation = Explanation(before.text.replace(without_bucket, str(whole), 1), before.cause, before.peer)
    raise type(error)(explanation, whole, first_line(str(error.__cause__))) from error.__cause__


class explaining(ContextDecorator):
    """Turn failures of communication inside the block into CommError."""

    def __init__(self, collective: str) -> None:
        self._collective = collective

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, RuntimeError):
            explain(error, Operation(self._collective))
