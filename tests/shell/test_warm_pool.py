"""The warm pool: a second command starts from a template; whatever goes wrong with that, the job runs as without it."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from launched import FAMILY, SOON_S, eventually, make_fake_torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NIGHTLY = pytest.mark.nightly(
    instead=(
        "::test_what_a_rank_would_inherit_otherwise_starts_cold",
        "::test_nothing_is_left_of_a_job_that_is_ended",
        "::test_a_killed_zygote_takes_its_ranks_along",
        "core/test_pool_key.py",
        "shell/test_freshness.py",
    )
)

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SAYS = "import os, sys\nprint('ran', os.environ['RANK'], sys.argv[1:])\n"
# A rank that stays, with processes of its own that would like to outlive it.
STAYS = f"{FAMILY}\nimport sys\nfamily()\nstay('rank')\n"


class User:
    """Someone with a pool of their own, who starts one command after the other in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.there = folder, folder / "there"
        self.there.mkdir()
        self.pool = folder / "pool"
        self.env = {
            name: value for name, value in os.environ.items() if not name.startswith(("DDP_", "PET_"))
        }
        self.env |= {
            "PYTHONPATH": f"{make_fake_torch(folder)}{os.pathsep}{ROOT}",
            "DDP_LAUNCH_WARM_DIR": str(self.pool),
            "THERE": str(self.there),
        }
        self.script(SAYS)

    def script(self, text: str) -> None:
        (self.folder / "train.py").write_text(text)

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-P", "-m", "launcher", *words]  # as ddp-launch: without the folder

    def run(
        self, *words: str, env: dict[str, str] | None = None, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        more = {"input": "", "capture_output": True, **more}
        return subprocess.run(
            self.command(*words),
            cwd=self.folder,
            env=self.env | (env or {}),
            text=True,
            timeout=SOON_S,
            **more,
        )

    def launch(self, *words: str, **more: Any) -> str:
        """Run the script with two ranks; return what it printed."""
        done = self.run("--nproc-per-node", "2", "--log-prefix", "", *(words or ("train.py",)), **more)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    def begin(self, *words: str, **popen: Any) -> subprocess.Popen[bytes]:
        command = self.command("--nproc-per-node", "2", *(words or ("train.py",)))
        return subprocess.Popen(command, cwd=self.folder, env=self.env, **popen)

    def warm(self, *words: str) -> str:
        return self.run("warm", *words).stdout

    def start_with_template(self, *words: str) -> int:
        said = self.warm("start", *words, "--nproc-per-node", "2", "train.py")
        found = re.search(r"ready \(pid (\d+),", said)
        assert found, said
        return int(found[1])

    def served(self) -> list[int]:
        """How many commands each template has served."""
        rows = [line.split() for line in self.warm("status").splitlines()]
        return [int(row[row.index("MiB") + 1]) for row in rows if "MiB" in row and row[-1] == "train.py"]

    def status(self) -> str:
        return self.warm("status")

    def await_template(self) -> None:
        eventually(lambda: self.served() == [0], what="the template that the command has left")

    def left_over(self) -> list[int]:
        """Processes that wrote their number into the folder, and live."""
        pids = [int(path.read_text()) for path in self.there.iterdir() if not path.name.endswith(".part")]
        return [pid for pid in pids if _lives(pid)]


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    user = User(tmp_path)
    yield user
    for pid in user.left_over():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    user.warm("stop")


def ran(*args: str) -> list[str]:
    return [f"ran {rank} {list(args)}" for rank in (0, 1)]


def test_the_second_command_starts_from_the_template_of_the_first(user: User) -> None:
    assert user.run("warm", "status").returncode == 1
    assert "is on" in user.warm("start")
    assert sorted(user.launch("train.py", "a").splitlines()) == ran("a")
    user.await_template()
    user.script(SAYS.replace("ran", "edited"))  # the script is read when it runs
    said = user.launch("train.py", "b", "c", env={"SHLVL": "7", "TMUX": "another window"})
    assert sorted(said.splitlines()) == [line.replace("ran", "edited") for line in ran("b", "c")]
    assert user.served() == [1]
    assert user.run("warm", "status").returncode == 0
    assert "1 template has ended" in user.warm("stop")
    assert not [name for name in os.listdir(user.pool) if name.endswith((".sock", ".json"))]
    assert len(user.launch("train.py").splitlines()) == 2  # and without a pool again
    assert "started cold: there is no template yet" in user.status()


CALLS = """
import os, sys, ddp

def edited(number):
    return number, os.environ["RANK"], "ctypes" in sys.modules  # of a fork

print(*ddp.launch(edited, args=(int(sys.argv[1]),), nproc=2, progress="never"))
"""


@NIGHTLY
def test_functions_of_ddp_launch_start_from_one_template(user: User) -> None:
    """A call has a folder and a file of its own, which are variables of its ranks."""
    user.warm("start")

    def call(number: int, text: str = CALLS) -> str:
        (user.folder / "calls.py").write_text(text)
        words = [sys.executable, "calls.py", str(number)]
        done = subprocess.run(
            words, cwd=user.folder, env=user.env, capture_output=True, text=True, timeout=SOON_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def served() -> list[str]:
        return [
            line.split("MiB")[1].split()[0]
            for line in user.status().splitlines()
            if line.endswith("ddp.launching.rank") and "MiB" in line
        ]

    assert call(1) == "(1, '0', True) (1, '1', True)\n"
    eventually(lambda: served() == ["0"], what="the template that the first call has left")
    assert call(2) == "(2, '0', True) (2, '1', True)\n"
    assert call(3, CALLS.replace("number, os", "number + 1, os")) == "(4, '0', True) (4, '1', True)\n"
    assert served() == ["2"]


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "variable": ({"env": {"OMP_NUM_THREADS": "3"}}, "variable OMP_NUM_THREADS has another value"),
    "new variable": ({"env": {"PYTHONSAFEPATH": ""}}, "variable PYTHONSAFEPATH is set"),
    "umask": ({"preexec_fn": lambda: os.umask(0o077)}, "process Umask is 0077, not 0022"),
    "nice": ({"preexec_fn": lambda: os.nice(1)}, "process nice is "),
    "limit": ({"preexec_fn": lambda: _limit_core()}, "limit CORE is "),
    "ignored signal": (
        {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)},
        "process SigIgn",
    ),
}


@pytest.mark.parametrize(
    "which",
    [
        "variable",
        *(
            pytest.param(each, marks=pytest.mark.nightly)
            for each in ("limit", "new variable", "umask", "nice", "ignored signal")
        ),
    ],
)
def test_what_a_rank_would_inherit_otherwise_starts_cold(which: str, user: User) -> None:
    change, words = CHANGES[which]
    os.umask(0o022)
    user.start_with_template()
    assert sorted(user.launch(**change).splitlines()) == ran()
    assert f"train.py started cold: no template fits: {words}" in user.status()
    eventually(lambda: user.served() == [0, 0], what="a template for each of them")


@NIGHTLY
def test_a_variable_matters_only_if_the_imports_have_read_it(user: User) -> None:
    torch = user.folder / "fake" / "torch" / "__init__.py"
    torch.write_text(torch.read_text() + "import os\nREAD = os.environ.get('READ')\n")
    user.script("import os, torch\nprint(torch.READ, os.environ.get('RUN_ID'), flush=True)\n")
    user.start_with_template()
    assert user.launch(env={"RUN_ID": "7"}).splitlines() == ["None 7"] * 2
    assert user.launch(env={"RUN_ID": "8"}).splitlines() == ["None 8"] * 2
    again = user.run("warm", "start", "--nproc-per-node", "2", "train.py", env={"RUN_ID": "9"})
    assert "is ready" in again.stdout
    assert user.served() == [2]
    assert user.launch(env={"READ": "now"}).splitlines() == ["now None"] * 2
    assert "train.py started cold: no template fits: variable READ is set" in user.status()


def _limit_core() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (1 if soft == 0 else 0, hard))


def test_an_edited_module_ends_the_template(user: User) -> None:
    user.start_with_template()
    torch = user.folder / "fake" / "torch" / "__init__.py"
    torch.write_text(torch.read_text() + "VERSION = 'new'\n")
    user.script("import torch\nprint(torch.VERSION)\n")
    assert user.launch().split() == ["new", "new"]
    assert f"started cold: {torch} has changed" in user.status()
    user.await_template()
    assert user.launch().split() == ["new", "new"]
    assert user.served() == [1]


@NIGHTLY
def test_a_file_beside_the_script_that_hides_a_module_starts_cold(user: User) -> None:
    user.start_with_template()
    (user.folder / "logging.py").write_text("raise SystemExit('the wrong one')\n")
    done = user.run("--nproc-per-node", "2", "--log-prefix", "", "train.py")
    assert "warm start is not possible" in done.stderr
    assert "logging.py has the same name as a module that torch imports" in user.status()


@NIGHTLY
def test_two_commands_at_once_are_both_served(user: User) -> None:
    user.start_with_template()
    user.script(STAYS)
    ranks = [user.there / f"rank-{rank}" for rank in (0, 1)]
    jobs = []
    for _ in range(2):
        jobs.append(user.begin())
        eventually(lambda: user.served() == [len(jobs)])
        eventually(lambda: all(rank.exists() for rank in ranks), what="the ranks of this one run")
        for rank in ranks:
            rank.unlink()
    assert "started cold" not in user.status()
    for job in jobs:
        job.send_signal(signal.SIGINT)
    assert [job.wait(SOON_S) for job in jobs] == [130, 130]


@NIGHTLY
def test_the_pool_ends_when_nobody_uses_it(user: User) -> None:
    pid = user.start_with_template("--warm-idle", "500ms")
    eventually(lambda: not _lives(pid))
    eventually(lambda: user.run("warm", "status").returncode == 1)
    assert not list(user.pool.glob("*.sock"))
    assert "no command for 0.5 s" in user.status()


def test_a_killed_template_does_no_harm(user: User) -> None:
    pid = user.start_with_template()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not _lives(pid))
    assert sorted(user.launch().splitlines()) == ran()
    assert "started cold: its template cannot be reached" in user.status()
    user.await_template()


@NIGHTLY
def test_a_template_that_does_not_answer_is_left_and_can_be_stopped(user: User) -> None:
    pid = user.start_with_template()
    os.kill(pid, signal.SIGSTOP)
    assert sorted(user.launch().splitlines()) == ran()
    assert "its template does not answer" in user.status()
    assert "ended" in user.warm("stop")
    eventually(lambda: not _lives(pid))


def _running(user: User) -> subprocess.Popen[bytes]:
    user.script(STAYS)
    with open(user.folder / "stderr", "w") as stderr:
        job = user.begin(stderr=stderr)
    names = ("rank", "child", "deaf", "session", "daemon")
    eventually(lambda: all((user.there / f"{name}-{rank}").exists() for name in names for rank in (0, 1)))
    assert user.served() == [1]
    return job


@pytest.mark.parametrize(
    "signum",
    [
        signal.SIGKILL,
        *(pytest.param(each, marks=pytest.mark.nightly) for each in (signal.SIGINT, signal.SIGTERM)),
    ],
)
def test_nothing_is_left_of_a_job_that_is_ended(signum: int, user: User) -> None:
    template = user.start_with_template("--warm-idle", "1h")
    job = _running(user)
    job.send_signal(signum)
    assert job.wait(SOON_S) == (-signum if signum == signal.SIGKILL else 128 + signum)
    eventually(lambda: not user.left_over(), what="nothing is left")
    eventually(lambda: not _children(template), what="its guardian has ended")


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(each) for each in file.read().split()]


@pytest.mark.parametrize("which", ["zygote", pytest.param("guardian", marks=pytest.mark.nightly)])
def test_a_killed_zygote_takes_its_ranks_along(which: str, user: User) -> None:
    template = user.start_with_template()
    job = _running(user)
    (guardian,) = _children(template)
    (zygote,) = _children(guardian)
    os.kill(zygote if which == "zygote" else guardian, signal.SIGKILL)
    if which == "zygote":
        assert job.wait(SOON_S) == 128 + signal.SIGKILL
        assert "ended unexpectedly: killed by SIGKILL" in (user.folder / "stderr").read_text()
    else:  # the job goes on without it
        assert _lives(zygote)
        job.send_signal(signal.SIGINT)
        assert job.wait(SOON_S) == 130
    eventually(lambda: not user.left_over(), what="nothing is left")


@NIGHTLY
def test_a_job_outlives_its_template(user: User) -> None:
    user.start_with_template()
    job = _running(user)
    assert "running jobs go on" in user.warm("stop")
    assert len(user.left_over()) >= 2
    job.send_signal(signal.SIGINT)
    assert job.wait(SOON_S) == 130
    eventually(lambda: not user.left_over(), what="nothing is left")


@NIGHTLY
def test_the_timers_of_a_rank_end_it(user: User) -> None:
    """Its process is not below the agent."""
    user.start_with_template()
    user.script(
        "import json, os, time\n"
        "timer = {'pid': os.getpid(), 'scope_id': 'step', 'expiration_time': 0, 'signal': 9}\n"
        "with open(os.environ['TORCHELASTIC_TIMER_FILE'], 'w') as pipe:\n"
        "    pipe.write(json.dumps(timer) + '\\n')\n"
        "time.sleep(600)\n"
    )
    done = user.run("--nproc-per-node", "2", "--rank-timers", "train.py")
    assert done.returncode == 128 + signal.SIGKILL
    assert 'timer "step"' in done.stderr
    assert user.served() == [1]


@NIGHTLY
def test_standard_input_is_that_of_the_command(user: User) -> None:
    user.start_with_template()
    user.script("import sys\nprint(sys.stdin.seekable(), sys.stdin.isatty(), sys.stdin.readline())\n")
    assert user.launch("--nproc-per-node", "2", "train.py", input="typed\n").split().count("typed") == 1
    with open(user.folder / "train.py") as file:
        assert "True False import" in user.launch("train.py", stdin=file, input=None)
    ours, theirs = pty.openpty()
    os.write(ours, b"one\ntwo\n")
    said = user.launch("train.py", stdin=theirs, input=None)
    os.close(theirs)
    os.close(ours)
    assert sorted(said.split()) == ["False", "False", "True", "True", "one", "two"]
    assert user.served() == [3]


@NIGHTLY
def test_what_the_imports_print_is_printed_each_time(user: User) -> None:
    torch = user.folder / "fake" / "torch" / "__init__.py"
    torch.write_text(torch.read_text() + "import sys\nprint('deprecated', file=sys.stderr)\n")
    cold = user.run("train.py").stderr
    user.start_with_template()
    assert [user.run("--nproc-per-node", "2", "train.py").stderr.count("deprecated") for _ in range(2)] == [
        1,
        1,
    ]
    assert cold.count("deprecated") == 1
    assert user.served() == [2]


def test_a_template_that_cannot_be_made_is_explained(user: User) -> None:
    (user.folder / "fake" / "torch" / "__init__.py").write_text("raise ImportError('no such library')\n")
    done = user.run("warm", "start", "--nproc-per-node", "2", "train.py")
    assert done.returncode == 1
    assert "cannot import torch in the Python of the ranks (ImportError: no such library)" in done.stderr
    done = user.run("warm", "start", "--no-python", "true")
    assert (done.returncode, "its ranks are not forked" in done.stderr) == (1, True)


@NIGHTLY
def test_a_command_without_the_pool(user: User) -> None:
    user.start_with_template()
    user.launch("--no-warm-pool", "train.py")
    user.launch(env={"DDP_LAUNCH_WARM_POOL": "0"})
    user.launch("--no-warm-start", "train.py")
    assert user.served() == [0]
    assert "started cold" not in user.status()


@NIGHTLY
def test_there_are_no_more_templates_than_permitted(user: User) -> None:
    first = user.start_with_template("--warm-templates", "1")
    user.launch(env={"OMP_NUM_THREADS": "3"})
    eventually(lambda: not _lives(first))
    user.await_template()
    assert "another one takes its place" in user.status()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_gets_nothing(user: User) -> None:
    user.start_with_template()
    (socket,) = user.pool.glob("*.sock")
    user.pool.chmod(0o777)  # even if the folder were open
    socket.chmod(0o777)
    for folder in (user.folder, *user.folder.parents):
        if folder.stat().st_uid == 0 and folder != folder.parent and str(folder).startswith("/tmp/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    asks = "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\n"
    asks += 's.settimeout(60)\ns.sendall(b\'\\0\\0\\0\\x11{"want": "state"}\')\nprint(s.recv(100))\n'
    as_nobody = "setpriv --reuid 65534 --regid 65534 --clear-groups /usr/bin/env".split()
    done = subprocess.run(
        [*as_nobody, "python3", "-c", asks, str(socket)],
        capture_output=True,
        text=True,
        timeout=SOON_S,
    )
    assert "state" not in done.stdout
    assert done.stdout.strip() == "b''" or re.search("ConnectionReset|BrokenPipe", done.stderr), done.stderr
    assert "can be used by others" in user.run("warm", "status").stderr
    assert sorted(user.launch().splitlines()) == ran()  # cold: the folder is not private any more
    user.pool.chmod(0o700)
    assert user.served() == [0]


def test_wrong_words(user: User) -> None:
    for words, said in {
        (): "a word is missing",
        ("begin",): "unexpected begin",
        ("stop", "train.py"): "unexpected argument train.py",
        ("start", "--warm-memory", "much"): "not an amount of memory",
        ("start", "--warm-templates", "0"): "invalid --warm-templates '0'",
    }.items():
        done = user.run("warm", *words)
        assert done.returncode == 2
        assert said in done.stderr
