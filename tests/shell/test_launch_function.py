"""ddp.launch: a function in every rank of a job, its results, and its errors as exceptions."""

from __future__ import annotations

import getpass
import io
import linecache
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from launched import eventually
from ports import free_port
from seen import SeenTerminal, kind_of_terminal, on_terminal, seen

import ddp
from ddp.launching import parcels
from ddp.launching.errors import name_of, options_of
from rendezvous.values.error_codes import Code

__all__ = ["kind_of_terminal", "seen"]  # fixtures
QUICK = {"warm_start": False, "nproc": 2}  # the functions here need no torch


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def calls_left(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob("ddp-launch-call-*"))


def test_it_returns_what_each_rank_returned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(factor: int, plus: int = 0) -> tuple[int, bytes]:
        rank = int(os.environ["RANK"])
        print(f"rank {rank} of {os.environ['WORLD_SIZE']}")
        return rank * factor + plus, bytes(8 << 20)

    found = ddp.launch(answer, 10, kwargs={"plus": 5}, **QUICK)
    assert [number for number, _ in found] == [5, 15]
    assert {len(data) for _, data in found} == {8 << 20}
    said = capsys.readouterr().out  # replaced by pytest, as in a notebook
    assert "rank 0 of 2" in said
    assert "rank 1 of 2" in said
    assert calls_left(tmp_path) == []


def test_a_failed_job_is_an_exception_with_the_traceback_of_the_rank(tmp_path: Path) -> None:
    def train() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("bad batch")
        threading.Event().wait(60)

    with pytest.raises(ddp.LaunchError, match=r"rank 1 on .* failed first: ValueError: bad batch") as caught:
        ddp.launch(train, **QUICK)
    error = caught.value
    assert (error.code, error.rank, error.exit_code) == (Code.RANK_EXCEPTION, 1, 1)
    assert 'raise ValueError("bad batch")' in error.traceback
    assert error.traceback.splitlines()[-1] in str(error)
    assert str(error).endswith(f"[{Code.RANK_EXCEPTION}]")
    assert Path(error.log_dir).is_dir()
    assert error.failure["first_cause"]["code"] == Code.RANK_EXCEPTION
    assert calls_left(tmp_path) == []


def test_a_traceback_shows_the_lines_of_a_cell_of_a_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code has no file; as IPython does, the calling process keeps its lines."""
    name, text = "<cell-3>", 'def of_a_cell():\n    raise ValueError("seen")\n'
    monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(keepends=True), name))
    space = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), space)
    with pytest.raises(ddp.LaunchError) as caught:
        ddp.launch(space["of_a_cell"], warm_start=False, nproc=1)
    assert '    raise ValueError("seen")\n' in caught.value.traceback


def test_what_cannot_be_sent_is_named(tmp_path: Path) -> None:
    lock = threading.Lock()

    def uses_a_lock() -> None:
        lock.acquire()

    with pytest.raises(ddp.LaunchError, match=r"cannot send .*uses_a_lock .*lock") as caught:
        ddp.launch(uses_a_lock, **QUICK)
    assert caught.value.code == Code.CANNOT_PICKLE

    def returns_a_lock() -> object:
        return threading.Lock()

    with pytest.raises(ddp.LaunchError, match="cannot return the result of rank") as caught:
        ddp.launch(returns_a_lock, **QUICK)
    assert caught.value.code == Code.CANNOT_PICKLE

    def returns_nothing() -> None:
        os._exit(0)

    with pytest.raises(ddp.LaunchError, match="left no result") as caught:
        ddp.launch(returns_nothing, **QUICK)
    assert caught.value.code == Code.RESULT_UNREADABLE
    assert calls_left(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ({"max_restrats": 3}, Code.UNKNOWN_OPTION, "Did you mean --max-restarts"),
        ({"nproc": 0}, Code.INVALID_VALUE, "--nproc-per-node"),
        ({"module": True}, Code.LAUNCH_ARGUMENT_INVALID, "the function is what runs"),
        ({"hosts": "a,b"}, Code.LAUNCH_ARGUMENT_INVALID, "other machines do not have the function"),
    ],
)
def test_wrong_options(options: dict[str, object], code: Code, says: str) -> None:
    with pytest.raises(ddp.LaunchError, match=says) as caught:
        ddp.launch(print, **options)
    assert caught.value.code == code


def test_where_it_cannot_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ddp.LaunchError, match="needs a function, not NoneType"):
        ddp.launch(None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    with pytest.raises(ddp.LaunchError, match="inside a rank") as caught:
        ddp.launch(print)
    assert caught.value.code == Code.LAUNCH_ARGUMENT_INVALID


@pytest.mark.parametrize("args", [5, "cpu"])
def test_arguments_that_are_no_tuple(args: object) -> None:
    """A string would be taken apart into its characters."""
    with pytest.raises(ddp.LaunchError, match=rf"One argument is args=\({args!r},\)") as caught:
        ddp.launch(print, args=args)
    assert caught.value.code == Code.LAUNCH_ARGUMENT_INVALID
    with pytest.raises(ddp.LaunchError, match="kwargs must be a dictionary"):
        ddp.launch(print, kwargs=args)


def test_a_function_of_a_script_needs_cloudpickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)

    def of_a_script() -> None: ...

    of_a_script.__module__ = "__main__"
    with pytest.raises(ddp.LaunchError, match="pip install cloudpickle") as caught:
        ddp.launch(of_a_script)
    assert caught.value.code == Code.PACKAGE_MISSING
    parcels.write_call(tmp_path, os.path.join, ("a", "b"), {})  # by its name, with Python's pickle
    assert parcels.call_in(tmp_path) == (os.path.join, ("a", "b"), {})


def test_options_are_flags_of_the_command() -> None:
    given = {"max_restarts": 3, "warm_start": False, "standalone": True, "log_dir": None, "bars": [0, 1]}
    assert options_of(given) == ["--max-restarts=3", "--no-warm-start", "--standalone", "--bars=0,1"]
    assert [name_of(each) for each in (lambda: 0, print, object())] == ["lambda", "print", "object"]


# --- at a terminal -------------------------------------------------------------------------------------------


def is_asking(terminal: SeenTerminal, times: int) -> bool:
    asked = [row for row in terminal.rows if row.startswith((">>>", "..."))]
    return len(asked) == times and terminal.rows[-1] in (">>>", "...")


def test_a_terminal_that_is_interrupted_is_at_its_prompt_again(seen: SeenTerminal, tmp_path: Path) -> None:
    """The interactive interpreter and the command share the terminal: Ctrl-C ends the job, and not the interpreter."""
    env = {**os.environ, "PYTHON_BASIC_REPL": "1", "PYTHONSTARTUP": ""}
    words = [sys.executable, "-q"]
    repl = subprocess.Popen(words, cwd=tmp_path, env=env, **on_terminal(seen))  # type: ignore[call-overload]
    seen.forget_slave()
    lines = (
        "import ddp, os, time",
        "def wait(s): print('rank', os.environ['RANK'], 'waits'); time.sleep(s); return s",
        "",
        "ddp.launch(wait, args=(300,), nproc=2, warm_start=False, progress='never')",
    )
    for number, line in enumerate(lines, 1):
        seen.wait_until(partial(is_asking, seen, number), "a prompt")
        seen.type(f"{line}\r")
    seen.wait_for("rank 1 waits")
    seen.wait_for("rank 0 waits")
    seen.type("\x03")
    seen.wait_until(lambda: seen.rows[-2:] == ["KeyboardInterrupt", ">>>"], "the prompt")
    seen.type("ddp.launch(os.getpid, nproc=1, warm_start=False, progress='never') != [os.getpid()]\r")
    seen.wait_until(lambda: seen.rows[-2:] == ["True", ">>>"], "the result")
    seen.type("\x04")
    assert repl.wait(60) == 0


# --- on several nodes ----------------------------------------------------------------------------------------

NODE = """\
import os, sys
import ddp

def fit(factor):
    return int(os.environ["RANK"]) * factor, os.environ["DDP_JOB_ID"]

print(ddp.launch(fit, args=(10,), nproc=2, warm_start=False, nnodes=2, rendezvous=sys.argv[1]))
"""


@pytest.mark.nightly(instead="::test_it_returns_what_each_rank_returned")
def test_each_node_gets_the_results_of_its_ranks(tmp_path: Path) -> None:
    """The folders of the function differ, and the nodes agree on the job and on the arguments of its script."""
    (tmp_path / "node.py").write_text(NODE)
    words = [sys.executable, str(tmp_path / "node.py"), f"127.0.0.1:{free_port()}"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    nodes = [subprocess.Popen(words, **streams) for _ in range(2)]  # type: ignore[call-overload]
    ended = [node.communicate(timeout=60) for node in nodes]
    job = f"{getpass.getuser()}-fit"
    expected = [[(0, job), (10, job)], [(20, job), (30, job)]]
    assert sorted(out.strip() for out, _ in ended) == list(map(str, expected)), ended
    assert "different arguments" not in "".join(err for _, err in ended)


# A heal in place: rank 0 keeps its process, and its result has the generation of its end.
HEALED = """\
import ddp

def fit():
    import os
    import torch
    from ddp import elastic
    ddp.init()
    model = ddp.DistributedDataParallel(torch.nn.Linear(2, 1))
    state = elastic.State(model=model, step=0)
    first = os.getpid()
    def train():
        while state.step < 4:
            if os.environ["RANK"] == "1" and state.step == 2 and os.environ["DDP_GENERATION"] == "1":
                os._exit(3)
            model(torch.ones(1, 2)).sum().backward()
            state.step += 1
            state.commit()
    state.run(train)
    kept = os.environ["DDP_GENERATION"], first == os.getpid()
    state.close()
    ddp.shutdown()
    return state.step, kept

print(ddp.launch(fit, nproc=2, max_restarts=1))
"""


@pytest.mark.nightly(instead=("::test_it_returns_what_each_rank_returned", "shell/test_heals.py"))
def test_a_job_that_was_healed_returns_results(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-"], input=HEALED, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == str([(4, ("2", True))] * 2), done.stderr
    assert "; pausing the other ranks" in done.stderr


# --- as a program --------------------------------------------------------------------------------------------

# A shell in the background starts programs with SIGINT ignored.
SCRIPT = """\
import os, signal, sys, threading
import ddp

signal.signal(signal.SIGINT, signal.default_int_handler)

class Point:
    def __init__(self, x):
        self.x = x

def train(x):
    if x < 0:
        print("ready", os.getpid(), flush=True)
        threading.Event().wait(600)
    return Point(x + int(os.environ["RANK"]))

points = ddp.launch(train, args=(int(sys.argv[1]),), nproc=2, warm_start=False)
print([isinstance(each, Point) and each.x for each in points], "torch" in sys.modules)
"""


def started(tmp_path: Path, number: int) -> subprocess.Popen[str]:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, str(tmp_path / "script.py"), str(number)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout
    lines = [process.stdout.readline() for _ in range(2)]
    return [int(line.split()[-1]) for line in lines]


def test_a_script_without_a_guard_and_without_torch(tmp_path: Path) -> None:
    out, err = started(tmp_path, 4).communicate(timeout=60)
    assert out == "[4, 5] False\n", err


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_caller_is_stopped(tmp_path: Path, signum: signal.Signals) -> None:
    process = started(tmp_path, -1)
    ranks = ranks_of(process)
    process.send_signal(signum)
    _, err = process.communicate(timeout=60)  # the command holds the pipes as long as it runs
    eventually(lambda: all(map(is_gone, ranks)), what="an orphan is gone when somebody has waited for it")
    if signum == signal.SIGINT:
        assert err.rstrip().endswith("KeyboardInterrupt")
        assert process.returncode in (1, 130, -signal.SIGINT)


def test_an_interrupt_stops_a_job_whose_output_is_relayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, where the kernel gets SIGINT and nobody else."""

    class Shown(io.StringIO):
        def write(self, text: str) -> int:
            written = super().write(text)
            if self.getvalue().count("ready") == 2 and "ready" in text:
                os.kill(os.getpid(), signal.SIGINT)
            return written

    shown = Shown()
    monkeypatch.setattr(sys, "stdout", shown)

    def wait() -> None:
        print("ready", os.getpid(), flush=True)
        threading.Event().wait(600)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            ddp.launch(wait, **QUICK)
    finally:
        signal.signal(signal.SIGINT, before)
    pids = [int(line.split()[-1]) for line in shown.getvalue().splitlines() if "ready" in line]
    assert len(pids) == 2
    assert all(map(is_gone, pids))
