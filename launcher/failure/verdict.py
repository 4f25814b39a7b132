"""Determines the `Cause` of a rank's end from the data that its agent has.

The first of these that applies is used:

1. a stop by the launcher, unless the rank had begun to exit before: what a rank does, raises or returns after that says
   nothing about the failure;
2. an exception that torch's `@record` has written;
3. the signal that ended it, with what C++ or the interpreter printed last;
4. its exit code, with the traceback that ended it.

A traceback on stderr is not an end: scripts print exceptions that they handle. The status page shows whether one that
nothing caught has ended the interpreter. Otherwise a traceback counts only if nothing follows it.

The first exception of a chain is the cause. An error caused by a lost peer is a consequence, even if the script wraps
it. If a peer is lost while the script cleans up after a ValueError, the ValueError is the cause.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import field, replace

from launcher.failure.crash_text import (
    MAX_LINE_CHARS,
    Crash,
    Raised,
    bounded,
    clean_lines,
    first_line,
    last_lines,
    last_native,
    last_raised,
    said_in,
)
from launcher.failure.symptoms import (
    class_of,
    hint_of,
    is_known,
    is_lost_peer,
    is_mismatch_error,
    is_of_library,
    may_be_at_peer,
)
from rendezvous.values.cause_text import signal_name
from rendezvous.values.late_dataclass import dataclass
from rendezvous.values.types import Cause, Doubt, FailureClass

_LEFT_THREAD = "terminate called without an active exception"
_ENDS_STDERR = 30  # lines after a traceback, in an abort during the exit
_SIGNAL_WORDS: dict[int, str] = {
    signal.SIGSEGV: "segmentation fault",
    signal.SIGBUS: "bus error",
    signal.SIGFPE: "arithmetic error",
    signal.SIGILL: "illegal instruction",
    signal.SIGABRT: "aborted",
}
_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGBUS: "often a full /dev/shm (docker: --shm-size=8g), or a memory-mapped file was truncated",
    signal.SIGSEGV: "a crash in native code: run with python -X faulthandler to see where",
    signal.SIGILL: "a library was built for a different CPU type than this node has",
    signal.SIGXCPU: "the CPU time limit of this node (ulimit -t) was reached",
}
_TOO_LITTLE_MEMORY = (
    "this node (or its container) has too little memory: use fewer ranks, fewer workers or a smaller batch"
)
_PAUSED = "ended after the launcher had asked it to pause"
_STUCK_WATCHDOG = (
    "a call of NCCL or CUDA does not return, or a thread holds the GIL: see the stacks of this rank"
)
_MISMATCH = "the collectives of the ranks do not match"
_GLIBC = ("double free", "free(): ", "malloc(): ", "corrupted ", "*** stack smashing", "Assertion `")


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """The exception that ended a rank, as torch's `@record` has written it."""

    type: str
    message: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class RankEnd:
    """What the agent knows about a rank that has ended."""

    node: str
    rank: int
    local_rank: int
    exit_code: int | None  # None if a signal ended the rank
    signal: int = 0
    stopped_by_us: int = 0  # the last signal that the launcher sent before the rank ended
    is_paused: bool = False  # the launcher had asked it to pause
    was_exiting: bool = False  # its interpreter had begun to exit before the first of these signals
    uncaught: bool | None = None  # an exception that nothing caught ended the script; None: unknown
    stderr_tail: str = ""
    error_record: ErrorRecord | None = None
    oom_killed: bool | None = None  # None: the kernel reports nothing
    ran_s: float = 0.0  # until it began to exit
    ran_to_end_s: float = 0.0
    at: str = ""
    log: str = ""
    step: int | None = None  # from its status page; `place`: the position of its script
    place: str = ""
    hiding: Mapping[str, str] = field(
        default_factory=dict
    )  # modules that files of the user hide, with the files


@dataclass(frozen=True, slots=True)
class _Account:
    failure: FailureClass
    reason: str
    traceback: str = ""
    hint: str = ""
    exit_code: int | None = None  # None: as the process ended
    signal: int = 0
    doubt: Doubt | None = None
    stopped: bool = False  # by the launcher
    lost_peer: bool = False

    def suspects(self, rank: int) -> tuple[int, ...]:
        return (rank,) if self.doubt is Doubt.CULPRIT else ()


def shell_code(end: RankEnd) -> int:
    """The exit code that a shell reports."""
    return 128 + end.signal if end.exit_code is None else end.exit_code


def cause_of(end: RankEnd) -> Cause:
    account = _stopped(end)
    if account is None and end.stopped_by_us and end.exit_code is None:
        end = replace(end, exit_code=1, signal=0)  # as if it had completed its exit after an exception
    account = account or _recorded(end) or _signalled(end) or _exited(end)
    return Cause(
        node=end.node,
        rank=end.rank,
        local_rank=end.local_rank,
        failure=account.failure,
        reason=account.reason[:MAX_LINE_CHARS],
        exit_code=shell_code(end) if account.exit_code is None else account.exit_code,
        signal=account.signal,
        traceback=account.traceback,
        step=end.step,
        # The first thing that shows of a rank that is killed is its end; of one that has lost it, its exception.
        ran_s=max(end.ran_s, end.ran_to_end_s) if account.lost_peer else end.ran_s,
        at=end.at,
        log=end.log,
        hint=account.hint,
        place=end.place,
        doubt=account.doubt,
        suspects=account.suspects(end.rank),
        stopped=account.stopped,
        lost_peer=account.lost_peer and account.failure is not FailureClass.CONSEQUENCE,
    )


# --- stopped -----------------------------------------------------------------------------------------


def _stopped(end: RankEnd) -> _Account | None:
    """A stop by the launcher.

    A rank that had begun to exit ends by itself, also if the signal ends it while it cleans up after an exception. A
    rank whose watchdog has printed an error of its own is reported with that error. torch's monitor prints why it
    aborts the process before it does so. The peers of the rank notice the end of their connections first, so the
    launcher may stop the rank before it has seen its end.
    """
    if not (end.stopped_by_us or end.is_paused) or _ends_by_itself(end):
        return None
    lines = clean_lines(end.stderr_tail)
    if (raised := own_error(lines)) is not None:  # reported by torch before or during the stop
        text, doubt = raised.message, Doubt.CULPRIT if may_be_at_peer(raised) else None
        return _Account(
            class_of(raised), headline(text), text, hint_of(raised), signal=end.signal, doubt=doubt
        )
    if (terminated := _terminated_by_torch(end, lines)) and terminated.failure is FailureClass.HANG:
        return terminated
    how = f"stopped by the launcher ({signal_name(end.stopped_by_us)})" if end.stopped_by_us else _PAUSED
    return _Account(FailureClass.CONSEQUENCE, how, signal=end.signal, stopped=True)


def _ends_by_itself(end: RankEnd) -> bool:
    return end.was_exiting and (bool(end.uncaught) or end.exit_code is not None)


# --- a recorded exception -------------------------------------------------------------------------


def _recorded(end: RankEnd) -> _Account | None:
    record = end.error_record
    if record is None or (end.exit_code is None and end.uncaught is False):
        return None  # the script has handled what it recorded
    lines = clean_lines(record.traceback)
    printed = last_raised(lines)
    raised = Raised(record.type, record.message)
    if printed is None:
        crash = Crash((raised,), bounded(lines))
    else:
        last = printed.chain[-1]
        whole = Raised(record.type, record.message or last.message, last.files, last.parts)
        crash = Crash((*printed.chain[:-1], whole), printed.text)
    account = _of_chain(crash, end.hiding)
    return (
        account if end.exit_code else replace(account, exit_code=1)
    )  # it crashed, or was stopped, at its exit


def _of_chain(crash: Crash, hiding: Mapping[str, str]) -> _Account:
    classes = [class_of(raised) for raised in crash.chain]
    origin, failure = crash.chain[-1], classes[-1]
    if classes[0] is FailureClass.CONSEQUENCE:
        failure = FailureClass.CONSEQUENCE
    elif failure is FailureClass.CONSEQUENCE:
        at = max(i for i, c in enumerate(classes) if c is not FailureClass.CONSEQUENCE)
        origin, failure = crash.chain[at], classes[at]
    chain = (origin, *reversed(crash.chain))
    hint = next((hint for hint in (hint_of(each, hiding) for each in chain) if hint), "")
    mismatch = is_mismatch_error(origin)
    text = (
        f"{origin.short_type}: {headline(origin.message)}"
        if "NCCL error" in origin.message
        else origin.headline
    )
    reason = f"{_MISMATCH}: {text}" if mismatch else text
    doubt = Doubt.SHARED_ERROR if mismatch else Doubt.CULPRIT if may_be_at_peer(origin) else None
    return _Account(failure, reason, crash.text, hint, doubt=doubt, lost_peer=is_lost_peer(crash.chain[0]))


# --- ended by a signal -------------------------------------------------------------------------------


def _signalled(end: RankEnd) -> _Account | None:
    if end.exit_code is not None or not end.signal:
        return None
    if end.signal == signal.SIGKILL:
        return _killed(end)
    lines = clean_lines(end.stderr_tail)
    if during_exit := _aborted_during_exit(end, lines):
        return during_exit
    name = signal_name(end.signal)
    crash = last_native(lines) if end.signal in _SIGNAL_WORDS else None
    hint = _SIGNAL_HINTS.get(end.signal, "")
    if crash is None and (terminated := _terminated_by_torch(end, lines)):
        return terminated
    if crash is None:
        words = _SIGNAL_WORDS.get(end.signal, "")
        printed = _abort_line(lines) if end.signal == signal.SIGABRT else ""
        reason = f"killed by {name}" + (f" ({words})" if words else "") + (f": {printed}" if printed else "")
        return _Account(FailureClass.SIGNAL, reason, hint=hint, signal=end.signal)
    raised = shortened(crash.chain[0])
    if is_mismatch_error(raised):
        reason = f"{_MISMATCH}: {_native_headline(raised)}"
        return _Account(
            class_of(raised), reason, crash.text, hint_of(raised), signal=end.signal, doubt=Doubt.SHARED_ERROR
        )
    found = class_of(raised)
    failure = FailureClass.SIGNAL if found is FailureClass.USER_EXCEPTION and not is_known(raised) else found
    doubt = Doubt.CULPRIT if may_be_at_peer(raised) else None
    if raised.type == "Fatal Python error":
        hint = "" if end.signal == signal.SIGSEGV else hint
        reason = f"killed by {name}: {raised.headline}"
    else:
        reason = f"killed by {name}: {_native_headline(raised)}"
    return _Account(failure, reason, crash.text, hint_of(raised) or hint, signal=end.signal, doubt=doubt)


def _terminated_by_torch(end: RankEnd, lines: list[str]) -> _Account | None:
    """The end by torch's monitor of NCCL: after the error of any rank, or because the watchdog thread hangs. Or by the
    watchdog of nccl2.
    """
    if end.signal != signal.SIGABRT:
        return None
    if raised := aborted_by_nccl2(lines):
        failure, doubt = _judged(raised)
        reason = f"killed by SIGABRT: {headline(raised.message)}"
        return _Account(failure, reason, raised.message, hint_of(raised), signal=end.signal, doubt=doubt)
    why = why_terminated(lines)
    if not why:
        return None
    reason = f"killed by SIGABRT: torch has terminated the process, due to {why}"
    if "hang" in why:
        return _Account(
            FailureClass.HANG, reason, hint=_STUCK_WATCHDOG, signal=end.signal, doubt=Doubt.CULPRIT
        )
    return _Account(FailureClass.CONSEQUENCE, reason, signal=end.signal)


def _aborted_during_exit(end: RankEnd, lines: list[str]) -> _Account | None:
    """The exception before an abort: a thread of a process group that is still open can abort the process at exit."""
    if end.signal != signal.SIGABRT or not any(_LEFT_THREAD in line for line in lines[-_ENDS_STDERR:]):
        return None
    crash = last_raised(lines)
    if crash is None or end.uncaught is False or crash.lines_after > _ENDS_STDERR:
        return None
    account = _of_chain(crash, end.hiding)
    return replace(account, exit_code=1)


def _native_headline(raised: Raised) -> str:
    first = headline(raised.message)
    return first if raised.type == "terminate" else f"{raised.type}: {first}"


def _abort_line(lines: list[str]) -> str:
    return next((line for line in reversed(lines) if any(word in line for word in _GLIBC)), "")


def _killed(end: RankEnd) -> _Account:
    match end.oom_killed:
        case True:
            reason = "killed by SIGKILL: the kernel's out-of-memory killer"
            return _Account(FailureClass.OUT_OF_MEMORY, reason, hint=_TOO_LITTLE_MEMORY, signal=end.signal)
        case False:
            reason = "killed by SIGKILL, not from ddp-launch; the kernel reports no out-of-memory kill"
        case None:
            reason = "killed by SIGKILL (the kernel does not report whether memory ran out)"
    return _Account(FailureClass.SIGNAL, reason, signal=end.signal)


# --- ended with an exit code --------------------------------------------------------------------------------


def _exited(end: RankEnd) -> _Account:
    code = shell_code(end)
    lines = clean_lines(end.stderr_tail)
    usage = _usage_error(lines) if code == 2 else ""
    if usage:
        hint = "the script rejected its arguments" if ": error: " in usage else ""
        return _Account(FailureClass.EXIT_CODE, f"exit code 2: {usage}", hint=hint)
    crash = last_raised(lines)
    if crash is not None and (end.uncaught or _is_last(crash)):
        account = _of_chain(crash, end.hiding)
        if end.uncaught is not False or account.failure is FailureClass.CONSEQUENCE:
            # Python exits with 1 after an uncaught exception. The script chose any other code, so the code is reported.
            if code == 1 or account.failure is FailureClass.CONSEQUENCE:
                return account
            reason = f"exit code {code}; last exception: {account.reason}"
            return replace(account, failure=FailureClass.EXIT_CODE, reason=reason, doubt=None)
        if account.lost_peer:  # handled, and then the rank has ended with an exit code
            return replace(_plain_exit(end, code, lines), lost_peer=True)
    if (native := last_native(lines)) is not None:
        raised = native.chain[0]
        return _Account(FailureClass.EXIT_CODE, f"exit code {code}: {raised.headline}", native.text)
    return _plain_exit(end, code, lines)


def _is_last(crash: Crash) -> bool:
    """Whether a traceback is the last that the rank has printed.

    What follows its last line may be more lines of the message, as libraries write them, or what the script says next.
    """
    raised = crash.chain[-1]
    has_one_line = "\n" not in raised.message or "Original Traceback" in raised.message
    is_whole = has_one_line or is_of_library(raised) or raised.type == "ddp.CommError"
    return not crash.lines_after and is_whole


def _usage_error(lines: list[str]) -> str:
    printed = [line for line in lines[-8:] if re.match(r"\S.*?: (error: |can't open file )", line)]
    return printed[-1] if printed else ""


def _plain_exit(end: RankEnd, code: int, lines: list[str]) -> _Account:
    if code == 128 + signal.SIGKILL and end.oom_killed:
        reason = f"exit code {code}: the kernel's out-of-memory killer ended a child process of the rank"
        return _Account(FailureClass.OUT_OF_MEMORY, reason, hint=_TOO_LITTLE_MEMORY)
    if 128 < code <= 192:
        return _Account(
            FailureClass.EXIT_CODE, f"exit code {code} (a shell's code for {signal_name(code - 128)})"
        )
    hints = {
        126: "the program is not executable: check its permissions",
        127: "a command was not found: the program or one that it calls",
    }
    last = next(reversed(said_in(lines)), "")
    printed = f' (last line on stderr: "{last[:200]}")' if last and code == 1 else ""
    text = "" if printed and [line for line in lines if line] == [last] else last_lines(lines)
    return _Account(FailureClass.EXIT_CODE, f"exit code {code}{printed}", text, hints.get(code, ""))


# --- the report of torch's NCCL watchdog on stderr, and the cause of a failure that only it has noticed
#
# An error of NCCL is asynchronous: no call raises it. torch's watchdog thread finds it, sets the state that
# `get_error()` returns, and writes the error to stderr. Later it aborts the process. The guard of the rank sees only
# the state:
#
#     COMM_ERROR     the communicator reports an error. Only the text shows whether this rank or its peer is at fault
#     TIMEOUT        a collective did not complete within the timeout of its group: another rank may be late
#     REMOTE_ERROR   another rank has reported one of these (TORCH_NCCL_PROPAGATE_ERROR=1)
#
# So the agent takes the text from the stderr of the rank. If it finds none, or does not know the error, the cause is
# uncertain: an error of a communicator is more often the effect of a failure elsewhere.

_TYPE = "torch.distributed.DistBackendError"
_TIMED_OUT = "Watchdog caught collective operation timeout"  # in the words of torch and of the guard
_ASYNC = re.compile(r"raised the following async exception: (.*)")
_TIMEOUT = re.compile(rf"({_TIMED_OUT}: .*)")
_WARNING = re.compile(r"NCCL WARN (.+)")
_FATAL = re.compile(
    r"\[F\S* .*?Terminating the process after attempting to dump debug info, due to (.+?)\.?$"
)
# nccl2, which is the backend `nccl` from torch 2.15 on: its watchdog logs why, and aborts the process at once.
_ABORTS = re.compile(
    r"\[TC\].* Aborting process on rank \d+ due to (timeout|error) - (?:nccl hit async error: )?(.+)"
)
_WATCHDOG = re.compile(r"(?:\[PG [^\]]*\] ?)?Process group watchdog thread terminated with exception: ")
_IN_SOURCE = re.compile(r"NCCL error in: \S+:\d+, ")
_LAST_ERROR = "Last error:"
_MAX_LINES, _WARNINGS = 8, 3


def cause_of_asynchronous(end: RankEnd, reported: str) -> Cause:
    """The cause of an error that a guard has reported. `end`: the facts about its rank, which still runs."""
    lines = clean_lines(end.stderr_tail)
    raised = Raised(_TYPE, _message(lines, reported) or reported)
    failure, doubt = _judged(raised)
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


def _judged(raised: Raised) -> tuple[FailureClass, Doubt | None]:
    if not is_known(raised):
        return FailureClass.CONSEQUENCE, Doubt.CULPRIT
    return class_of(raised), Doubt.CULPRIT if may_be_at_peer(raised) else None


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


def aborted_by_nccl2(lines: list[str]) -> Raised | None:
    """The error for which the watchdog of nccl2 has aborted the process."""
    found = next((match for line in reversed(lines) if (match := _ABORTS.search(line))), None)
    if found is None:
        return None
    text = f"{_TIMED_OUT} ({found[2]})" if found[1] == "timeout" else f"NCCL error: {found[2]}"
    return Raised(_TYPE, "\n".join([text, *_warnings(lines)]))


def why_terminated(lines: list[str]) -> str:
    """Why torch's monitor thread has aborted the process: it logs this as fatal. "" if it has not."""
    found = [match[1] for line in lines if (match := _FATAL.search(line))]
    return found[-1] if found else ""
