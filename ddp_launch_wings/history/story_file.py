"""One file per job: a label, its state, its past, and what was measured. A file is always replaced as a whole.

Files are in a folder that only this user can access: in /var/tmp, which is on this machine and outlives a restart of
it, or else in /tmp. The home folder is not used: machines may share it, and it may be full, slow or read-only. The
folder keeps a number of jobs for a number of days. Nothing is written if little space is free, and no error is
reported: the user did not ask for these files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any

from rendezvous.rounds.event_log import Past, decode_past, encode_past
from rendezvous.rounds.snapshot import SnapshotUnreadable, decode_state, encode_state
from rendezvous.values.job_state import JobState
from rendezvous.values.questions import LoggedPoint, LoggedSeen

OFF = "none"  # instead of a folder
ENDING, OUTPUT = ".story", ".logs"
IN_LOGS = f"job{ENDING}"  # in the folder of the logs of a job
MOST_DAYS = 14.0
_MAGIC = b"ddp-story 1\n"
_PAST_BYTES = 128 * 1024
_MEASURED_BYTES = 256 * 1024
_STATE_BYTES = 4 << 20
_ROOM = 64 << 20  # free bytes that the files leave to others
_LONGEST_LABEL = 64 * 1024


@dataclass(frozen=True, slots=True)
class Label:
    job_id: str
    host: str
    pid: int  # of the agent
    process: str  # which of the processes that have had this number
    logs: str  # the folder of the output; "" if there is none any more


# `ddp.log` of the ranks of the first node, and how much of it was used
Measured = tuple[LoggedSeen, LoggedSeen]
NOTHING: Measured = (LoggedSeen((), 0), LoggedSeen((), 0))


@dataclass(frozen=True, slots=True)
class Story:
    path: str
    label: Label
    state: JobState
    past: Past
    measured: Measured = NOTHING


def process_of(pid: int) -> str:
    """What tells this process from another one with its number: when it began, and since which start of the machine."""
    with suppress(OSError, IndexError):
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            began = file.read().rpartition(")")[2].split()[19]
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return f"{began} {file.read().strip()}"
    return ""


# --- the folder -------------------------------------------------------------------------------------


def folder_of(named: str) -> str:
    """What --history-dir names, else the folder of this user; "" if there is none, and none can be made."""
    if named:
        return "" if named == OFF else os.path.abspath(named)
    name = f"ddp-launch-history-{os.getuid()}"
    return next((path for base in ("/var/tmp", "/tmp") if _is_usable(path := os.path.join(base, name))), "")


def _is_usable(folder: str) -> bool:
    if not os.path.lexists(folder):
        return os.access(os.path.dirname(folder), os.W_OK | os.X_OK)
    return is_ours(folder)


def is_ours(folder: str) -> bool:
    """Whether only this user can write there: another user may have made a folder of this name."""
    with suppress(OSError):
        found = os.lstat(folder)
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return False


def has_room(folder: str) -> bool:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize >= _ROOM and (not found.f_files or found.f_favail > 0)


def name_of(label: Label, began_at: float) -> str:
    digest = hashlib.sha256(
        f"{label.job_id} {label.host} {label.process}".encode(errors="replace")
    ).hexdigest()
    return f"{began_at:.0f}-{digest[:16]}{ENDING}"


def prune(folder: str, most: int, now: float) -> None:
    """Keep the latest files, and no others than these."""
    found = sorted(((_changed_at(path), path) for path in _stories_in(folder)), reverse=True)
    for place, (changed_at, path) in enumerate(found):
        if place >= most or now - changed_at > MOST_DAYS * 86_400.0:
            with suppress(OSError):
                os.unlink(path)
            shutil.rmtree(output_of(path), ignore_errors=True)


def output_of(path: str) -> str:
    return path.removesuffix(ENDING) + OUTPUT


def _changed_at(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _stories_in(folder: str) -> Iterator[str]:
    with suppress(OSError):
        yield from (os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(ENDING))


# --- one file ---------------------------------------------------------------------------------------


def encoded(label: Label, state: JobState, past: Past, measured: Measured = NOTHING) -> bytes:
    """What a file has. Nothing for a job of many thousands of nodes: its state belongs into a service."""
    packed, rest, last = encode_state(state), encode_past(past, _PAST_BYTES), _encoded(measured)
    if len(packed) > _STATE_BYTES:
        return b""
    head = json.dumps({**asdict(label), "state_bytes": len(packed), "past_bytes": len(rest)}).encode()
    return _MAGIC + head + b"\n" + packed + rest + last


def write(path: str, content: bytes) -> None:
    """Raises `OSError`. Writes no file without content."""
    if not content or not has_room(os.path.dirname(path)):
        return
    partial = f"{path}.{os.getpid()}.part"
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            os.unlink(partial)
        raise


def read(path: str) -> Story | None:
    """None if it cannot be read: it is damaged, or of a later release."""
    try:
        with open(path, "rb") as file:
            data = file.read(len(_MAGIC) + _LONGEST_LABEL + _STATE_BYTES + _PAST_BYTES + _MEASURED_BYTES + 1)
        head, line, rest = data.removeprefix(_MAGIC).partition(b"\n")
        if not data.startswith(_MAGIC) or not line:
            return None
        found = json.loads(head)
        size = int(found.pop("state_bytes"))
        end = size + int(found.pop("past_bytes", len(rest)))  # of an earlier release, the past is the rest
        label = Label(**found)
        texts = (label.job_id, label.host, label.process, label.logs)
        if not all(isinstance(text, str) for text in texts) or not isinstance(label.pid, int):
            return None
        state, past = decode_state(rest[:size]), decode_past(rest[size:end])
        return Story(path, label, state, past, _decoded(rest[end:]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SnapshotUnreadable):
        return None


def _encoded(measured: Measured) -> bytes:
    """Of too many points, every second one of each name is left out."""
    lines = [seen.points for seen in measured]
    while True:
        rows = [[[p.name, p.step, p.value, p.generation, round(p.at, 1)] for p in points] for points in lines]
        packed = zlib.compress(json.dumps(rows, separators=(",", ":")).encode(errors="replace"))
        if len(packed) <= _MEASURED_BYTES:
            return packed
        lines = [_half(points) for points in lines]


def _half(points: Sequence[LoggedPoint]) -> tuple[LoggedPoint, ...]:
    turns = defaultdict[str, Iterator[bool]](lambda: cycle((False, True)))
    return tuple(point for point in points if next(turns[point.name]))


def _decoded(data: bytes) -> Measured:
    """Nothing, if these bytes cannot be read."""
    try:
        first, second = json.loads(zlib.decompressobj().decompress(data, 64 * _MEASURED_BYTES))
        return _seen(first), _seen(second)
    except (ValueError, TypeError, OverflowError, zlib.error, RecursionError):
        return NOTHING


def _seen(rows: Sequence[Sequence[Any]]) -> LoggedSeen:
    points = [
        LoggedPoint(number, str(name), int(step), str(float(value)), int(generation), float(at))
        for number, (name, step, value, generation, at) in enumerate(rows, 1)
    ]
    return LoggedSeen(tuple(points), len(points))


def stories(folder: str, log_dir: str) -> list[Story]:
    """Of the folder of this user, and those beside the logs in `log_dir`. The one that ended last is first."""
    paths = list(_stories_in(folder)) if folder and is_ours(folder) else []
    if log_dir:
        with suppress(OSError):
            names = sorted(os.listdir(log_dir))
            beside = [log_dir, *(os.path.join(log_dir, name) for name in names)]
            paths += [path for each in beside if os.path.exists(path := os.path.join(each, IN_LOGS))]
    found = {}
    for story in filter(None, map(read, paths)):
        found[story.label.job_id, story.past.began_at] = story
    return sorted(found.values(), key=lambda each: each.past.ended_at or each.past.began_at, reverse=True)


def is_running(story: Story) -> bool:
    """Whether the agent that wrote it may still run. On another machine, only its end is known."""
    label = story.label
    return (
        label.host == os.uname().nodename and bool(label.process) and process_of(label.pid) == label.process
    )


def now() -> float:
    return time.time()
