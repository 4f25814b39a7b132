"""Collects the Python stacks of a rank and the kernel state of its threads, within two seconds.

The rank's own threads come first. If they do not answer, py-spy does, if it is installed; eu-stack, if it is installed,
adds the frames of native code. A process that is stopped, or in uninterruptible sleep, cannot respond, and the report
says so. All of this runs in a thread with a time limit, because reading /proc of a hanging process can also block.

Each thread writes its own Python stack, in the handler of a signal (launcher/template/stack_signal.py), so that
none reads frames while another thread changes them. The kernel shows when a thread is done: it blocks a signal while
its handler runs. Threads of native libraries get the signal too, and write nothing.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from typing import NamedTuple

from launcher.template import tree
from launcher.template.stack_signal import MEMORY, SIGNAL
from launcher.template.tree import process_stat
from rendezvous.values.types import Cause, Doubt

# What stacks of a rank show: whether its main thread waits for other ranks; and the stacks without our own code.

MAIN_THREAD = "Main thread"
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line \d+ in ')
_LIBRARIES = ("/torch/", "/ddp/")


def is_local_work(text: str) -> bool:
    """Whether the main thread is in the script, or in a library that does not communicate with other ranks.

    A thread inside torch may be waiting in C++ code that the stack does not show, so it does not count.
    """
    if not text.startswith(MAIN_THREAD):
        return False
    first = next((line for line in text.splitlines() if line.startswith("  ")), "")
    frame = _FRAME.match(first)
    return frame is not None and not any(library in frame["file"] for library in _LIBRARIES)


_OUR_FILES = re.compile(r"/(?:ddp/telemetry|launcher/template)/[a-z_/]+\.py$")
_LIBRARY = re.compile(r"/lib/python[\d.]+/(?!site-packages|dist-packages)|^<frozen ")
_THREAD = re.compile(r"Thread (\d+) |thread (\d+) \(")


def without_ours(text: str) -> str:
    """For people: without our frames, and without threads that run nothing but our code, also in the kernel's list."""
    kept: list[str] = []
    ours: set[str] = set()
    for part in text.split("\n\n"):
        if (found := _THREAD.match(part)) and found[1] and _is_ours(part):
            ours.add(found[1])
        elif found is not None and found[2]:
            kept.append(_without_threads(part, ours))
        else:
            kept.append("\n".join(line for line in part.split("\n") if not _is_our_frame(line)))
    return "\n\n".join(part for part in kept if part)


def _is_our_frame(line: str) -> bool:
    frame = _FRAME.match(line)
    return frame is not None and _OUR_FILES.search(frame["file"]) is not None


def _is_ours(thread: str) -> bool:
    """Whether all frames but those of Python's library are ours, and there are some."""
    frames = [
        line
        for line in thread.split("\n")
        if (found := _FRAME.match(line)) and not _LIBRARY.search(found["file"])
    ]
    return bool(frames) and all(map(_is_our_frame, frames))


def _without_threads(kernel: str, numbers: set[str]) -> str:
    kept, is_left_out = [], False
    for line in kernel.split("\n"):
        if found := _THREAD.match(line):
            is_left_out = found[2] in numbers
        if not is_left_out:
            kept.append(line)
    return "\n".join(kept)


def without_doubt(cause: Cause, text: str) -> Cause:
    """Remove the doubt about a rank that may be waiting for others, if its stack shows that it does not wait."""
    if cause.doubt is Doubt.MAY_WAIT and is_local_work(text):
        return replace(cause, doubt=None, suspects=())
    return cause


BUDGET_S = 2.0
_ALL_S = 1.0  # a thread that is not stopped needs less than a millisecond
_EACH_S = 0.5
_CHECK_S = 0.0005
_CALLS = {"x86_64": 234, "aarch64": 131, "ppc64le": 250, "s390x": 241, "riscv64": 131}  # of tgkill
_libc = ctypes.CDLL(None)
_HEAD = re.compile(r"^.*?(?= ?\(most recent call first\):)")
_TOOL_S = 1.3
_CHILDREN = 6
_THREADS = 12
_LARGEST = 256 * 1024
_NOT_ANSWERED = (
    'no Python stack: the process does not respond; `pip install "ddp-launch[stacks]"` installs py-spy, which reads '
    "stacks from outside"
)
_FOR_SILENCE = ("py-spy", ("dump", "--pid"))
_FOR_NATIVE_CODE = ("eu-stack", ("-n", "48", "-p"))


async def stacks_of(pid: int, budget_s: float = BUDGET_S) -> str:
    """The rank's own main thread first."""
    try:
        return await asyncio.wait_for(asyncio.to_thread(look_at, pid), budget_s)
    except TimeoutError:
        return f"no stacks: they could not be read within {budget_s:g} s"


def look_at(pid: int) -> str:
    children = tree.descendants(pid)[:_CHILDREN]
    own = _python(pid)
    tool = _start_tool(pid, is_silent=not own)
    parts = [own or _NOT_ANSWERED]
    parts += [_of_child(child, f"child {child} ({_read(child, 'comm') or 'ended'})") for child in children]
    parts += [_kernel(pid), _outcome(tool)]
    return "\n\n".join(part for part in parts if part)


# --- Python ----------------------------------------------------------------------------------------------


def _of_child(pid: int, title: str) -> str:
    said = _python(pid)
    return f"{title}:\n{said}" if said else ""  # "": it is without the handler of the launcher


def _python(pid: int) -> str:
    state = _state(pid)
    if not state:
        return "the process has ended"
    if state in ("T", "t"):
        return "no Python stack: the process is stopped"
    return python_stacks(pid)


class _Signal(NamedTuple):
    caught: bool
    blocked: bool  # also while the handler runs
    pending: bool


def python_stacks(pid: int) -> str:
    """The stack of the main thread comes first. "" if the process is without the handler."""
    with suppress(OSError), _memory(pid) as memory:
        deadline = time.monotonic() + _ALL_S
        if not _alone(memory, deadline):
            return ""
        tasks = _threads(pid)
        parts, left = [], len(tasks)
        for task in tasks:
            if time.monotonic() >= deadline:
                break
            parts.append(_of_thread(memory, pid, task, deadline))
            left -= 1
        os.ftruncate(memory.fileno(), 0)
        parts.append(f"there was no time for the other {left} threads" if left else "")
        return "\n\n".join(part for part in parts if part)
    return ""


def _of_thread(memory: FileIO, pid: int, task: int, deadline: float) -> str:
    before = _signal(pid, task)
    if not before.caught or before.blocked or before.pending:  # pending: since the time before
        return ""
    start = os.fstat(memory.fileno()).st_size
    if not _send(pid, task) or not _is_done(pid, task, min(deadline, time.monotonic() + _EACH_S)):
        return ""
    memory.seek(start)
    # faulthandler calls each thread the current one, and knows it by its address. The kernel's number says more.
    text = memory.read(_LARGEST).decode(errors="replace").strip("\n")
    if not text:
        return ""
    return _HEAD.sub(MAIN_THREAD if task == pid else f"Thread {task}", text, count=1)


def _is_done(pid: int, task: int, deadline: float) -> bool:
    """Twice in a row, because the kernel shows neither for an instant, between taking the signal and blocking it."""
    calm = 0
    while time.monotonic() < deadline:
        state = _signal(pid, task)
        calm = 0 if state.pending or state.blocked else calm + 1
        if calm == 2:
            return True
        time.sleep(_CHECK_S)
    return False


def _memory(pid: int) -> FileIO:
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        with suppress(OSError):
            if os.readlink(f"{folder}/{name}").startswith(f"/memfd:{MEMORY}"):
                return open(f"{folder}/{name}", "r+b", buffering=0)
    raise FileNotFoundError(MEMORY)


def _alone(memory: FileIO, deadline: float) -> bool:
    """A hang inquiry and a person may ask at the same time. The lock ends with the file."""
    while time.monotonic() < deadline:
        with suppress(BlockingIOError):
            fcntl.flock(memory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(_CHECK_S)
    return False


def _threads(pid: int) -> list[int]:
    """The main thread first. [] if the process has ended."""
    with suppress(OSError):
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")), key=lambda task: (task != pid, task))
    return []


def _signal(pid: int, task: int) -> _Signal:
    masks = dict.fromkeys((b"SigPnd", b"SigBlk", b"SigCgt"), 0)
    with suppress(OSError), open(f"/proc/{pid}/task/{task}/status", "rb") as file:
        for line in file:
            name, _, value = line.partition(b":")
            if name in masks:
                masks[name] = int(value, 16)
    bit = 1 << (SIGNAL - 1)
    return _Signal(*(bool(masks[name] & bit) for name in (b"SigCgt", b"SigBlk", b"SigPnd")))


def _send(pid: int, task: int) -> bool:
    """os.kill reaches any thread of the process."""
    number = _CALLS.get(platform.machine())
    return number is not None and _libc.syscall(number, pid, task, SIGNAL) == 0


# --- the kernel, and other tools ------------------------------------------------------------------------


def _kernel(pid: int) -> str:
    rows = []
    for task in map(str, _threads(pid)[:_THREADS]):
        state, name = _state(pid, task), _read(pid, f"task/{task}/comm")
        where = _read(pid, f"task/{task}/wchan")
        call = _read(pid, f"task/{task}/syscall").split(" ")[0]
        words = [f"thread {task} ({name}): {state}"]
        words += [f"in {where}"] if where not in ("", "0") else []
        words += [f"system call {call}"] if call.isdigit() else []
        rows.append(", ".join(words))
        rows += [f"    {line}" for line in _lines(pid, f"task/{task}/stack")[:16]]
    return "\n".join(rows)


def _state(pid: int, task: str = "") -> str:
    stat = process_stat(pid, task)
    return "" if stat is None else stat.state


def _read(pid: int, name: str) -> str:
    with suppress(OSError), open(f"/proc/{pid}/{name}", errors="replace") as file:
        return file.read().strip()
    return ""


def _lines(pid: int, name: str) -> list[str]:
    return _read(pid, name).splitlines()


def _start_tool(pid: int, *, is_silent: bool) -> subprocess.Popen[str] | None:
    for name, words in _installed(is_silent):
        with suppress(OSError):
            quiet = subprocess.DEVNULL
            return subprocess.Popen(
                [name, *words, str(pid)], stdin=quiet, stdout=subprocess.PIPE, stderr=quiet, text=True
            )
    return None


def _installed(is_silent: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, words in (_FOR_SILENCE, _FOR_NATIVE_CODE) if is_silent else (_FOR_NATIVE_CODE,):
        if (path := find(name)) is not None:
            yield path, words


def _outcome(tool: subprocess.Popen[str] | None) -> str:
    if tool is None:
        return ""
    try:
        text, _ = tool.communicate(timeout=_TOOL_S)
    except subprocess.TimeoutExpired:
        tool.kill()
        tool.communicate()
        return ""
    return f"{os.path.basename(str(tool.args[0]))}:\n{text[:_LARGEST].strip()}" if text.strip() else ""  # type: ignore[index]


# --- frames of native code -------------------------------------------------------------------------
#
# The frames of native code of a rank, read from outside by a tool of the node: py-spy, eu-stack or gdb.
#
# The tool stops the rank while it reads, for a fraction of a second up to a few seconds with gdb. So this is
# done only on request. A hang inquiry has a shorter limit (`launcher.health.stacks`).

_BUDGET_S = 25.0  # gdb reads the symbols of torch
_MOST_BYTES = 160 * 1024
_SHOWN_ERROR = 400
_TOOLS = (
    ("py-spy", ("dump", "--native", "--pid", "{pid}")),
    ("eu-stack", ("-n", "64", "-p", "{pid}")),
    (
        "gdb",
        (
            "-nx",
            "-q",
            "-batch",
            "-iex",
            "set debuginfod enabled off",
            "-ex",
            "thread apply all bt 64",
            "-p",
            "{pid}",
        ),
    ),
)
_NONE = (
    "no native frames: this node has no tool that reads them. Install one of py-spy "
    '(`pip install "ddp-launch[stacks]"`), elfutils (eu-stack) or gdb on it'
)


async def native_stacks(pid: int) -> str:
    """The frames as the first tool that succeeds prints them, or why there are none."""
    problems = []
    for name, words in _TOOLS:
        path = find(name)
        if path is None:
            continue
        text, problem = await _run(path, [word.format(pid=pid) for word in words])
        if text:
            return f"native frames, by {name}:\n{text}"
        problems.append(f"{name}: {problem}")
    return "; ".join(("no native frames", *problems)) if problems else _NONE


async def _run(path: str, words: list[str]) -> tuple[str, str]:
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            path, *words, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
    except OSError as error:
        return "", error.strerror or str(error)
    try:
        out, err = await asyncio.wait_for(process.communicate(), _BUDGET_S)
    except TimeoutError:
        return "", f"took longer than {_BUDGET_S:g} s"
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    text = out.decode(errors="replace").strip()
    if process.returncode == 0 and ("#0" in text or "Thread" in text):
        return text[:_MOST_BYTES], ""
    said = " ".join((err or out).decode(errors="replace").split())
    return "", f"exit code {process.returncode}: {said[-_SHOWN_ERROR:]}"


# --- the tools that read them ----------------------------------------------------------------------
#
# Finds the programs that read the stacks of a rank from outside: on PATH, and beside the interpreter of the launcher.
#
# `pip install "ddp-launch[stacks]"` puts py-spy there. The folder is not on PATH where an environment is used without
# being activated, as by `/opt/train/bin/ddp-launch`.


def find(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))
