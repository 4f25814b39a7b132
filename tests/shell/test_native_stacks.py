"""Native frames come from the first tool of the node that works; without one, the answer says what to install."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from launcher.health.native_stacks import native_stacks

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
    monkeypatch.setenv("PATH", str(tmp_path))
    return Tools(tmp_path)


def stacks(pid: int = 42) -> str:
    return asyncio.run(native_stacks(pid))


def test_without_a_tool_the_answer_says_what_to_install(tools: Tools) -> None:
    assert all(name in stacks() for name in ("py-spy", "eu-stack", "gdb"))


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
