"""One real `ddp-launch` command under test, and every process it ever started.

The command gets a variable of its own in the environment. All of its processes inherit it, whatever sessions they
open and however often they fork, so /proc tells at any time which of them are there.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.health import stacks
from launcher.template import cgroup

MARK = "LAUNCHED_BY_TEST"
_LOOK_EVERY_S = 0.005
SOON_S = 120.0  # on a machine that others use as well; what is waited for comes within a second

FAMILY = """
import os, signal, sys, time

def child(name, body):
    if os.fork() == 0:
        body(name)
        os._exit(0)

def path_of(name, rank):
    return os.path.join(os.environ["THERE"], f"{name}-{rank}")

def there(name):
    path = path_of(name, os.environ["RANK"])
    with open(path + ".part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(path + ".part", path)

def stay(name):
    there(name)
    while True:
        time.sleep(60)

def deaf(name):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stay(name)

def session(name):
    os.setsid()
    stay(name)

def daemon(name):
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        deaf(name)

def forking(name):
    os.setsid()
    there(name)
    while True:
        if os.fork():
            os._exit(0)
        time.sleep(0.001)

NAMES = ("child", "deaf", "session", "daemon", "forking")

def family():
    for name, body in zip(NAMES, (stay, deaf, session, daemon, forking)):
        child(name, body)

def left_of_both_families():
    pids = [int(open(path_of(name, rank)).read()) for name in NAMES for rank in (0, 1)]
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
"""


def eventually(condition: Callable[[], Any], timeout_s: float = SOON_S, what: str = "") -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what or condition}")
        time.sleep(_LOOK_EVERY_S)
    return value


def hail(process: subprocess.Popen[Any], signum: int) -> None:
    """Thousands a second, up to its last moment. More, and it would have time for nothing else."""
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        process.send_signal(signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.0001)
            return


def _last_of(journal: Path) -> str:
    words = [sys.executable, "-m", "rendezvous.control.ctl", "replay", "--all", str(journal)]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SOON_S)
    return "\n".join(done.stdout.splitlines()[-40:])


class Launched:
    """`source` is the script of the ranks; without it `words` are the whole command line.

    `before`: a program that runs the command, as a shell does.
    """

    def __init__(
        self,
        folder: Path,
        *words: str,
        source: str | None = None,
        env: dict[str, str] | None = None,
        fake_torch: str | None = None,
        before: tuple[str, ...] = (),
        **popen: Any,
    ) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.there = folder / "there"
        self.there.mkdir(parents=True)
        self.temp = Path(tempfile.mkdtemp(prefix="launched-"))  # short: sockets are made in it
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("DDP_", "PET_"))}
        self.env |= {MARK: self.mark, "THERE": str(self.there), "TMPDIR": str(self.temp)}
        self.env |= {"DDP_LAUNCH_HISTORY_DIR": "none"} | (env or {})  # nobody's history
        if fake_torch is not None:
            folders = [make_fake_torch(folder, fake_torch), (env or {}).get("PYTHONPATH", "")]
            self.env["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        if source is not None:
            script = folder / "train.py"
            script.write_text(source)
            words = tuple(str(script) if word == "SCRIPT" else word for word in words)
            words = words if str(script) in words else (*words, str(script))
        self.out, self.err = folder / "stdout", folder / "stderr"
        command = [*before, sys.executable, "-m", "launcher", *words]
        # Of jobs that were killed, one of which may have had the process number that this one gets.
        self._older_cgroups = set(glob.glob(cgroup.place("*")))
        with self.out.open("wb") as out, self.err.open("wb") as err:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            self.agent = subprocess.Popen(command, env=self.env, **{**streams, **popen})

    # --- what happens ------------------------------------------------------------------------------

    def is_there(self, *names: str) -> Callable[[], bool]:
        return lambda: all((self.there / name).exists() for name in names)

    def await_journals(self) -> None:
        """The agent and its service open theirs a second after the first event, and then keep them open."""

        def opened() -> int:
            count = 0
            for fd in Path(f"/proc/{self.agent.pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    count += os.readlink(fd).endswith(".ddpj")
            return count

        eventually(lambda: opened() == 2, what="both journals are open")

    def await_there(self, *names: str, timeout_s: float = SOON_S) -> None:
        def there_or_over() -> bool:
            return self.is_there(*names)() or self.agent.poll() is not None

        with contextlib.suppress(AssertionError):
            eventually(there_or_over, timeout_s)
        came = sorted(os.listdir(self.there))
        assert self.is_there(*names)(), f"of {names} came {came}; {self.processes()}: {self.stderr()}"

    def await_listening(self, port: int) -> None:
        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        eventually(listens, what=f"port {port} listens")

    def wait(self, timeout_s: float = SOON_S) -> int:
        try:
            return self.agent.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running: {self.circumstances()}") from None

    def send(self, signum: int) -> None:
        self.agent.send_signal(signum)

    def hail(self, signum: int) -> int:
        hail(self.agent, signum)
        return self.wait()

    def stdout(self) -> str:
        return self.out.read_text(errors="replace")

    def stderr(self) -> str:
        return self.err.read_text(errors="replace")

    def failure(self) -> Any:
        """The contents of failure.json."""
        paths = list(self.temp.glob("*/failure.json"))
        assert len(paths) == 1, (paths, self.stderr())
        (path,) = paths
        return json.loads(path.read_text())

    def said(self) -> str:
        """Standard error as running text, also what stands in the box."""
        return " ".join(self.stderr().replace("│", " ").split())

    def circumstances(self) -> str:
        """Where each process is (ranks, zygote and the keeper of the store have one command line), and what the agent
        and its service did last."""
        seen = [f"--- {pid}: {name}\n{stacks.look_at(pid)}" for pid, name in self.processes().items()]
        seen += [f"--- {path.name}\n{_last_of(path)}" for path in self.temp.rglob("*.ddpj")]
        return "\n".join([*seen, f"--- stderr\n{self.stderr()}"])

    # --- what is there -----------------------------------------------------------------------------

    def processes(self) -> dict[int, str]:
        """Those alive, zombies left out, the agent among them."""
        wanted = f"{MARK}={self.mark}".encode()
        found: dict[int, str] = {}
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found[int(name)] = Path(f"/proc/{name}/cmdline").read_text().replace("\0", " ")[:120]
        return found

    def zygote(self) -> int:
        """The agent's one child."""
        text = Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children").read_text().split()
        return int(text[0]) if text else 0

    def logs(self) -> list[Path]:
        return sorted(self.temp.iterdir())

    def cgroup(self) -> str:
        return next(iter(glob.glob(cgroup.place(f"{self.agent.pid}-*"))), "")

    def has_cgroup(self) -> bool:
        folder = self.cgroup()
        return folder not in self._older_cgroups and os.path.isdir(folder)

    def assert_nothing_left(self, timeout_s: float = SOON_S) -> None:
        """The logs may be; nothing else of it."""
        deadline = time.monotonic() + timeout_s
        while self.processes() or self.has_cgroup():
            left = (self.processes(), self.has_cgroup())
            assert time.monotonic() < deadline, f"left after {timeout_s:g} s: {left}\n{self.stderr()}"
            time.sleep(_LOOK_EVERY_S)
        # What multiprocessing makes belongs to the script: a killed process cannot take it away.
        ours = [path for path in self.temp.iterdir() if not path.name.startswith("pymp-")]
        assert all(path.name.startswith("ddp-launch-") for path in ours), ours

    def clean_up(self) -> None:
        self.agent.kill()  # not by its number, which may be another process's once it was waited for
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while left := [pid for pid in self.processes() if pid != self.agent.pid]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.agent.wait()
        # Where a test has killed both who would have removed it; what was killed just now may still be leaving.
        folder = self.cgroup()
        eventually(lambda: cgroup.remove(folder), what=f"{folder} is empty")
        shutil.rmtree(self.temp)


# What warm ranks count on: a generator to seed, and C++ streams that are set up.
_LIKE_TORCH = """
import ctypes, logging
logging.getLogger("ddp").setLevel(logging.ERROR)  # it warns of what this torch lacks
ctypes.CDLL("libstdc++.so.6")._ZNSt8ios_base4InitC1Ev(ctypes.create_string_buffer(8))
class default_generator:
    seed = manual_seed = initial_seed = staticmethod(lambda *_: 0)
class accelerator:
    current_accelerator = staticmethod(lambda: None)
"""


Launch = Callable[..., Launched]  # of the fixture of that name


def make_fake_torch(folder: Path, source: str = "") -> str:
    """A package called torch that is imported at once, with a store that nobody can talk to; the folder to search."""
    package = folder / "fake" / "torch"
    (package / "distributed").mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(_LIKE_TORCH + source)
    keeper = "class TCPStore:\n    def __init__(self, *args, **kwargs):\n        pass\n"
    (package / "distributed" / "__init__.py").write_text(keeper)
    return str(folder / "fake")
