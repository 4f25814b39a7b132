"""Runs a program under torchrun and under ddp-launch, and says what came of it in terms that both share."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launched import make_fake_torch

from launcher.template.tree import is_cleaner

if TYPE_CHECKING:
    from collections.abc import Callable

    from random_programs import Program

ROOT = Path(__file__).parents[2]
_MARK = "UNCHANGED_RUN"
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH")
_TORCH_VERSION = f"__version__ = {importlib.metadata.version('torch')!r}\n"
LIMIT_S = 100.0  # beyond what any program takes, torchrun's 30 s included

# What each launcher says itself on stderr.
_TORCHRUNS = re.compile(r"[WEI]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ torch/distributed/.*")
# Python's resource tracker ends after its rank: what it says comes before the end of the job, or not.
_LATE = "resource_tracker"
_PIDS = re.compile(r"(?<=subprocess )\d+|(?<=pid=)\d+")
_LABEL = re.compile(r"\[[^\]:]+:(\d+)\] ?")
_LABEL_OF_TORCHRUN = re.compile(r"\[default\d\]:")
# What observes a process group (docs/fresh-interpreter.md), in a list of all threads.
_OUR_THREADS = re.compile(r'Thread 0x.*:\n(?:  File .*\n)*?  File "ROOT/ddp/telemetry/.*\n(?:  File .*\n)*\n')
_STDLIB_FRAMES = re.compile(
    r'^( *)File "(?:[^"\n]*/lib/python3[^"\n]*|<frozen [^"\n]*>)", line \d+, in ([^\n]*)\n(?:\1 {2}[^\n]*\n)*',
    re.M,
)


@dataclass
class Outcome:
    code: int  # with torchrun: 0, or what the first rank to fail ended with
    first: int | None = None  # the rank that failed first
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)
    logs: dict[str, str] = field(default_factory=dict)  # by attempt, rank and stream
    files: dict[str, str] = field(default_factory=dict)
    own: list[str] = field(default_factory=list)  # what the launcher said itself
    left: list[str] = field(default_factory=list)  # processes that outlived it

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class _Launcher:
    """A server of a launcher, which has imported it."""

    def __init__(self, name: str) -> None:
        self._name = name
        words = [sys.executable, str(Path(__file__).with_name("launcher_server.py")), name]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/", env=_kept()
        )

    def _run(self, run: _Run, *words: str) -> int:
        order = {
            "cwd": str(run.here),
            "env": run.env,
            "words": [self._name, "--standalone", "--log-dir", str(run.logs), *words, *run.words],
            "stdin": str(run.stdin),
            "stdout": str(run.out),
            "stderr": str(run.err),
            "report": str(run.report),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        with _Limit(lambda: os.kill(pid, signal.SIGKILL)):
            return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Torchrun(_Launcher):
    def __init__(self) -> None:
        super().__init__("torchrun")

    def run(self, program: Program, folder: Path) -> Outcome:
        run = _Run(program, folder)
        outcome = Outcome(self._run(run), left=run.end_what_is_left())
        failure = json.loads(run.report.read_text()) if run.report.exists() else None
        if isinstance(failure, int):
            outcome.code = 128 + failure
        elif isinstance(failure, list):
            outcome.first = failure[0]
            outcome.code = failure[1] if failure[1] > 0 else 128 - failure[1]
        elif failure is not None:
            outcome.own.append(failure)
        outcome.out = run.lines(run.out, None)[0]
        lines = [line for line in run.lines(run.err, None)[0] if not _TORCHRUNS.match(line)]
        outcome.err = sorted(_TORCHRUNS.sub("", line) for line in lines)
        for path in sorted(run.logs.rglob("*.log")):
            *_, attempt, rank, name = path.parts
            outcome.logs[f"{int(attempt.removeprefix('attempt_'))}.{rank}.{name}"] = run.text(path)
        outcome.files = run.files()
        return outcome


class DdpLaunch(_Launcher):
    def __init__(self) -> None:
        super().__init__("ddp-launch")

    def run(self, program: Program, folder: Path) -> Outcome:
        run = _Run(program, folder)
        code = self._run(run, "--preflight", "off", *([] if program.is_warm else ["--no-warm-start"]))
        run.await_cleaners()
        outcome = Outcome(code, left=run.end_what_is_left())
        if run.report.exists():
            outcome.own.append(run.report.read_text())
        for failure in run.logs.glob("*/failure.json"):
            cause = json.loads(failure.read_text())["first_cause"]
            outcome.first = cause and cause["rank"]
        (outcome.out, more), (outcome.err, own) = run.lines(run.out, _LABEL), run.lines(run.err, _LABEL)
        outcome.own += own + more
        for path in sorted(run.logs.rglob("std*.log")):
            *_, generation, rank, name = path.parts
            at = int(generation.removeprefix("generation_")) - 1
            outcome.logs[f"{at}.{rank.removeprefix('rank_')}.{name}"] = run.text(path)
        outcome.files = run.files()
        return outcome


def _kept() -> dict[str, str]:
    return {name: os.environ[name] for name in _KEPT if name in os.environ}


class _Limit:
    """Calls `kill` if the block takes too long; then the program is not one that ends."""

    def __init__(self, kill: Any) -> None:
        self._timer = threading.Timer(LIMIT_S, kill)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()


class _Run:
    """The folder of one run, made anew: HERE is where the program is and works."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.program, self.folder = program, folder
        shutil.rmtree(folder, ignore_errors=True)
        self.here, self.logs = folder / "here", folder / "logs"
        self.out, self.err, self.stdin = folder / "out", folder / "err", folder / "stdin"
        self.report = folder / "report"
        path = self.here / program.path
        path.parent.mkdir(parents=True)
        (folder / "tmp").mkdir()
        path.write_text(f"#!{sys.executable}\n{program.source}")
        path.chmod(0o755)
        for each in (self.out, self.err, self.stdin):
            each.touch()
        self._prepare_stdin()
        self.mark = uuid.uuid4().hex
        self.env = _kept() | {
            _MARK: self.mark,
            "HERE": str(self.here),
            "TMPDIR": str(folder / "tmp"),
            "LANG": "C.UTF-8",
        }
        if not program.needs_torch:  # what takes most of a warm start, and is not used
            self.env["PYTHONPATH"] = make_fake_torch(folder, _TORCH_VERSION)
        self.env |= program.env
        self.words = [
            "--nproc-per-node",
            str(program.nproc),
            *program.flags,
            *program.entry,
            *program.arguments,
        ]
        self._before = set(self._tree())

    def _prepare_stdin(self) -> None:
        text = self.program.stdin
        if text is None:
            self.stdin = Path(os.devnull)
        elif self.program.is_piped:
            self.stdin.unlink()
            os.mkfifo(self.stdin)
            threading.Thread(target=self.stdin.write_text, args=(text,), daemon=True).start()
        else:
            self.stdin.write_text(text)

    def lines(self, path: Path, label: re.Pattern[str] | None) -> tuple[list[str], list[str]]:
        """Those of the ranks, in the order of the alphabet; and those without a label, if there are labels."""
        with path.open(newline="", errors="replace") as file:
            text = file.read()
        if label is None:
            text = self.shared(_LABEL_OF_TORCHRUN.sub("", text))
            return sorted(text.removesuffix("\n").split("\n") if text else ()), []
        of_ranks: dict[str, list[str]] = {}
        for line in text.removesuffix("\n").split("\n") if text else ():
            if _LATE in line:
                continue
            found = label.match(line)
            of_ranks.setdefault(found[1] if found else "", []).append(label.sub("", line, count=1))
        said = {rank: self.shared("\n".join(lines)).split("\n") for rank, lines in of_ranks.items()}
        own = said.pop("", [])
        return sorted(line for lines in said.values() for line in lines), own

    def text(self, path: Path) -> str:
        with path.open(newline="", errors="replace") as file:
            return self.shared(file.read())

    def shared(self, text: str) -> str:
        """Without what names this run, its processes and this machine."""
        places = {
            "HERE": self.here,
            "FOLDER": self.folder,
            "VENV": sys.prefix,
            "ROOT": ROOT,
            "PYTHON": sys.base_prefix,
        }
        for name, of in places.items():
            text = text.replace(str(of), name)
        text = text.replace(self.mark, "MARK")
        text = _OUR_THREADS.sub("", text)
        text = "\n".join(line for line in text.split("\n") if _LATE not in line)
        text = _STDLIB_FRAMES.sub(r"\1File LIB in \2\n", text + "\n")[:-1]
        text = _PIDS.sub("PID", re.sub(r"0x[0-9a-f]{6,}", "0x", text))
        return "\n".join(_short(line) for line in text.split("\n"))

    def files(self) -> dict[str, str]:
        return {name: of for name, of in self._tree().items() if name not in self._before}

    def _tree(self) -> dict[str, str]:
        found = {}
        for path in sorted(self.here.rglob("*")):
            name = str(path.relative_to(self.here))
            if "__pycache__" not in name and not name.startswith("met."):
                found[name] = "folder" if path.is_dir() else _short(self.text(path))
        return found

    def await_cleaners(self) -> None:
        """Resource trackers end by themselves, soon after the last process of their rank."""
        _wait_while(lambda: any(map(is_cleaner, _processes(self.mark))))

    def end_what_is_left(self) -> list[str]:
        """Ends them, and returns what they are called."""
        found = _processes(self.mark)
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        _wait_while(lambda: bool(_processes(self.mark)))
        return sorted(found.values())


def _wait_while(holds: Callable[[], bool], limit_s: float = 60.0) -> None:
    give_up_at = time.monotonic() + limit_s
    while holds() and time.monotonic() < give_up_at:
        time.sleep(0.01)


def _processes(mark: str) -> dict[int, str]:
    wanted = f"{_MARK}={mark}".encode()
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in Path(entry.path, "environ").read_bytes():
                    found[int(entry.name)] = Path(entry.path, "comm").read_text().strip()
    return found


def _short(text: str) -> str:
    if len(text) <= 300:
        return text
    return f"{text[:80]}... {len(text)} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
