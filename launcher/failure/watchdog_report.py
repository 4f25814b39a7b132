"""The report of torch's NCCL watchdog on stderr, and the cause of a failure that only it has noticed. Pure.

An error of NCCL is asynchronous: no call raises it. torch's watchdog thread finds it, sets the state that `get_error()`
returns, and writes the error to stderr. Later it aborts the process. The guard of the rank sees only the state:

    COMM_ERROR     the communicator reports an error. Only the text shows whether this rank or its peer is at fault
    TIMEOUT        a collective did not complete within the timeout of its group: another rank may be late
    REMOTE_ERROR   another rank has reported one of these (TORCH_NCCL_PROPAGATE_ERROR=1)

So the agent takes the text from the stderr of the rank. If it finds none, or does not know the error, the cause is
uncertain: an error of a communicator is more often the effect of a failure elsewhere.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.failure.crash_text import Raised, clean_lines, first_line
from launcher.failure.symptoms import class_of, hint_of, is_known, may_be_at_peer
from rendezvous.values.types import Cause, Doubt, FailureClass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from launcher.failure.verdict import RankEnd

_TYPE = "torch.distributed.DistBackendError"
_TIMED_OUT = "Watchdog caught collective operation timeout"  # in the words of torch and of the guard
_ASYNC = re.compile(r"raised the following async exception: (.*)")
_TIMEOUT = re.compile(rf"({_TIMED_OUT}: .*)")
_WARNING = re.compile(r"NCCL WARN (.+)")
_FATAL = re.compile(
    r"\[F\S* .*?Terminating the process after attempting to dump debug info, due to (.+?)\.?$"
)
_WATCHDOG = re.compile(r"(?:\[PG [^\]]*\] ?)?Process group watchdog thread terminated with exception: ")
_IN_SOURCE = re.compile(r"NCCL error in: \S+:\d+, ")
_LAST_ERROR = "Last error:"
_MAX_LINES, _WARNINGS = 8, 3


def cause_of_asynchronous(end: RankEnd, reported: str) -> Cause:
    """The cause of an error that a guard has reported. `end`: the facts about its rank, which still runs."""
    lines = clean_lines(end.stderr_tail)
    raised = Raised(_TYPE, _message(lines, reported) or reported)
    failure, doubt = class_of(raised), None
    if not is_known(raised):
        failure, doubt = FailureClass.CONSEQUENCE, Doubt.CULPRIT
    elif may_be_at_peer(raised):
        doubt = Doubt.CULPRIT
    return Cause(
        node=end.node,
        rank=end.rank,
        local_rank=end.local_rank,
        failure=failure,
        reason=headline(raised.message),
        exit_code=1,
        traceback=raised.message,
        step=end.step,
        ran_s=end.ran_s,
        at=end.at,
        log=end.log,
        hint=hint_of(raised),
        place=end.place,
        doubt=doubt,
        suspects=(end.rank,) if doubt is not None else (),
    )


def _message(lines: list[str], reported: str) -> str:
    """The error as the watchdog has printed it first; "" if it has not."""
    pattern = _TIMEOUT if _TIMED_OUT in reported else _ASYNC
    for at, line in enumerate(lines):
        if found := pattern.search(line):
            message = "\n".join([found[1], *_continued(lines[at + 1 :])])
            return message if _LAST_ERROR in message else "\n".join([message, *_warnings(lines)])
    return ""


def _continued(lines: list[str]) -> Iterator[str]:
    """The other lines of a message, up to the next line of a logger."""
    for line in lines[:_MAX_LINES]:
        if line.startswith(("[", "Exception raised from", "frame #")) or " NCCL " in line or not line.strip():
            return
        yield line


def _warnings(lines: list[str]) -> list[str]:
    """The last warnings of NCCL, where its error does not contain them."""
    found = [match[1] for line in lines if (match := _WARNING.search(line))]
    return [_LAST_ERROR, *found[-_WARNINGS:]] if found else []


def own_error(lines: list[str]) -> Raised | None:
    """The error that the watchdog has printed, if it is not that of a peer."""
    raised = Raised(_TYPE, _message(lines, ""))
    return raised if is_known(raised) and class_of(raised) is not FailureClass.CONSEQUENCE else None


def headline(message: str) -> str:
    """One line: the error, and what NCCL reported last."""
    _, is_there, last = message.partition(_LAST_ERROR)
    first = _IN_SOURCE.sub("NCCL error: ", first_line(message))
    return f"{first}; last error: {first_line(last)}" if is_there and first_line(last) else first


def shortened(raised: Raised) -> Raised:
    """Without the words of the watchdog around the error that it has found."""
    return replace(raised, message=_WATCHDOG.sub("", raised.message, count=1))


def why_terminated(lines: list[str]) -> str:
    """Why torch's monitor thread has aborted the process: it logs this as fatal. "" if it has not."""
    found = [match[1] for line in lines if (match := _FATAL.search(line))]
    return found[-1] if found else ""
