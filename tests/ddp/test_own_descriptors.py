"""A program that closes descriptors that it does not know, and uses their numbers, is left alone by the guard."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import os, sys, threading
from ddp.telemetry import guard
watcher = guard.start()
before = set(map(int, os.listdir("/proc/self/fd")))
os.closerange(3, 4096)
files = [os.open(sys.argv[1], os.O_RDWR | os.O_APPEND) for _ in range(max(before))]
watcher.wake()
watcher.report("an error")
watcher.end()
assert not any(thread.name == "ddp-guard" for thread in threading.enumerate())
assert os.read(files[0], 100) == b"of the program"
"""


def test_numbers_of_the_program_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("of the program")
    words = [sys.executable, "-c", PROGRAM, str(file)]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert file.read_text() == "of the program"
