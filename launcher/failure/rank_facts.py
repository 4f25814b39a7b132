"""Reads data about an ended rank: its error file, and whether the kernel's out-of-memory killer ended it.

Three sources report out-of-memory kills, each with a limit. The kernel's log names the process, but with PIDs of the
initial PID namespace, and it is often not readable. A cgroup's `oom_kill` counter needs no privileges but does not name
the process: each increment is assigned to one killed rank, in the order of the calls of `killed`. The counter in
/proc/vmstat can only prove that there was no kill: it has not changed.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.failure.verdict import ErrorRecord
from launcher.template.cgroup import folders

_MAX_RECORD_BYTES = 1 << 20
_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # the kernel's fixed inode number for it
_MAX_LOG_RECORDS = 10_000  # per question


# --- error files -------------------------------------------------------------------------------------


def read_error_record(path: str) -> ErrorRecord | None:
    """None if the file does not exist, is partial, or has another format."""
    data = _read_json(path)
    if data is None:
        return None
    message = data.get("message")
    if isinstance(message, str):
        return _torch_record(message, "")
    if isinstance(message, dict) and isinstance(message.get("message"), str):
        extra = message.get("extraInfo")
        stack = extra.get("py_callstack") if isinstance(extra, dict) else ""
        return _torch_record(message["message"], stack if isinstance(stack, str) else "")
    return None


def _read_json(path: str) -> dict[str, Any] | None:
    """The rank controls this path: open only a regular file, and limit the size."""
    import json

    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        text = os.read(fd, _MAX_RECORD_BYTES).decode(errors="replace")
    except OSError:
        return None
    finally:
        os.close(fd)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _torch_record(message: str, stack: str) -> ErrorRecord:
    """torch joins type and message: "ValueError: bad batch"."""
    kind, colon, rest = message.partition(": ")
    if not colon or not kind.replace(".", "_").isidentifier():
        kind, rest = "Error", message
    return ErrorRecord(kind, rest, stack)


# --- out-of-memory kills -------------------------------------------------------------------------------


def oom_victim(record: str) -> int | None:
    """The PID of the process that the out-of-memory killer ended, if this record of /dev/kmsg reports one."""
    import re

    prefix, _, message = record.partition(";")
    level = prefix.partition(",")[0]
    if not level.isdigit() or int(level) >> 3:
        return None  # not written by the kernel: root may write there too
    found = re.match(r"(?:.*: )?Killed process (\d+)\b", message)
    if found is None:
        found = re.match(r"oom-kill:.*,pid=(\d+)\b", message)
    return int(found[1]) if found else None


class OomWatch:
    """Counts out-of-memory kills from its creation, when the job starts."""

    def __init__(self, *, kmsg: str = "/dev/kmsg", vmstat: str = "/proc/vmstat") -> None:
        self._counters: dict[str, int] = {}  # file of a cgroup -> its count when the watch began
        self._explained = 0
        self._victims: set[int] = set()
        self._vmstat = vmstat
        self._vmstat_before = _counter(vmstat)
        self._kmsg = _open_at_end(kmsg)
        self.add_cgroup(*folders("self", "memory"))

    def add_cgroup(self, *cgroups: str) -> None:
        """Watch these cgroups too: a cgroup of version 1 does not count its children."""
        for folder in cgroups:
            for name in ("memory.events", "memory.oom_control"):
                path = os.path.join(folder, name)
                count = _counter(path)
                if count is not None and not self._has_counted_ancestor(folder, name):
                    self._counters.setdefault(path, count)

    def _has_counted_ancestor(self, folder: str, name: str) -> bool:
        """memory.events (version 2) of a cgroup includes its children, so a child must not count again."""
        return name == "memory.events" and any(
            path.endswith("/" + name) and folder.startswith(os.path.dirname(path).rstrip("/") + "/")
            for path in self._counters
        )

    def killed(self, pid: int) -> bool | None:
        """Whether the out-of-memory killer ended `pid`. Call once per killed rank. Returns None if this is unknown."""
        names = self._read_log()
        if pid in self._victims:
            self._victims.discard(pid)
            self._explained += 1
            return True
        steps = sum((_counter(path) or before) - before for path, before in self._counters.items())
        others = len(self._victims) if names else 0  # steps that the log has given to other processes
        if steps - self._explained - others > 0:
            self._explained += 1
            return True
        if self._counters or names:
            return False
        now = _counter(self._vmstat)
        return False if now is not None and now == self._vmstat_before else None

    def close(self) -> None:
        if self._kmsg is not None:
            os.close(self._kmsg)
            self._kmsg = None

    def _read_log(self) -> bool:
        """Read new records. False if the log is not readable, or uses another pid namespace."""
        if self._kmsg is None or not _in_first_pid_namespace():
            return False
        for _ in range(_MAX_LOG_RECORDS):
            try:
                record = os.read(self._kmsg, 8192)
            except BrokenPipeError:
                continue  # records were overwritten before we read them
            except OSError as error:
                return isinstance(error, BlockingIOError)
            if not record:
                return True
            victim = oom_victim(record.decode(errors="replace"))
            if victim is not None:
                self._victims.add(victim)
        return True


def _open_at_end(path: str) -> int | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        os.lseek(fd, 0, os.SEEK_END)
    except OSError:
        os.close(fd)
        return None
    return fd


def _in_first_pid_namespace() -> bool:
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def _counter(path: str) -> int | None:
    """The `oom_kill` line of memory.events, memory.oom_control or vmstat: all three have the same format."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


# --- the report file -----------------------------------------------------------------------


def write_outcome(path: str, outcome: dict[str, object]) -> None:
    """Write atomically: a program that waits for this file never sees a part of it."""
    import json

    text = json.dumps(outcome, indent=2) + "\n"
    folder, name = os.path.split(path)
    partial = os.path.join(folder, f".{name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        os.unlink(partial)
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
