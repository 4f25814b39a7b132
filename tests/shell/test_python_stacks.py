"""Taking the stacks of a process does not change it, whatever its threads do at that moment."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.health.stacks import python_stacks

if TYPE_CHECKING:
    from collections.abc import Iterator

LISTENS = (
    "import ctypes, os, threading, time\nfrom launcher.template import stack_signal\nstack_signal.listen()\n"
)
BUSY = (
    LISTENS
    + """
def deeper(left):
    if left == 0:
        raise ValueError
    return deeper(left - 1)

def a_busy_function():
    while True:
        try:
            deeper(30)
        except ValueError:
            sum(each for each in range(20))
            exec("sorted(range(9), key=lambda each: -each)")

threads = [threading.Thread(target=a_busy_function, daemon=True) for _ in range(3)]
for each in threads:
    each.start()
print("ready", flush=True)
a_busy_function()
"""
)
HOLDS_THE_GIL = (
    LISTENS + "read = os.pipe()[0]\nprint('ready', flush=True); ctypes.PyDLL(None).read(read, bytes(1), 1)\n"
)
HAS_NATIVE_THREADS = (
    LISTENS
    + """
import zlib
libc = ctypes.CDLL(None)
native = ctypes.c_ulong()
libc.pthread_create(ctypes.byref(native), None, ctypes.cast(libc.pause, ctypes.c_void_p), None)
print("ready", flush=True)
time.sleep(600)
"""
)
TAKINGS = 50


@contextmanager
def running(source: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_threads_that_compute_live_on() -> None:
    with running(BUSY) as process:
        found = [python_stacks(process.pid) for _ in range(TAKINGS)]
        assert process.poll() is None
    whole = [text for text in found if text.count("in a_busy_function") == 4]
    assert all(text.startswith("Main thread (most recent call first):\n  File ") for text in whole)
    assert len(whole) > TAKINGS // 2, "one of them may miss a thread that gets no CPU in time"


def test_two_who_ask_at_the_same_time_get_whole_stacks() -> None:
    with running(BUSY) as process, ThreadPoolExecutor(2) as pool:
        found = list(pool.map(python_stacks, [process.pid] * 8))
        assert process.poll() is None
    for text in filter(None, found):
        assert text.count("most recent call first") == text.count("\n\n") + 1


def test_native_code_that_holds_the_gil() -> None:
    with running(HOLDS_THE_GIL) as process:
        assert (
            python_stacks(process.pid)
            == 'Main thread (most recent call first):\n  File "<string>", line 5 in <module>'
        )


def test_a_native_thread_writes_nothing() -> None:
    with running(HAS_NATIVE_THREADS) as process:
        found = python_stacks(process.pid)
        assert found.count("most recent call first") == 1
        assert found.startswith("Main thread")


def test_the_memory_does_not_grow() -> None:
    with running(HOLDS_THE_GIL) as process:
        assert len({python_stacks(process.pid) for _ in range(5)}) == 1
        memory = next(Path(f"/proc/{process.pid}/fd").glob("[5-9][0-9][0-9]"))
        assert memory.stat().st_size == 0


def test_a_process_that_does_not_listen_gets_no_signal() -> None:
    with running("print('ready', flush=True)\nimport time\ntime.sleep(600)") as process:
        assert python_stacks(process.pid) == ""
        assert process.poll() is None


def test_a_process_that_has_ended() -> None:
    with running(HOLDS_THE_GIL) as process:
        process.kill()
        process.wait()
        assert python_stacks(process.pid) == ""
