"""Without the folder of a wing, everything else works, and a request for the wing says what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import floor_plan as plan
import pytest
import tidy
from tidy import ROOT

if TYPE_CHECKING:
    from pathlib import Path

MODULES = [module.name for module in tidy.modules() if module.package != plan.WINGS]
# They run something when they are imported, or belong to another program.
RUN_AT_IMPORT = {
    "launcher.__main__",
    "launcher.template.plain_zygote",
    "launcher.template.hook.sitecustomize",
}
COMMANDS = ("ddp_launch", "ddpctl", "ddp_rendezvous")
_S = 120
# An editable installation finds what is not in the copy.
_COPY_ONLY = "import sys; sys.meta_path[:] = [each for each in sys.meta_path if 'Editable' not in repr(each)]"


@dataclass(frozen=True)
class Asked:
    """What a user writes to use a wing: a program, and what its error names."""

    program: str
    code: str = "DDP-1019"
    exit_code: int | None = None  # None: a failure


def command(name: str, *words: str) -> str:
    return f"import sys, _ddp_launch_entry as e; sys.argv = {['a command', *words]!r}; sys.exit(e.{name}())"


ASKED = {
    "plan": Asked(command("ddp_launch", "plan", "train.py")),
    "etcd": Asked(
        command("ddp_rendezvous", "serve", "--store", "etcd://127.0.0.1/x", "--listen", "127.0.0.1:0")
    ),
    "web": Asked(command("ddp_launch", "--web", "--nproc-per-node", "1", "train.py")),
    "redundancy": Asked("from ddp.elastic import State; State(redundancy='auto')", code=""),
    "compiled": Asked("import _ddp_launch_entry as e; e.find(e.LIBRARY, 'DDP_SHARE_COMPILED')", code=""),
    # The job is not affected.
    "diagnostics": Asked("import ddp; ddp.check_numerics", code=""),
    "health_sources": Asked(
        command("ddp_launch", "--health-source", "/run/health.json", "--nproc-per-node", "1", "train.py")
    ),
    "hosts": Asked(command("ddp_launch", "--hosts", "a,b", "train.py")),
    "links": Asked(
        command(
            "ddp_launch", "--preflight", "full", "--nnodes", "2", "--rendezvous", "127.0.0.1:9", "train.py"
        )
    ),
    "completion": Asked(command("ddpctl", "completion", "bash")),
    "inspection": Asked(
        "import runpy, sys; sys.argv[1:] = ['ls', 'a']; runpy.run_module('ddp.elastic', run_name='__main__')",
        code="",
    ),
    "frameworks": Asked("import ddp; ddp.integrations.attach", code=""),
    "otlp": Asked(
        command("ddp_launch", "--otlp-endpoint", "http://127.0.0.1:9", "--nproc-per-node", "1", "train.py"),
        "",
        0,
    ),
    "mpi": Asked("import ddp; ddp.init('mpi4py')", code=""),
    "torchrun": Asked("from _ddp_launch_entry import torchrun_backend; torchrun_backend()", code=""),
    "upkeep": Asked(command("ddp_rendezvous", "doctor", "--store", "file:jobs")),
    "departures": Asked(command("ddpctl", "depart", "--source", "ec2")),
    "callers": Asked(command("ddp_launch", "--as-torchrun", "train.py")),
    "replay": Asked(command("ddpctl", "replay", "a.ddpj")),
    "rehearse": Asked(command("ddp_launch", "rehearse", "train.py")),
    "history": Asked(command("ddpctl", "list", "--all")),
    "submit": Asked(command("ddpctl", "submit", "--target", "ssh", "--dry-run")),
}


def test_every_wing_is_asked_for() -> None:
    assert ASKED.keys() == plan.WINGS_NEED.keys()


def house(folder: Path, without: set[str]) -> Path:
    """A copy of the packages without the folders of some wings; links do not hide what is not there."""
    for name in tidy.HOUSE:
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "_ddp_launch_entry.py", folder)
    (folder / "sitecustomize.py").write_text(_COPY_ONLY)
    (folder / plan.WINGS).mkdir()
    for path in (ROOT / plan.WINGS).iterdir():
        if path.name not in without and path.name != "__pycache__":
            (folder / plan.WINGS / path.name).symlink_to(path)
    return folder


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=_S, check=False)


def check_the_rest(folder: Path) -> None:
    names = [name for name in MODULES if name not in RUN_AT_IMPORT]
    program = f"import importlib\nfor name in {names!r}: importlib.import_module(name)"
    done = run(folder, sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        done = run(folder, sys.executable, "-c", command(name, "--help"))
        assert (done.returncode, "usage: " in done.stdout) == (0, True), done.stderr
    (folder / "train.py").write_text("import os; print('rank', os.environ['RANK'], 'ran')")
    done = run(folder, sys.executable, "-c", command("ddp_launch", "--nproc-per-node", "2", "train.py"))
    assert (done.returncode, sorted(line[-10:] for line in done.stdout.splitlines())) == (
        0,
        ["rank 0 ran", "rank 1 ran"],
    ), done.stderr


def check_the_answer(folder: Path, wing: str) -> None:
    asked = ASKED[wing]
    done = run(folder, sys.executable, "-c", asked.program)
    assert done.returncode == asked.exit_code or (asked.exit_code is None and done.returncode > 0), (
        done.stdout
    )
    said = done.stderr
    assert f"is in the wing {wing}, which is not installed" in said
    assert "Install ddp-launch again: " in said
    assert asked.code in said
    assert "Traceback" not in said or not asked.code


def test_the_house_works_without_wings(tmp_path: Path) -> None:
    folder = house(tmp_path, set(plan.WINGS_NEED))
    check_the_rest(folder)
    for wing in plan.WINGS_NEED:
        check_the_answer(folder, wing)


@pytest.mark.nightly(instead="::test_the_house_works_without_wings")
@pytest.mark.parametrize("wing", plan.WINGS_NEED)
def test_everything_else_works_without_a_wing(wing: str, tmp_path: Path) -> None:
    folder = house(tmp_path, {wing})
    check_the_rest(folder)
    check_the_answer(folder, wing)
    for other in plan.WINGS_NEED.keys() - {wing}:
        names = [m.name for m in tidy.modules() if f"{m.name}.".startswith(f"{plan.WINGS}.{other}.")]
        program = f"import importlib\nfor name in {names!r}: importlib.import_module(name)"
        done = run(folder, sys.executable, "-c", program)
        assert done.returncode == 0, done.stderr
