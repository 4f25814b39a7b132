"""Does what a page says, from top to bottom, as a reader with an empty folder would: real commands, real processes.

Each terminal of the page has its own shell. A page with terminals node1, node2, ... is played on hosts of the lab, each
with its own network, name and folder; `scp` copies between these folders there, since the hosts run no ssh server.
`sudo` is possible there: what it changes ends with the host.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lab_host
import pytest
from lab_host import eventually
from lab_network import Lab
from page_blocks import blocks, missing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lab_host import Host
    from page_blocks import Block

_SOON_S = 90.0
_SCP = '#!/bin/sh -e\nfor last; do :; done\nwhile [ $# -gt 1 ]; do cp "$1" "../${last%%:*}/"; shift; done\n'
_SUDO = '#!/bin/sh\nexec "$@"\n'  # on hosts of the lab the reader is root
ABOUT_JOBS = ("DDP_", "PET_", "TORCHELASTIC_", "SLURM_", "NCCL_", "PYTEST", "OMP_")


class Terminal:
    def __init__(self, folder: Path, env: dict[str, str], host: Host | None) -> None:
        self._folder, self._env, self._host = folder, env, host
        self._process: Any = None
        self._block: Block | None = None
        self._log = Path()

    def start(self, block: Block, number: int) -> None:
        self.finish()
        self._block, self._log = block, self._folder.parent / f"output-{number}"
        script = "set -eo pipefail\n" + "\n".join(block.commands)
        words = ("bash", "-c", f'cd "$0"; {script}', str(self._folder))
        with self._log.open("wb") as out:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            if self._host is not None:
                self._process = self._host.start(*words, env=self._env, **streams)
            else:
                self._process = subprocess.Popen(words, env=self._env, start_new_session=True, **streams)

    def await_output(self) -> None:
        """The lines that the page shows, or the end of the command."""
        block = self._block
        assert block is not None
        eventually(
            lambda: not missing(block, self.output()) or self._process.poll() is not None,
            _SOON_S,
            f"{block}: {missing(block, self.output())} in {self.output()}",
        )
        assert missing(block, self.output()) == [], f"{block}: {self.output()}"

    def finish(self) -> None:
        """The command has ended, as the page says it does, and has printed what the page shows."""
        block, self._block = self._block, None
        if block is None:
            return
        stopped = block.said.get("ends") == "Ctrl-C"
        if stopped:
            self._interrupt()
        eventually(lambda: self._process.poll() is not None, _SOON_S, f"{block} ends: {self.output()}")
        expected = block.said.get("exit code", "130" if stopped else "0")
        code = self._process.poll()
        code = 128 - code if code < 0 else code  # as a shell says it
        assert str(code) in expected.split(" or "), f"{block}: {code}: {self.output()}"
        assert missing(block, self.output()) == [], f"{block}: {self.output()}"

    def _interrupt(self) -> None:
        os.killpg(self._process.pid, signal.SIGINT)

    def output(self) -> str:
        """With the name that the pages use for the one machine."""
        text = self._log.read_text(errors="replace")
        return text if self._host else text.replace(socket.gethostname().partition(".")[0], "node1")

    def close(self) -> None:
        if self._process is not None and self._host is None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def environment(folder: Path) -> dict[str, str]:
    """A reader's: nothing about jobs is set, and jobs of others on this machine are not seen."""
    bins = folder / "bin"
    bins.mkdir()
    for name, text in (("scp", _SCP), ("sudo", _SUDO)):
        (bins / name).write_text(text)
        (bins / name).chmod(0o755)
    scratch = folder / "tmp"
    scratch.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith(ABOUT_JOBS)}
    path = f"{bins}:{Path(sys.executable).parent}:{env['PATH']}"
    runtime = tempfile.mkdtemp(prefix="run-")  # short: sockets are made in it
    own = {"PATH": path, "LC_ALL": "C.UTF-8", "TMPDIR": str(scratch), "XDG_RUNTIME_DIR": runtime}
    return env | own | {"HOME": str(folder), "DDP_LAUNCH_HISTORY_DIR": str(folder / "history")}


def machines(found: list[Block]) -> list[str]:
    """The title of a terminal begins with its machine: "node2, second terminal"."""
    titles = (block.title.partition(",")[0] for block in found if block.language == "console")
    return sorted({title for title in titles if title.startswith("node")})


def play(
    page: Path, folder: Path, files: Mapping[str, str] | None = None, more: Mapping[str, str] | None = None
) -> None:
    """`files`: what the reader has already. `more`: of the environment."""
    found = blocks(page)
    names = machines(found)
    if names and (reason := lab_host.what_is_missing()):
        pytest.skip(reason)
    with ExitStack() as stack:
        hosts = stack.enter_context(Lab(0, *names)).hosts if names else []
        env = environment(folder) | dict(more or {})
        stack.callback(shutil.rmtree, env["XDG_RUNTIME_DIR"], ignore_errors=True)
        for name in names or ["work"]:
            (folder / name).mkdir()
            for file, text in (files or {}).items():
                (folder / name / file).write_text(text)
        terminals: dict[str, Terminal] = {}
        for number, block in enumerate(found):
            home = names[0] if names else "work"
            if block.is_file:
                (folder / home / block.title).write_text(block.text)
            if block.language != "console" or not block.is_run:
                continue
            if block.title not in terminals:
                machine = block.title.partition(",")[0] or home
                host = next((host for host in hosts if host.name == machine), None)
                terminals[block.title] = Terminal(folder / (host.name if host else "work"), env, host)
                stack.callback(terminals[block.title].close)
            terminal = terminals[block.title]
            terminal.start(block, number)
            terminal.await_output() if block.title else terminal.finish()
        for terminal in reversed(terminals.values()):  # what looks at a job ends before the job
            terminal.finish()
