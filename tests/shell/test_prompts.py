"""A person who types to a rank: prompts, debuggers, and a terminal that another program needs."""

from __future__ import annotations

import os
import signal
import sys
import termios
from typing import TYPE_CHECKING

import pytest
from launched import eventually
from seen import SeenTerminal, kind_of_terminal, on_terminal, seen

from launcher.health.keyboard_wait import someone_may_type, waits_for_input
from launcher.template.tree import process_stat

if TYPE_CHECKING:
    from pathlib import Path

    from launched import Launch

ONE = ("--nproc-per-node", "1", "--log-prefix", "")
__all__ = ["kind_of_terminal", "seen"]  # fixtures
TWO = ("--nproc-per-node", "2", "--log-prefix", "[{rank}] ")


_ASKS = """
import os, sys, time
rank = os.environ["RANK"]
print("\\r50%", end="", file=sys.stderr, flush=True)
if rank == "1":
    x = 41
    breakpoint()
    print("x is", x)
    print("hello", input("name? "))
    open(os.path.join(os.environ["THERE"], "over"), "w").close()
while not os.path.exists(os.path.join(os.environ["THERE"], "over")):
    time.sleep(0.05)
"""


def test_a_debugger_and_a_question_work_in_one_of_several_ranks(seen: SeenTerminal, launch: Launch) -> None:
    job = launch(*TWO, source=_ASKS, fake_torch="", **on_terminal(seen))
    seen.forget_slave()
    seen.wait_until(lambda: seen.rows[-1:] == ["[1] (Pdb)"], "a prompt without a bar or a status below it")
    for typed, answer in (("p x + 1", "42"), ("x = 7\x7f8", ""), ("c", "")):
        seen.type(typed + "\r")
        shown = typed.replace("7\x7f", "")
        seen.wait_until(lambda shown=shown, answer=answer: _follows(seen.rows, f"[1] (Pdb) {shown}", answer))
    seen.wait_until(lambda: seen.rows[-1:] == ["[1] name?"])
    seen.type("Ann\r")
    assert job.wait() == 0
    rows = seen.end()
    assert "[1] x is 8" in rows
    assert rows[rows.index("[1] name? Ann") + 1] == "[1] hello Ann"


def _follows(rows: list[str], line: str, answer: str) -> bool:
    return line in rows and (not answer or rows[rows.index(line) + 1 :][:1] == [f"[1] {answer}"])


_UNFINISHED = """
import os, time
print("loading ...", end="", flush=True)
while not os.path.exists(os.path.join(os.environ["THERE"], "over")):
    time.sleep(0.05)
print("done")
"""


def test_unfinished_text_of_a_rank_that_asks_nothing_leaves_the_status(
    seen: SeenTerminal, launch: Launch
) -> None:
    job = launch(*ONE, source=_UNFINISHED, fake_torch="", **on_terminal(seen))
    seen.forget_slave()
    seen.wait_until(lambda: seen.rows[:1] == ["loading ..."] and "rank running" in seen.rows[-1])
    (job.there / "over").touch()
    assert job.wait() == 0
    assert seen.end() == ["loading ...done"]


_DIES_WHILE_IT_EDITS = """
import os, signal, sys, termios
mode = termios.tcgetattr(0)
mode[3] &= ~(termios.ECHO | termios.ICANON)
termios.tcsetattr(0, termios.TCSANOW, mode)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_dies_while_a_line_is_edited_leaves_the_terminal_as_it_was(
    seen: SeenTerminal, launch: Launch
) -> None:
    before = termios.tcgetattr(seen.slave)
    job = launch(*ONE, source=_DIES_WHILE_IT_EDITS, fake_torch="", **on_terminal(seen))
    assert job.wait() == 128 + signal.SIGKILL
    assert termios.tcgetattr(seen.slave) == before


_RESIZED = """
import os, signal, sys, threading
from pathlib import Path
resized = threading.Event()
signal.signal(signal.SIGWINCH, lambda *_: resized.set())
Path(os.environ["THERE"], "ready").touch()
resized.wait()
print("size", *os.get_terminal_size())
"""


def test_ranks_are_told_of_a_new_size(seen: SeenTerminal, launch: Launch) -> None:
    job = launch(*ONE, source=_RESIZED, fake_torch="", **on_terminal(seen))
    seen.forget_slave()
    job.await_there("ready")
    seen.resize(100, 30)
    seen.wait_for("size 100 30")
    assert job.wait() == 0


_AS_A_SHELL = """
import os, subprocess, sys, termios
mode = termios.tcgetattr(0)
mode[3] |= termios.TOSTOP
termios.tcsetattr(0, termios.TCSANOW, mode)
sys.exit(subprocess.run(sys.argv[1:], process_group=0).returncode)
"""


_IN_THE_BACKGROUND = """
import sys, time
for _ in range(30):
    print("\\r50%", end="", file=sys.stderr)
    time.sleep(0.05)
print("a line")
sys.exit(3)
"""


def test_in_the_background_lines_are_written_and_nothing_is_drawn(seen: SeenTerminal, launch: Launch) -> None:
    """With `stty tostop`, which stops a program that writes there from the background."""
    shell = (sys.executable, "-c", _AS_A_SHELL)
    job = launch(*ONE, source=_IN_THE_BACKGROUND, fake_torch="", before=shell, **on_terminal(seen))
    seen.forget_slave()
    assert job.wait() == 3
    rows = seen.end()
    assert sorted(rows[:2]) == ["50%", "a line"]
    assert "job failed" in rows[2]
    assert b"rank running" not in seen.raw
    before_the_box = seen.raw.partition(b"job failed")[0]  # which shows the last lines on stderr again
    assert before_the_box.count(b"50%") == 1  # what it left as its last line


# --- a rank that waits for a person is not hung --------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "shows_prompt", "waits"),
    [
        ("input()", False, True),
        ("import os; os.read(0, 1)", False, True),
        ("import select; select.select([0], [], [])", False, True),
        ("import select; p = select.poll(); p.register(0, 1); p.poll()", True, True),
        ("import select; p = select.poll(); p.register(0, 0); p.poll()", False, False),
        ("import select; p = select.epoll(); p.register(0, 1); p.poll()", False, True),
        ("import select; p = select.epoll(); p.register(1, 4); p.modify(1, 0); p.poll()", True, False),
        (
            "import select, threading, tty; tty.setraw(0); p = select.epoll(); p.register(0, 1);"
            "t = threading.Thread(target=p.poll); t.start(); t.join()",
            False,
            True,
        ),
        ("import time; time.sleep(600)", True, False),
        ("import subprocess; subprocess.run(['sleep', '600'])", True, None),
        ("import os; r, w = os.pipe(); os.read(r, 1)", True, False),
        ("import select, os; r, w = os.pipe(); select.select([r], [], [])", True, False),
    ],
)
def test_a_process_that_waits_for_input_is_recognized(
    source: str, shows_prompt: bool, waits: bool | None, seen: SeenTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, (told, tell) = os.dup(0), os.pipe()
    os.dup2(seen.slave, 0)
    words = [sys.executable, "-c", f"import os, sys; os.write(1, b'ready'); {source}"]
    to_tell = [(os.POSIX_SPAWN_DUP2, tell, 1)]
    pid = os.posix_spawn(sys.executable, words, os.environ, file_actions=to_tell, setsid=True)
    try:
        assert someone_may_type()
        assert os.read(told, 5) == b"ready"
        eventually(lambda: (it := process_stat(pid)) and it.state == "S", what="it sleeps")
        eventually(lambda: waits_for_input(pid, shows_prompt) is waits, what=f"{waits}")
        assert waits_for_input(pid, shows_prompt) is waits
    finally:
        os.dup2(ours, 0)
        for fd in (ours, told, tell):
            os.close(fd)
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert not waits_for_input(pid, shows_prompt)


_ASKS_TWICE = """
import os, threading, time
first = input("name? ")
second = input("and yours? ")
print("hello", first, second)
threading.Timer(0.5, lambda: os.write(2, b"(a thread)")).start()
input("go on? ")
"""


def test_a_question_that_was_answered_ends_its_line(
    seen: SeenTerminal, launch: Launch, tmp_path: Path
) -> None:
    """The terminal shows the answer and ends the line; the rank writes no newline of its own."""
    job = launch(
        "--log-dir", str(tmp_path / "logs"), *ONE, source=_ASKS_TWICE, fake_torch="", **on_terminal(seen)
    )
    seen.forget_slave()
    for question, answer in (("name?", "Ann"), ("and yours?", "Bob"), ("go on? (a thread)", "")):
        seen.wait_until(lambda question=question: seen.rows[-1:] == [question])
        seen.type(answer + "\r")
    assert job.wait() == 0
    assert seen.end() == ["name? Ann", "and yours? Bob", "hello Ann Bob", "go on? (a thread)"]
    (log,) = (tmp_path / "logs").glob("*/generation_1/rank_0/stderr.log")
    assert log.read_text().split("\n") == ["name? ", "and yours? ", "go on? (a thread)", ""]


_DEBUGGED = """
import os, threading
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(80):
    if step == 60 and dist.get_rank() == 0:
        threading.Timer(5.0, lambda: print("long enough")).start()
        input("go on? ")
    dist.all_reduce(torch.ones(1))
dist.barrier()
"""


@pytest.mark.nightly(instead="::test_a_process_that_waits_for_input_is_recognized")
def test_the_rank_that_asks_and_those_that_wait_for_it_are_not_hung(
    seen: SeenTerminal, launch: Launch
) -> None:
    job = launch(*TWO, "--hang-timeout", "1s,first-step=60", source=_DEBUGGED, **on_terminal(seen))
    seen.forget_slave()
    seen.wait_for("[0] go on?")
    seen.wait_for("long enough")
    seen.type("yes\r")
    assert job.wait() == 0
    assert "restart" not in " ".join(row for row in seen.end() if "ranks" not in row)
