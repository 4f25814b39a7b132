"""`--debug RANK`: that rank has the keyboard or an editor, and the others wait for it and are not called hung."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from launched import eventually
from seen import SeenTerminal, kind_of_terminal, on_terminal, seen

from launcher.settings.spec import Debug
from launcher.settings.values import BadValue, debug

if TYPE_CHECKING:
    from pathlib import Path

    from launched import Launch

__all__ = ["kind_of_terminal", "seen"]  # fixtures
TWO = ("--nproc-per-node", "2", "--log-prefix", "[{rank}] ", "--debug", "1", "--hang-timeout", "1")

# Every rank comes to the breakpoint. Rank 0 then waits for rank 1, for longer than --hang-timeout.
_ASKS = """
import os, sys, time
rank, over = os.environ["RANK"], os.path.join(os.environ["THERE"], "over")
from ddp.telemetry import status_page
page = status_page.page()
page.step()
x = 41
breakpoint()
if rank == "0":
    assert sys.stdin.read() == ""
    page.phase(4)
    while not os.path.exists(over):
        time.sleep(0.02)
else:
    open(over, "w").close()
    raise ValueError(f"x is {x}")
"""


def test_one_rank_has_the_keyboard_until_its_script_fails(seen: SeenTerminal, launch: Launch) -> None:
    job = launch(*TWO, source=_ASKS, fake_torch="", **on_terminal(seen))
    seen.forget_slave()
    seen.wait_until(lambda: seen.rows[-1:] == ["[1] (Pdb)"], "the prompt of rank 1")
    seen.type("x = 7\r")
    seen.wait_until(lambda: seen.rows[-2:] == ["[1] (Pdb) x = 7", "[1] (Pdb)"])
    seen.type("c\r")
    seen.wait_for("has ended with this exception")
    seen.wait_until(lambda: seen.rows[-1:] == ["[1] (Pdb)"], "the debugger after the exception")
    seen.type("p x * 6\r")
    seen.wait_for("[1] 42")
    seen.type("q\r")
    assert job.wait() == 1
    rows = " ".join(seen.end())
    assert "rank 1 alone reads from the terminal" in rows
    assert "ValueError: x is 7" in rows
    assert "no progress" not in rows


_FAKE_DEBUGPY = """
import os, time
def listen(address):
    print("listens at", *address, flush=True)
def wait_for_client():
    while not os.path.exists(os.path.join(os.environ["THERE"], "client")):
        time.sleep(0.02)
"""


def test_one_rank_waits_for_an_editor_before_its_script(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "debugpy.py").write_text(_FAKE_DEBUGPY)
    source = "import os; print('script of rank', os.environ['RANK'], os.environ['DDP_DEBUG'], flush=True)"
    words = ("--nproc-per-node", "2", "--debug", "1:5679")
    job = launch(*words, source=source, fake_torch="", env={"PYTHONPATH": str(tmp_path)})
    eventually(lambda: "script of rank 0 other" in job.stdout(), what="the other rank runs")
    eventually(lambda: "listens at 127.0.0.1 5679" in job.stdout())
    # It says so on the other stream, after that.
    eventually(lambda: "rank 1 waits for a debugger at 127.0.0.1:5679 (pid" in job.stderr())
    assert "script of rank 1" not in job.stdout()
    (job.there / "client").write_text("")
    assert job.wait() == 0
    assert "script of rank 1 127.0.0.1:5679" in job.stdout()


def test_a_rank_that_the_job_does_not_have_is_refused(launch: Launch) -> None:
    job = launch("--nproc-per-node", "2", "--debug", "7", source="")
    assert job.wait() == 2
    assert "invalid --debug '7': the ranks of this job are 0 to 1. Use a rank that exists." in job.stderr()


def test_an_editor_without_debugpy_is_refused_before_anything_starts(launch: Launch) -> None:
    job = launch("--debug", "0:5679", source="", env={"PYTHONPATH": "/nonexistent"})
    assert job.wait() == 2
    assert "debugpy is not installed" in job.stderr()
    assert "use --debug 0 for the terminal" in job.stderr()


@pytest.mark.parametrize(
    ("text", "found"),
    [("3", Debug(3)), ("0:5678", Debug(0, "127.0.0.1:5678")), ("12:[::1]:80", Debug(12, "[::1]:80"))],
)
def test_values_that_are_understood(text: str, found: Debug) -> None:
    assert debug(text) == found
    assert (found.of(found.rank), found.of(99)) == (found.address or "terminal", "other")


@pytest.mark.parametrize("text", ["", "x", "-1", "1:", "1:x", "1:0", "1:99999", ":5678"])
def test_values_that_are_refused(text: str) -> None:
    with pytest.raises(BadValue) as caught:
        debug(text)
    assert not caught.value.example or debug(caught.value.example)  # the caller writes the option before it
