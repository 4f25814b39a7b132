"""Reports the end of a job: a short box for people, and the same facts as JSON for programs.

The box names one rank: the first cause. A rank that failed only because it lost a peer, or that the launcher stopped,
is listed under "others" and never as the cause. If there are only such ranks, the box says that the cause is unknown.
A requested end is not a failure and gets one line.
"""

from __future__ import annotations

from launcher.failure.crash_text import GROUP_HEADER, LAST_LINES, clean_lines
from launcher.output.lines import TRACEBACK_HEADER, printable
from launcher.output.screen import cells_of
from rendezvous.values.cause_text import (
    cause_json,
    code_of_outcome,
    consequences,
    described,
    first_cause,
    ranks,
    was_requested,
)
from rendezvous.values.durations import duration_text
from rendezvous.values.types import Cause, Decision, DecisionKind, FailureClass, Outcome

_MAX_WIDTH = 100
_MIN_WIDTH = 40
_TRACEBACK_LINES = 12
_LABEL_WIDTH = 10
_MAX_ROWS_PER_TEXT = 6
_LIBRARY_MARKS = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", "<ddp-launch")
_ROUND_BOX = ("╭", "─", "╮", "│", "╰", "╯")
_PLAIN_BOX = ("+", "-", "+", "|", "+", "+")
_RED, _BOLD, _END = "\x1b[31m", "\x1b[1m", "\x1b[0m"


def render_box(
    outcome: Outcome,
    *,
    width: int,
    color: bool,
    log_dir: str,
    unicode: bool = True,
    budget: str = "",
) -> str:
    """ "" for success. `budget`: the restarts allowed."""
    if outcome.succeeded:
        return ""
    if was_requested(outcome):
        logs = f"; {logs_are_in(log_dir)}" if log_dir else ""
        return f"ddp-launch: {_printable(outcome.reason + logs, unicode)}\n"
    inner = max(min(width, _MAX_WIDTH), _MIN_WIDTH) - 4
    cause = first_cause(outcome)
    rows = _wrapped(headline(outcome), inner, "")
    n_head = len(rows)
    if cause is not None and cause.traceback:
        rows += ["", *_traceback_rows(cause.traceback, inner)]
    rows.append("")
    for label, text in _facts(outcome, cause, log_dir, budget):
        rows += _labelled(label, text, inner)
    return _boxed([_printable(row, unicode) for row in rows], n_head, inner, color=color, unicode=unicode)


def logs_are_in(folder: str) -> str:
    return f"the logs are in {folder}"


def outcome_json(outcome: Outcome, *, log_dir: str = "", budget: str = "") -> dict[str, object]:
    cause = first_cause(outcome)
    return {
        "version": 1,
        "succeeded": outcome.succeeded,
        "summary": headline(outcome),
        "reason": outcome.reason,
        "exit_code": outcome.exit_code,
        "code": code_of_outcome(outcome),
        "restarts": outcome.restarts,
        "restart_budget": budget,
        "heals": outcome.heals,
        "log_dir": log_dir,
        "first_cause": None if cause is None else cause_json(cause),
        "causes": [cause_json(each) for each in outcome.causes],
        "others": _others(outcome, cause),
        "decisions": [
            {"kind": d.title, "reason": d.reason, "generation": d.generation} for d in outcome.decisions
        ],
    }


def torch_error(outcome: Outcome, timestamp: int) -> dict[str, object]:
    """The error file of torchrun, in the format of @record. A signal number is negative."""
    cause = first_cause(outcome)
    message = headline(outcome) if cause is None else described(cause)
    code = outcome.exit_code if cause is None else -cause.signal or cause.exit_code
    extra = {"py_callstack": "" if cause is None else cause.traceback, "timestamp": str(timestamp)}
    return {"message": {"message": message, "extraInfo": extra, "errorCode": code}}


def headline(outcome: Outcome) -> str:
    if outcome.succeeded:
        return "the job succeeded"
    if was_requested(outcome):
        return outcome.reason
    cause = first_cause(outcome)
    if cause is None:
        if not consequences(outcome):
            return f"the job failed: {outcome.reason}"
        return "the job failed: its ranks report only lost connections, and no other failure is known"
    if cause.uncertain:
        return f"the job {'hung' if cause.failure is FailureClass.HANG else 'failed'}: {described(cause)}"
    if cause.failure is FailureClass.NODE_LOST or cause.rank < 0:
        return f"node {cause.node} failed first: {cause.reason}"
    return f"rank {cause.rank} on {cause.node} failed first: {cause.reason}"


def _code_row(outcome: Outcome) -> str:
    code = code_of_outcome(outcome)
    return f"{code} ({code.phrase}); `ddpctl explain {code}` says more" if code else ""


# --- the rows below the headline --------------------------------------------------------------------


def _facts(outcome: Outcome, cause: Cause | None, log_dir: str, budget: str) -> list[tuple[str, str]]:
    facts = [
        ("when", _when(cause) if cause else ""),
        ("others", "; ".join(_others(outcome, cause))),
        ("heals", f"{outcome.heals} used" if outcome.heals else ""),
        ("restarts", _restarts(outcome, budget)),
        ("log", (cause.log if cause else "") or log_dir),
        ("exit code", _exit_code_in_words(outcome)),
        ("code", _code_row(outcome)),
        ("hint", cause.hint if cause else ""),
    ]
    return [(label, text) for label, text in facts if text]


def _exit_code_in_words(outcome: Outcome) -> str:
    first = outcome.first_cause
    if not outcome.is_crash_loop or first is None:
        return str(outcome.exit_code)
    return f"{outcome.exit_code} (--crash-loop: do not start the job again; the rank ended with {first.exit_code})"


def _when(cause: Cause) -> str:
    parts = [cause.at] if cause.at else []
    if cause.ran_s > 0:
        parts.append(f"{duration_text(cause.ran_s)} after its start")
    if cause.step is not None:
        parts.append(f"at step {cause.step}")
    if cause.place:
        parts.append(cause.place)
    return ", ".join(parts)


def _others(outcome: Outcome, cause: Cause | None) -> list[str]:
    rest = [c for c in outcome.causes if cause is None or (c.node, c.rank) != (cause.node, cause.rank)]
    stopped = [c for c in rest if c.failure is FailureClass.CONSEQUENCE and c.stopped]
    lost = [c for c in rest if c.failure is FailureClass.CONSEQUENCE and not c.stopped]
    own = [c for c in rest if c.failure is not FailureClass.CONSEQUENCE]
    texts = []
    if lost:
        whom = "a peer" if cause is None else "it"
        texts.append(
            f"{ranks([each.rank for each in lost])} lost {'its' if len(lost) == 1 else 'their'} connection to {whom}"
        )
        if cause is None:
            texts.append(f"rank {lost[0].rank} on {lost[0].node} reports: {lost[0].reason}")
    if stopped:
        n = len(stopped)
        texts.append(f"{n} {'other ' if cause else ''}rank{'s were' if n > 1 else ' was'} stopped")
    texts += [f"rank {c.rank} on {c.node} also failed: {described(c)}" for c in own[:2]]
    if len(own) > 2:
        texts.append(f"{len(own) - 2} other ranks also failed")
    return texts


def _restarts(outcome: Outcome, budget: str) -> str:
    used = f"{outcome.restarts} of {budget} used" if budget not in ("", "0") else f"{outcome.restarts} used"
    last: Decision | None = outcome.decisions[-1] if outcome.decisions else None
    why = last.reason if last is not None and last.kind is DecisionKind.FAIL else outcome.reason
    if budget == "0" and outcome.restarts == 0:
        return why or "disabled; set --max-restarts to restart after a failure"
    return f"{used}; not restarted: {why}" if why else used


# --- the traceback -----------------------------------------------------------------------------------


def _traceback_rows(traceback: str, inner: int) -> list[str]:
    lines = clean_lines(traceback.rstrip())
    if lines[0] == LAST_LINES:
        kept = [LAST_LINES, *lines[1:][-(_TRACEBACK_LINES - 1) :]]
    elif any(line.strip() == GROUP_HEADER for line in lines) or TRACEBACK_HEADER not in lines:
        kept = _shortened(lines)
    else:
        last = len(lines) - 1 - lines[::-1].index(TRACEBACK_HEADER)
        kept = _user_frames(lines[last + 1 :])
    return [row for line in kept for row in _wrapped(line, inner, _indent_of(line) + "  ")[:3]]


def _user_frames(lines: list[str]) -> list[str]:
    """The frames of the script, the deepest if there are many. If no frame is the script's, all frames."""
    frames, message = _frames(lines)
    own = [frame for frame in frames if not _is_library(frame[0])]
    chosen = own or frames
    room = _TRACEBACK_LINES - min(len(message), 4)
    kept: list[list[str]] = []
    for frame in reversed(chosen):
        room -= len(frame)
        if kept and room < 0:
            break
        kept.insert(0, frame)
    below = next((n for n, frame in enumerate(reversed(frames)) if frame is chosen[-1]), 0)
    tail = [f"  ... {below} library frame{'s' if below > 1 else ''} below ..."] if below else []
    return [*(line for frame in kept for line in frame), *tail, *_shortened(message, 4)]


def _frames(lines: list[str]) -> tuple[list[list[str]], list[str]]:
    frames: list[list[str]] = []
    for at, line in enumerate(lines):
        if line.startswith('  File "'):
            frames.append([line])
        elif line.startswith(" ") and frames:
            if not set(line.strip()) <= {"^", "~"}:  # the carets do not align after a line is cut
                frames[-1].append(line)
        else:
            return frames, lines[at:]
    return frames, []


def _is_library(line: str) -> bool:
    file = line.removeprefix('  File "').partition('"')[0]
    return any(mark in file for mark in _LIBRARY_MARKS)


def _shortened(lines: list[str], limit: int = _TRACEBACK_LINES) -> list[str]:
    if len(lines) <= limit:
        return lines
    return [*lines[: limit - 1], f"  ... {len(lines) - limit + 1} more lines in the log ..."]


def _indent_of(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


# --- drawing -----------------------------------------------------------------------------------------


def _labelled(label: str, text: str, inner: int) -> list[str]:
    rows = _wrapped(text, inner - _LABEL_WIDTH, "")
    return [f"{label if i == 0 else '':<{_LABEL_WIDTH}}{row}" for i, row in enumerate(rows)]


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    """Break at spaces if possible. `indent` starts every row except the first."""
    indent = indent[: width // 2]
    rows: list[str] = []
    rest = text.expandtabs(4).rstrip()
    while _columns(rest) > width and len(rows) < _MAX_ROWS_PER_TEXT:
        cut = _fitting(rest, width)
        start = len(rest) - len(rest.lstrip())
        space = rest.rfind(" ", start, cut + 1)
        cut = space if space > max(start, cut // 2) else cut
        rows.append(rest[:cut].rstrip())
        rest = indent + rest[cut:].lstrip()
    if len(rows) == _MAX_ROWS_PER_TEXT:
        return [*rows[:-1], rows[-1][: _fitting(rows[-1], width - 4)] + " ..."]
    return [*rows, rest]


def _fitting(text: str, width: int) -> int:
    used = 0
    for at, char in enumerate(text):
        used += _columns(char)
        if used > width:
            return max(at, 1)
    return len(text)


def _columns(text: str) -> int:
    return len(text) if text.isascii() else len(cells_of(text, "", 0))


def _printable(text: str, unicode: bool) -> str:
    text = printable(text)
    return text if unicode else text.encode("ascii", "replace").decode()


def _boxed(rows: list[str], n_head: int, inner: int, *, color: bool, unicode: bool) -> str:
    left, line, right, side, low_left, low_right = _ROUND_BOX if unicode else _PLAIN_BOX
    red, bold, end = (_RED, _BOLD, _END) if color else ("", "", "")
    title = " ddp-launch: job failed "
    top = f"{red}{left}{line}{title}{line * (inner + 1 - len(title))}{right}{end}"
    drawn = [top]
    for at, row in enumerate(rows):
        body = row + " " * (inner - _columns(row))
        drawn.append(
            f"{red}{side}{end} {bold if at < n_head else ''}{body}{end if at < n_head else ''} {red}{side}{end}"
        )
    drawn.append(f"{red}{low_left}{line * (inner + 2)}{low_right}{end}")
    return "\n".join(drawn) + "\n"
