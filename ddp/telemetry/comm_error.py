"""`ddp.CommError`: a collective failed, told with what it was doing and who is gone.

What a library raises is an address or a rank of a group, in words of its own. The error that replaces it is chained
to it, says which peer that is, on which host, which bucket with which parameters was under way, and, where the
launcher broke communication off, why. It is torch's own DistBackendError wherever torch would raise that.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist

from ddp.telemetry import guard
from ddp.telemetry.comm_words import Doing, Explanation, explanation, first_line, is_of_communication

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CommError", "Doing", "explain", "explained"]


class CommError(RuntimeError):
    """A collective failed because of somebody else, or was broken off. `__cause__` is what the library said."""

    def __init__(self, explained: Explanation, doing: Doing, said: str) -> None:
        super().__init__(f"{explained.text}\n  what was said: {said}")
        self.explanation = explained
        self.cause = explained.cause
        self.peer_rank = None if explained.peer is None else explained.peer.rank
        self.peer_host = "" if explained.peer is None else explained.peer.host
        self.collective = doing.collective
        self.group = doing.group
        self.sequence = doing.sequence
        self.bucket = doing.bucket
        self.parameters = doing.parameters

    def __reduce__(self) -> tuple[type[RuntimeError], tuple[str]]:
        return RuntimeError, (str(self),)  # to another process, which has none of these peers


class BackendCommError(CommError, dist.DistBackendError):
    """The same, for those who catch what torch raises."""


for _each in (CommError, BackendCommError):
    _each.__module__ = "ddp"
BackendCommError.__name__ = BackendCommError.__qualname__ = "CommError"


def explain(error: RuntimeError, doing: Doing) -> None:
    """Raises what says more, where communication has failed; else the caller raises what there is."""
    if isinstance(error, CommError):
        if error.bucket is None and doing.bucket is not None:
            _raise_with_bucket(error, doing)
    elif is_of_communication(error):
        told = explanation(error, doing, guard.start())
        kind: type[CommError] = BackendCommError if isinstance(error, dist.DistError) else CommError
        raise kind(told, doing, first_line(str(error))) from error


def _raise_with_bucket(error: CommError, doing: Doing) -> None:
    """Whoever waited knew the collective, and we know what for."""
    whole = Doing(
        doing.collective,
        doing.group or error.group,
        error.sequence,
        doing.bucket,
        doing.n_buckets,
        doing.parameters,
    )
    before = error.explanation
    lacking = str(Doing(error.collective, error.group, error.sequence))
    told = Explanation(before.text.replace(lacking, str(whole), 1), before.cause, before.peer)
    raise type(error)(told, whole, first_line(str(error.__cause__))) from error.__cause__


@contextmanager
def explained(collective: str, group: str = "") -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        explain(error, Doing(collective, group))
        raise
