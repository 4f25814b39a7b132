"""The house finds wings by the names in a table, and those of other packages by their entry points."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

import pytest
from tidy import ROOT

import _ddp_launch_entry as doors
import ddp
import ddp.elastic
from launcher import cli
from rendezvous.control import ctl

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

DOOR = doors.COMMAND
DOORS = [
    value for name, value in vars(doors).items() if name.isupper() and str(value).startswith("ddp_launch.")
]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Another package, with entry points and a module."""

    def install(points: str, source: str, door: str = DOOR) -> None:
        package = tmp_path / "other_wing-1.0.dist-info"
        package.mkdir()
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: other-wing\nVersion: 1.0\n")
        (package / "entry_points.txt").write_text(f"[{door}]\n{points}\n")
        (tmp_path / "other_wing.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "other_wing", raising=False)

    return install


@pytest.mark.parametrize("door", DOORS)
def test_every_name_in_the_table_can_be_loaded(door: str) -> None:
    assert doors.names(door)
    for name, value in doors.names(door).items():
        module = importlib.util.find_spec(value.partition(":")[0])
        assert module is not None, f"{name} = {value}"


def test_the_metadata_of_the_package_are_made_of_the_table() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    made_of = project["tool"]["setuptools"]["dynamic"]["entry-points"]["file"]
    assert (ROOT / made_of).read_text().count("\n[") >= len(DOORS)


def test_every_public_name_of_the_library_is_of_the_house_or_in_the_table() -> None:
    table = doors.names(doors.LIBRARY)
    for package in (ddp, ddp.elastic):
        for name in set(package.__all__) - package._FROM.keys() - getattr(package, "_MODULES", set()):
            assert f"{package.__name__}.{name}" in table
    assert {"ddp.check_numerics"} <= table.keys()


def test_nothing_is_found_where_nothing_is() -> None:
    assert doors.find(DOOR, "nothing") is None
    assert doors.find("ddp_launch.no_door", "plan") is None


def test_another_package_brings_a_command(
    installed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    installed(
        "weigh = other_wing:weigh",
        "def weigh(words, environ, tell):\n    tell('weighing')\n    return f'{words} weigh nothing'\n",
    )
    assert cli.main(["weigh", "a", "b"]) == 0
    assert capsys.readouterr() == ("['a', 'b'] weigh nothing\n", "ddp-launch: weigh: weighing\n")


def test_a_command_of_another_package_hides_no_script_and_no_command_of_ours(
    installed: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed("weigh = other_wing:weigh\nplan = other_wing:weigh", "raise AssertionError\n")
    (tmp_path / "weigh").write_text("raise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    assert cli._command_of_a_wing(["weigh"]) is None
    assert cli.main(["plan"]) == 2
    assert "needs a script to profile" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("lost = ddp_launch_wings.lost.command:run", "is in the wing lost, which is not installed"),
        ("lost = gone_package.command:run", "is in the package gone_package, which is not installed"),
    ],
)
def test_a_wing_that_is_missing_says_what_and_why_and_what_to_do(
    table: str, says: str, installed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    installed(table, "")
    assert cli.main(["lost"]) == 2
    said = capsys.readouterr().err
    assert "ddp-launch: error: lost (ddp_launch.command)" in said
    assert says in said
    assert "Install" in said
    assert "[DDP-1019]" in said


def test_what_a_wing_itself_lacks_is_not_taken_for_a_missing_wing(
    installed: Callable[..., None],
) -> None:
    installed("lame = other_wing:run", "import a_package_that_nobody_has\n")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_nobody_has"):
        doors.find(DOOR, "lame")


def test_a_command_of_ours_keeps_the_contract_of_the_door() -> None:
    for name in doors.names(DOOR):
        command: cli.Command = doors.find(DOOR, name)
        environ: Mapping[str, str] = {}
        with pytest.raises(cli.UsageError):
            command(["--no-such-option"], environ, print)


def test_a_command_of_ours_for_ddpctl_keeps_the_contract_of_the_door() -> None:
    for name in doors.names(doors.CTL_COMMAND):
        wing = doors.find(doors.CTL_COMMAND, name)
        assert isinstance(wing.HELP, str)
        wing.add(argparse.ArgumentParser())
        assert callable(wing.carry_out)


def test_another_package_brings_a_command_for_ddpctl(
    installed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    source = "HELP = 'weighs jobs'\ndef add(parser):\n    parser.add_argument('--grams', type=int)\n"
    source += "def carry_out(arguments):\n    return arguments.grams\n"
    installed("weigh = other_wing", source, doors.CTL_COMMAND)
    assert ctl.main(["weigh", "--grams", "7"]) == 7
    with pytest.raises(SystemExit):
        ctl.main(["--help"])
    assert "weighs jobs" in capsys.readouterr().out


def test_ddpctl_does_not_import_what_its_command_does_not_need() -> None:
    wings = {value.partition(":")[0] for value in doors.names(doors.CTL_COMMAND).values()}
    ask = "import sys; from rendezvous.control.commands import parser; parser(['top', 'a-job'])"
    done = subprocess.run(
        [sys.executable, "-c", f"{ask}; print(*sys.modules)"], capture_output=True, text=True
    )
    assert not wings & set(done.stdout.split())
    assert "rendezvous.control.commands" in done.stdout
