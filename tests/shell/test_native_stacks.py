"""Native frames come from the first tool of the node that works; without one, the answer says what to install."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from launcher.health.stacks import find, native_stacks

if TYPE_CHECKING:
    from pathlib import Path


class Tools:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def install(self, name: str, script: str) -> None:
        path = self._folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    (tmp_path / "on-path").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "on-path"))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    return Tools(tmp_path / "on-path")


def stacks(pid: int = 42) -> str:
    return asyncio.run(native_stacks(pid))


def test_without_a_tool_the_answer_says_what_to_install(tools: Tools) -> None:
    assert all(name in stacks() for name in ("ddp-launch[stacks]", "eu-stack", "gdb"))


def test_the_tool_of_an_environment_that_is_not_active(tools: Tools, tmp_path: Path) -> None:
    Tools(tmp_path).install("py-spy", 'echo "Thread 42 (idle)"')
    assert stacks() == "native frames, by py-spy:\nThread 42 (idle)"


def test_the_next_tool_is_used_if_the_first_may_not_trace(tools: Tools) -> None:
    tools.install("py-spy", "echo 'Permission denied' >&2; exit 1")
    tools.install("gdb", 'echo "#0 main () of $*"')
    found = stacks()
    assert found.startswith("native frames, by gdb:\n#0 main ()")
    assert found.endswith("-p 42")


def test_the_reasons_of_all_tools_are_reported(tools: Tools) -> None:
    tools.install("py-spy", "echo 'Permission denied' >&2; exit 1")
    tools.install("eu-stack", "exit 2")
    assert stacks() == "no native frames; py-spy: exit code 1: Permission denied; eu-stack: exit code 2: "


SLEEPS = """
import time
def a_function_to_find():
    print(flush=True)
    time.sleep(60)
a_function_to_find()
"""


@pytest.mark.nightly(instead="shell/test_native_stacks.py")
@pytest.mark.skipif(find("py-spy") is None, reason='pip install "ddp-launch[stacks]" installs py-spy')
def test_py_spy_shows_python_and_native_frames() -> None:
    """Of a process that sleeps in C, below a Python function."""
    with subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = stacks(process.pid)
        process.kill()
    assert found.startswith("native frames, by py-spy:")
    assert "a_function_to_find" in found
    assert "sleep" in found
