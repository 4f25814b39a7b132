"""Runs a habit as a job, and returns the fingerprints of its ranks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from habits import Habit

_HERE = Path(__file__).parent
_BIN = Path(sys.executable).parent
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
_TIMEOUT_S = 300
NPROC = 2

_TORCHRUN, _DDP_LAUNCH = str(_BIN / "torchrun"), str(_BIN / "ddp-launch")
_REFUSED = "[DDP-4006]"

Seen = dict[str, Any]  # what one rank has looked at, by moment


class _NoTemplate(Exception):
    pass


class Place:
    """The folder of a habit. All jobs of a habit run there, one after the other."""

    def __init__(self, habit: Habit) -> None:
        self.habit = habit
        self._folder = Path(tempfile.mkdtemp(prefix="fingerprint-"))
        self._here, self._seen = self._folder / "here", self._folder / "seen"
        files = {**habit.files, habit.path: habit.source}
        for name, text in files.items():
            path = self._here / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for name, target in habit.links.items():
            (self._here / name).symlink_to(target)
        searched = self._here if "-m" in habit.words else (self._here / habit.path).parent
        shutil.copytree(_HERE / "fingerprint", searched / "fingerprint")
        (self._folder / "tmp").mkdir()
        self._python = _make_python(self._here / "env") if habit.own_python else sys.executable

    def close(self) -> None:
        """End also what a job has left: torchrun gives each rank a session of its own, and may wait for it forever."""
        while left := self._processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        shutil.rmtree(self._folder)

    def _processes(self) -> list[int]:
        """Those that were started with the folder of this place in their environment."""
        wanted, found = f"FINGERPRINT={self._seen}".encode(), []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if wanted in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                    found.append(int(name))
        return found

    def torchrun(self) -> list[Seen]:
        """By rank. A restart would show nothing new: torchrun starts new interpreters each time."""
        return self._ranks(_TORCHRUN, "--standalone")[0]

    def start(self, way: str) -> Iterator[tuple[str, list[Seen]]]:
        """Yield the ways in which ranks have started, and the ranks of each."""
        match way:
            case "cold":
                yield way, self._ranks(_DDP_LAUNCH, "--no-warm-start")[0]
            case "warm":
                yield from zip((way, "restart"), self._ranks(_DDP_LAUNCH, restarts=True), strict=True)
            case "pool":
                yield from self._pooled()

    def _pooled(self) -> Iterator[tuple[str, list[Seen]]]:
        """None if the pool refuses to make a template."""
        options = ("--warm-dir", str(self._folder / "pool"))
        with contextlib.suppress(_NoTemplate):
            try:
                self._run(
                    _DDP_LAUNCH, "warm", "start", *options, "--nproc-per-node", str(NPROC), *self.habit.words
                )
                yield "pool", self._ranks(_DDP_LAUNCH, *options)[0]
            finally:
                self._run(_DDP_LAUNCH, "warm", "stop", *options)

    def _ranks(self, command: str, *options: str, restarts: bool = False) -> list[list[Seen]]:
        self._seen.mkdir()
        if restarts:
            (self._seen / "fails").touch()
        words = ["--nproc-per-node", str(NPROC), "--max-restarts", "1", *options]
        said = self._run(command, *words, *self.habit.words)
        attempts = range(1 + restarts)
        files = [[self._seen / f"{attempt}.{rank}.json" for rank in range(NPROC)] for attempt in attempts]
        assert all(file.exists() for attempt in files for file in attempt), said
        found = [[json.loads(file.read_text()) for file in attempt] for attempt in files]
        shutil.rmtree(self._seen)
        return found

    def _run(self, *words: str) -> str:
        env = {name: os.environ[name] for name in _KEPT if name in os.environ}
        env |= {"FINGERPRINT": str(self._seen), "TMPDIR": str(self._folder / "tmp"), "PYTHONHASHSEED": "0"}
        env |= self.habit.env
        done = subprocess.run(
            [*self.habit.wrapper, self._python, *words],
            cwd=self._here,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
        )
        said = (done.stdout + done.stderr).decode(errors="replace")
        if _REFUSED in said:
            raise _NoTemplate(said)
        assert done.returncode == 0, f"{words}: exit code {done.returncode}\n{said}"
        return said


def _make_python(folder: Path) -> str:
    """A virtual environment with the packages of ours. It permits folders of the user, which ours may not."""
    packages = folder / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
    packages.mkdir(parents=True, exist_ok=True)
    ours = Path(sysconfig.get_path("purelib"))
    (packages / "00.pth").write_text(f"{ours}\n")  # read first: others import from there
    for file in ours.glob("*.pth"):
        shutil.copy(file, packages)
    base = os.path.realpath(sys.executable)
    (folder / "pyvenv.cfg").write_text(
        f"home = {os.path.dirname(base)}\ninclude-system-site-packages = true\n"
    )
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(base)
    return str(folder / "bin" / "python")


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each fact with its name: the keys on the way to it."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from flat(each, f"{path}/{key}" if path else key)
    else:
        yield path, value


def drawn_by_each(ranks: Sequence[Seen]) -> list[Seen]:
    """In the place of what ranks have drawn: whether they have drawn the same."""
    found = []
    for rank in ranks:
        moments = {}
        for moment, facts in rank.items():
            draws = {
                name: "the same"
                if len({each[moment]["draws"].get(name) for each in ranks}) == 1
                else "its own"
                for name in facts.get("draws", ())
            }
            moments[moment] = facts | {"draws": draws}
        found.append(moments)
    return found
