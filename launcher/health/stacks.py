"""Collects the Python stacks of a rank and the kernel state of its threads, within two seconds.

The rank's own interpreter comes first (launcher/template/stacks.py). If it does not answer, py-spy does, if it is
installed; eu-stack, if it is installed, adds the frames of native code. A process that is stopped, or in
uninterruptible sleep, cannot respond, and the report says so. All of this runs in a thread with a time limit, because
reading /proc of a hanging process can also block.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from launcher.health.stack_text import main_thread_first
from launcher.health.stack_tools import find
from launcher.template import tree
from launcher.template.process_stat import process_stat
from launcher.template.stacks import MEMORY, SIGNAL

if TYPE_CHECKING:
    from collections.abc import Iterator

BUDGET_S = 2.0
_ANSWER_S = 0.5  # the interpreter needs a few milliseconds
_CHECK_S = 0.01
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
    memory = _memory(pid)
    if memory is None or not _catches(pid, SIGNAL):
        return ""
    try:
        with open(memory, "rb") as file:
            before = os.fstat(file.fileno()).st_size
            os.kill(pid, SIGNAL)
            _await_growth(file.fileno(), before)
            file.seek(before)
            return main_thread_first(file.read(_LARGEST).decode(errors="replace"))
    except OSError:
        return ""


def _await_growth(fd: int, before: int) -> None:
    """Wait until the file has grown, and its size is the same in two consecutive checks."""
    deadline, size = time.monotonic() + _ANSWER_S, before
    while time.monotonic() < deadline:
        time.sleep(_CHECK_S)
        now = os.fstat(fd).st_size
        if now > before and now == size:
            return
        size = now


def _memory(pid: int) -> str | None:
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):
                if os.readlink(f"{folder}/{name}").startswith(f"/memfd:{MEMORY}"):
                    return f"{folder}/{name}"
    return None


def _catches(pid: int, signum: int) -> bool:
    caught = next((line for line in _lines(pid, "status") if line.startswith("SigCgt:")), "")
    return bool(caught) and bool(int(caught.split()[1], 16) >> (signum - 1) & 1)


# --- the kernel, and other tools ------------------------------------------------------------------------


def _kernel(pid: int) -> str:
    rows = []
    for task in _tasks(pid):
        state, name = _state(pid, task), _read(pid, f"task/{task}/comm")
        where = _read(pid, f"task/{task}/wchan")
        call = _read(pid, f"task/{task}/syscall").split(" ")[0]
        words = [f"thread {task} ({name}): {state}"]
        words += [f"in {where}"] if where not in ("", "0") else []
        words += [f"system call {call}"] if call.isdigit() else []
        rows.append(", ".join(words))
        rows += [f"    {line}" for line in _lines(pid, f"task/{task}/stack")[:16]]
    return "\n".join(rows)


def _tasks(pid: int) -> list[str]:
    with suppress(OSError):
        return sorted(os.listdir(f"/proc/{pid}/task"), key=int)[:_THREADS]
    return []


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
