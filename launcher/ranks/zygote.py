"""The agent's side of the zygote, the process that forks the ranks: starts it, sends requests, reads reports.

No call blocks.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import struct
import sys
import termios
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from typing import Any

from launcher.settings.import_path import import_path, script_folder
from launcher.settings.spec import EntryKind, EntryPoint, LaunchSpec
from launcher.template import messages, tree
from launcher.template.import_variables import FIXED_BY_IMPORT, FIXED_NATIVELY
from launcher.template.messages import Keep, Learn, Order, Report, Signal, Spawn, SweepOrder

_TEMPLATE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "template")
_RUN_PATH = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"

_MEASURED_BY_COVERAGE = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")


def rank_argv(entry: EntryPoint, python: str, args: tuple[str, ...]) -> tuple[str, ...]:
    """Return the rank's command line, whether it is executed or forked warm."""
    match entry.kind:
        case EntryKind.PROGRAM:
            return (entry.target, *args)
        case EntryKind.MODULE:
            return (python, "-u", "-m", entry.target, *args)
        case EntryKind.RUN_PATH:
            return (python, "-u", "-c", _RUN_PATH, entry.target, *args)
        case EntryKind.SCRIPT:
            return (python, "-u", entry.target, *args)


def obstacle_to_warm_start(spec: LaunchSpec, environ: Mapping[str, str]) -> str:
    """Return why ranks cannot be forked from a process that has imported torch; "" if they can."""
    if spec.entry.kind is EntryKind.PROGRAM:
        return "not a Python program"
    if spec.python and spec.python != sys.executable:
        return f"the ranks' interpreter is {spec.python}, not the launcher's own"
    for name in _MEASURED_BY_COVERAGE:
        if name in environ:
            return f"{name} is set: coverage must start inside each rank"
    variable = early_variable(spec.entry)
    return f"the script contains {variable}, which must be set before torch is imported" if variable else ""


def store_command(spec: LaunchSpec) -> tuple[str, ...]:
    """Return the command of a process that keeps a store if the zygote cannot. Empty: rank 0 hosts it.

    With `--master-addr` it does so under torchrun, too, and a script may rely on it.
    """
    script = os.path.join(_TEMPLATE, "store.py")
    if spec.master_addr:
        return ()
    if spec.entry.kind is not EntryKind.PROGRAM and spec.python and spec.python != sys.executable:
        return (spec.python, "-u", script, "")
    found = PathFinder.find_spec("torch", import_path(os.environ))
    if found is None or not found.origin:
        return ()
    return (sys.executable, "-I", "-S", script, os.path.dirname(os.path.dirname(found.origin)))


def warm_command(
    spec: LaunchSpec, env: dict[str, str], config: dict[str, Any]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the command line of a warm zygote or template, and its environment, in which its configuration is."""
    config = {
        **config,
        "path0": script_folder(spec.entry),
        "pythonpath": env.get("PYTHONPATH"),
        "preload": spec.preload,
    }
    hook = os.path.join(_TEMPLATE, "hook")
    # If it is empty, it adds nothing: an empty entry in it would be the current folder.
    paths = (hook, env["PYTHONPATH"]) if env.get("PYTHONPATH") else (hook,)
    env = env | {"PYTHONPATH": os.pathsep.join(paths), "_DDP_LAUNCH_ZYGOTE": json.dumps(config)}
    return rank_argv(spec.entry, sys.executable, spec.entry.args), env


class Zygote:
    is_pooled = False  # forked from a template of the warm pool

    def __init__(self, pid: int, control: socket.socket, warm: bool) -> None:
        self.pid = pid
        self.warm = warm
        self._control = control
        self._inbox = messages.Inbox(control)
        self._outbox = messages.Outbox(control)
        self.when_blocked: Callable[[], None] = (
            _nothing  # orders wait: call `flush` once the socket is writable
        )

    @classmethod
    def start(
        cls,
        spec: LaunchSpec,
        env: dict[str, str],
        cgroup: str,
        scratch: str,
        warm: bool,
        signal_mask: Iterable[int] = (),
    ) -> Zygote:
        ours, theirs = socket.socketpair()
        config = {"fd": theirs.fileno(), "cgroup": cgroup, "scratch": scratch, "agent": os.getpid()}
        if warm:
            argv, env = warm_command(spec, env, {**config, "learns": spec.learn_imports})
        else:
            argv = (
                sys.executable,
                "-I",
                "-S",
                os.path.join(_TEMPLATE, "plain_zygote.py"),
                json.dumps(config),
            )
        os.set_inheritable(theirs.fileno(), True)
        try:
            # A shell starts background jobs with SIGINT ignored, and their processes inherit that. Ranks must get it.
            default = (signal.SIGINT,)
            pid = os.posix_spawn(
                sys.executable, argv, env, setsid=True, setsigmask=signal_mask, setsigdef=default
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(pid, ours, warm)

    def fileno(self) -> int:
        return self._control.fileno()

    def read(self) -> list[Report] | None:
        """Return the zygote's reports since the last call; None if the zygote has ended."""
        if not self._inbox.receive():
            return None
        reports: list[Report] = []
        while (received := self._inbox.take()) is not None:
            reports.append(received.message)  # type: ignore[arg-type]  # this end receives reports only
        return reports

    def spawn(self, order: Spawn, fds: tuple[int, int]) -> None:
        """Start a rank. This object now owns the descriptors of its standard output and error."""
        self._send(order, fds)

    def keep(self, generation: int, host: str, port: int, command: tuple[str, ...] = ()) -> None:
        self._send(Keep(generation, host, port, command))

    def signal(self, signum: int, ranks: Iterable[int] | None = None) -> None:
        self._send(Signal(signum, None if ranks is None else tuple(ranks)))

    def sweep(self, generation: int, patience_s: float, kept: Iterable[int] = ()) -> None:
        self._send(SweepOrder(generation, patience_s, tuple(kept)))

    def learn(self, names: Iterable[str]) -> None:
        """Import what the ranks of other nodes have imported, before this node has any."""
        self._send(Learn(tuple(names)))

    def await_end(self, timeout_s: float) -> int | None:
        """Wait until the process has ended. Return its wait status; None after the timeout, or if it is unknown."""
        return tree.await_child(self.pid, timeout_s)

    def close(self) -> None:
        """End the zygote, which first kills all its descendants."""
        self._outbox.close()
        self._control.close()

    def process(self) -> int:
        """Return the process number, or 0 if it is not known."""
        return self.pid

    def resume(self) -> None:
        """Let the zygote continue if a signal has stopped it."""
        if pid := self.process():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """End the zygote, and the ranks with it: each asks the kernel for this."""
        if pid := self.process():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    @property
    def has_unread_orders(self) -> bool:
        if self.fileno() < 0:  # closed: a job may have ended between two looks
            return False
        with contextlib.suppress(OSError):
            (unread,) = struct.unpack("i", fcntl.ioctl(self._control, termios.TIOCOUTQ, b"\0" * 4))
            return bool(unread) or not self._outbox.is_empty
        return False

    def flush(self) -> bool:
        """Send what the socket accepts now. Return True when all requests are sent."""
        try:
            self._outbox.flush()
        except OSError:  # the zygote has ended: the reader sees the end of the stream and starts another
            self._outbox.close()
        return self._outbox.is_empty

    def _send(self, order: Order, fds: tuple[int, ...] = ()) -> None:
        waits_already = not self._outbox.is_empty
        self._outbox.put(order, fds)
        if not waits_already and not self.flush():
            self.when_blocked()


def _nothing() -> None:
    pass


# --- variables that a script sets before it imports torch ------------------------------------------
#
# Finds out whether a script sets variables that torch reads when it is imported.
#
# Ranks that are forked from a process with torch would ignore such a variable without a message. So these scripts start
# without the fork. The script and the modules of its own folder that it imports are searched for the names; an
# installed module that sets such a variable is not found here, but in the ranks (`launcher.template.late_variables`).

_IMPORT = re.compile(r"^\s*(?:from\s+(\.*)([\w.]*)\s+import\s+([\w ,]*)|import\s+([\w ,.]+))", re.MULTILINE)
# Expressions that only read a variable, so that a script that shows OMP_NUM_THREADS starts like any other.
_READS = re.compile(
    r"""\b(?:environ\s*\.\s*get|getenv)\s*\(\s*['"]\w+['"]"""
    r"""|(?<!del )\bos\.environ\s*\[\s*['"]\w+['"]\s*\](?!\s*(?:[,|+]|=(?!=)))"""
    r"""|['"]\w+['"]\s+(?:not\s+)?in\s+os\.environ\b"""
)
_MOST_FILES, _MOST_BYTES = 100, 1 << 20


def early_variable(entry: EntryPoint) -> str:
    """Return a variable that the script seems to set itself; "" if there is none."""
    if entry.kind is EntryKind.PROGRAM:
        return ""
    base, files = _first_files(entry)
    seen: set[str] = set()
    while files and len(seen) < _MOST_FILES:
        file = os.path.realpath(files.pop())
        if file in seen:
            continue
        seen.add(file)
        source = _source_of(file)
        if name := _set_in(source):
            return name
        files += _imported_files(source, base, os.path.dirname(file))
    return ""


def _first_files(entry: EntryPoint) -> tuple[str, list[str]]:
    """Return the folder of the script's own modules, and the files that run first."""
    folder = script_folder(entry)
    if entry.kind is not EntryKind.MODULE:
        return folder, [entry.target]
    return folder, [*_files_of(folder, entry.target), *_files_of(folder, f"{entry.target}.__main__")]


def _files_of(folder: str, module: str) -> Iterator[str]:
    """Yield the files below the folder that run when the module is imported, those of its packages too."""
    path = folder
    for part in module.split("."):
        path = os.path.join(path, part)
        for file in (f"{path}.py", os.path.join(path, "__init__.py")):
            if os.path.isfile(file):
                yield file


def _imported_files(source: str, base: str, folder: str) -> Iterator[str]:
    for dots, origin, names, modules in _IMPORT.findall(source):
        above = os.path.normpath(os.path.join(folder, *[os.pardir] * (len(dots) - 1))) if dots else base
        found = [word.split()[0] for word in modules.split(",") if word.strip()]
        found += [f"{origin}.{word.split()[0]}".strip(".") for word in names.split(",") if word.strip()]
        for module in (*found, origin):
            yield from _files_of(above, module)


def _source_of(file: str) -> str:
    try:
        with open(file, "rb") as opened:
            return opened.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _set_in(source: str) -> str:
    if "environ" not in source and "putenv" not in source:
        return ""
    source = _READS.sub("", source)
    fixed = FIXED_NATIVELY + FIXED_BY_IMPORT
    names = (name for name in fixed if f'"{name}' in source or f"'{name}" in source)
    return next((f"{name}*" if name.endswith("_") else name for name in names), "")
