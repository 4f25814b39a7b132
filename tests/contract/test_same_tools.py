"""Tools that hook into the interpreter find it as they left it: coverage, pdb, faulthandler, site hooks, variables."""

from __future__ import annotations

import sqlite3
import sys
from typing import TYPE_CHECKING

import pytest
from recordings import FAILS, answer, first_cause
from side_by_side import PLAIN, WARM, ddp_launch, python, script

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# A plain start is a new interpreter, in which little of ours could show.
_BOTH = [pytest.param(WARM, id="warm"), pytest.param(PLAIN, id="plain", marks=pytest.mark.nightly)]
_PLAIN_START = "warm start is not possible"
_BRANCHES = "import os\n\nif os.environ['RANK'] == '0':\n    print('zero')\nelse:\n    print('one')\n"


def _lines_measured(folder: Path) -> list[int]:
    found: set[int] = set()
    for data in folder.glob(".coverage*"):
        with sqlite3.connect(data) as database:
            for (bits,) in database.execute("select numbits from line_bits"):
                found |= {8 * at + bit for at, byte in enumerate(bits) for bit in range(8) if byte >> bit & 1}
        database.close()
    return sorted(found)


def test_coverage_run_as_the_module(light: dict[str, str], tmp_path: Path) -> None:
    script(tmp_path, _BRANCHES)
    words = ("-m", "coverage", "run", "--parallel-mode", "train.py")
    ended = ddp_launch(*words, cwd=tmp_path, nproc=2, env=light).ok()
    assert sorted(ended.out.splitlines()) == ["one", "zero"]
    assert _lines_measured(tmp_path) == [1, 3, 4, 6]


def test_coverage_started_by_a_site_hook(tmp_path: Path) -> None:
    script(tmp_path, _BRANCHES)
    script(tmp_path, "[run]\nparallel = true\n", "coverage.ini")
    script(tmp_path / "site", "import coverage\ncoverage.process_startup()\n", "sitecustomize.py")
    env = {"COVERAGE_PROCESS_START": str(tmp_path / "coverage.ini"), "PYTHONPATH": str(tmp_path / "site")}
    ended = ddp_launch("train.py", cwd=tmp_path, nproc=2, env=env).ok()
    assert {1, 3, 4, 6} <= set(_lines_measured(tmp_path))
    assert ended.err.count(_PLAIN_START) == 1


def test_a_site_hook_of_the_user_runs_in_each_rank(light: dict[str, str], tmp_path: Path) -> None:
    note = "import os\nwith open(os.environ['SEEN'], 'a') as file:\n"
    note += "    print(os.getpid(), os.environ.get('RANK', 'none'), file=file)\n"
    script(tmp_path / "site", note, "sitecustomize.py")
    script(tmp_path, "import os, sys\nassert 'sitecustomize' in sys.modules\nprint(os.getpid())\n")
    env = {"SEEN": str(tmp_path / "seen"), "PYTHONPATH": f"{tmp_path / 'site'}:{light['PYTHONPATH']}"}
    ended = ddp_launch("train.py", cwd=tmp_path, nproc=2, env=env).ok()
    ranks = ended.out.split()
    assert len(ranks) == 2
    seen = dict(line.split() for line in (tmp_path / "seen").read_text().splitlines())
    assert sorted(seen[pid] for pid in ranks) == ["0", "1"]
    assert ended.err.count(_PLAIN_START) == 1


@pytest.mark.parametrize("options", _BOTH)
def test_debugger_on_a_pipe(options: Sequence[str], light: dict[str, str], tmp_path: Path) -> None:
    script(tmp_path, "x = 41\nbreakpoint()\nprint('x is', x)\n")
    commands = "p x\nx = 42\nw\nc\n"
    expected = python("train.py", cwd=tmp_path, stdin=commands).ok()
    assert "x is 42" in expected.out
    ended = ddp_launch("train.py", cwd=tmp_path, options=options, stdin=commands, env=light).ok()
    assert ended.out == expected.out


@pytest.mark.nightly(instead=("::test_debugger_on_a_pipe", "::test_variables_of_the_interpreter"))
def test_postmortem_debugger_as_the_module(tmp_path: Path) -> None:
    script(tmp_path, "print('x is', 6 * 7)\n")
    ended = ddp_launch("-m", "pdb", "train.py", cwd=tmp_path, stdin="c\nq\n").ok()
    assert "x is 42" in ended.out


@pytest.mark.parametrize("options", _BOTH)
def test_faulthandler(options: Sequence[str], light: dict[str, str], tmp_path: Path) -> None:
    script(tmp_path, "import faulthandler\n\n\ndef crash():\n    faulthandler._sigsegv()\n\n\ncrash()\n")
    env = light | {"PYTHONFAULTHANDLER": "1"}
    ended = ddp_launch("train.py", cwd=tmp_path, options=options, env=env)
    assert ended.code == 128 + 11
    assert "line 5 in crash" in ended.err
    assert "line 8 in <module>" in ended.err


_SHOW_SITE = """
import sys
import sitecustomize, usercustomize
print(sitecustomize.__file__, sitecustomize.__name__, sitecustomize.marks, usercustomize.marks)
print(sys.modules["sitecustomize"] is sitecustomize)
"""


@pytest.mark.parametrize("options", _BOTH)
def test_the_users_site_hooks_run(options: Sequence[str], light: dict[str, str], tmp_path: Path) -> None:
    for name in ("sitecustomize", "usercustomize"):
        script(tmp_path / "site", "marks = globals().get('marks', 0) + 1\n", f"{name}.py")
    script(tmp_path, _SHOW_SITE)
    env = {"PYTHONPATH": f"{tmp_path / 'site'}:{light['PYTHONPATH']}", "HOME": str(tmp_path)}
    fresh = python("train.py", cwd=tmp_path, env=env)
    if (
        fresh.code != 0
    ):  # a virtual environment has no user site: then usercustomize is for a script to import
        pytest.fail(fresh.err)
    assert ddp_launch("train.py", cwd=tmp_path, options=options, env=env).ok().out == fresh.out


def test_a_failing_site_hook_complains_as_ever_and_the_script_runs(
    light: dict[str, str], tmp_path: Path
) -> None:
    script(tmp_path / "site", "raise RuntimeError('hook')\n", "sitecustomize.py")
    script(tmp_path, "print('runs')\n")
    env = {"PYTHONPATH": f"{tmp_path / 'site'}:{light['PYTHONPATH']}"}
    assert python("train.py", cwd=tmp_path, env=env).ok().out == "runs\n"
    ended = ddp_launch("train.py", cwd=tmp_path, env=env).ok()
    assert ended.out == "runs\n"
    assert "RuntimeError: hook" in ended.err


_VARIABLES = {
    "warnings are errors": {"PYTHONWARNINGS": "error"},
    "no bytecode": {"PYTHONDONTWRITEBYTECODE": "1"},
    "start-up file": {"PYTHONSTARTUP": "/nonexistent/startup.py"},
    "development mode": {"PYTHONDEVMODE": "1"},
    "UTF-8 off": {"PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1:replace"},
    "optimized": {"PYTHONOPTIMIZE": "2"},
}
_SHOW_FLAGS = (
    '"""doc"""\nimport sys\n'
    "print(sys.flags, sys.warnoptions, sys.dont_write_bytecode, __debug__, __doc__, sys.stdout.encoding)\n"
)


_QUICK = ("development mode", "UTF-8 off")


@pytest.mark.parametrize(
    "which",
    [*_QUICK, *(pytest.param(each, marks=pytest.mark.nightly) for each in _VARIABLES if each not in _QUICK)],
)
def test_variables_of_the_interpreter(which: str, light: dict[str, str], tmp_path: Path) -> None:
    script(tmp_path, _SHOW_FLAGS)
    env = light | _VARIABLES[which]
    expected = python("train.py", cwd=tmp_path, env=env).ok()
    assert ddp_launch("train.py", cwd=tmp_path, env=env).ok().out == expected.out


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    script(tmp_path / "stub" / "torch", "raise ImportError('no torch on this machine')\n", "__init__.py")
    return {"PYTHONPATH": str(tmp_path / "stub")}


def test_without_torch_ranks_start_plain(without_torch: dict[str, str], tmp_path: Path) -> None:
    script(tmp_path, "import os\nprint('rank', os.environ['RANK'], os.environ['PYTHONPATH'])\n")
    ended = ddp_launch(
        "train.py", cwd=tmp_path, nproc=2, env=without_torch, options=["--max-restarts", "1"]
    ).ok()
    stub = without_torch["PYTHONPATH"]
    assert sorted(ended.out.splitlines()) == [f"rank 0 {stub}", f"rank 1 {stub}"]
    assert ended.err.count(_PLAIN_START) == 1
    assert "no torch on this machine" in ended.err


def test_without_torch_programs_run(without_torch: dict[str, str], tmp_path: Path) -> None:
    ended = ddp_launch(
        "sh", "-c", "echo rank $RANK of $WORLD_SIZE", cwd=tmp_path, options=["--no-python"], env=without_torch
    ).ok()
    assert (ended.out, ended.err) == ("rank 0 of 1\n", "")


def test_another_interpreter_starts_plain(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    script(tmp_path, "import sys\nprint(sys.executable)\n")
    ended = ddp_launch("train.py", cwd=tmp_path, env={"PYTHON_EXEC": str(other)}).ok()
    assert ended.out == f"{other}\n"
    assert ended.err.count(_PLAIN_START) == 1


def test_whoever_started_the_job_finds_the_first_cause_where_torchrun_leaves_it(tmp_path: Path) -> None:
    script(tmp_path, FAILS)
    path = tmp_path / "error.json"
    assert ddp_launch("train.py", cwd=tmp_path, env={"TORCHELASTIC_ERROR_FILE": str(path)}).code == 1
    assert first_cause(path) == answer("first cause")


def test_a_file_for_the_first_cause_that_cannot_be_written_is_named(
    light: dict[str, str], tmp_path: Path
) -> None:
    script(tmp_path, "raise SystemExit(7)\n")
    gone = tmp_path / "gone" / "error.json"
    ended = ddp_launch("train.py", cwd=tmp_path, env=light | {"TORCHELASTIC_ERROR_FILE": str(gone)})
    assert ended.code == 7
    assert f"cannot write TORCHELASTIC_ERROR_FILE {gone}: No such file" in ended.err
