"""What is installed is what is locked: files, hashes, licences, images; and the checks of `make audit` can fail."""

from __future__ import annotations

import json
import re
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "requirements"))

import advisories  # noqa: E402
import audit  # noqa: E402
import lock  # noqa: E402
import sbom  # noqa: E402

FILES = audit.locked()
INSTALL = "requirements/install.txt"
PIN = next(iter(FILES[INSTALL].values()))
LOCKED = " --require-hashes "


def test_nothing_in_the_tree_is_against_it() -> None:
    assert audit.from_the_tree() == []


def test_everything_that_make_installs_is_locked() -> None:
    """But for the project itself, which brings nothing along."""
    text = (ROOT / "Makefile").read_text().replace("$(LOCKED)", "pip install" + LOCKED)
    commands = re.findall(r"(?:pip|\$\(PIP\))[^\n;|]*? install [^\n;|]*", text)
    assert len(commands) > 5
    own = [each for each in commands if LOCKED not in each]
    assert own == ["$(PIP) install --no-deps --no-build-isolation -e ."]


def test_the_lock_names_no_place() -> None:
    for path in (*lock.HERE.glob("*.txt"), lock.SERVICE):
        assert "://" not in path.read_text(), path
        assert "-index" not in path.read_text(), path


# --- bills of materials --------------------------------------------------------------------------------


def test_the_bill_of_the_image_is_that_of_its_requirements() -> None:
    assert sbom.IMAGE.read_text() == sbom.text(sbom.bills()[sbom.IMAGE]), "make sbom"


def test_the_bill_of_the_image_has_all_that_is_installed_with_its_hashes() -> None:
    made = json.loads(sbom.IMAGE.read_text())
    listed = {each["name"]: each for each in made["components"] if each["type"] == "library"}
    wanted = {
        pin.name: pin for pin in lock.read(lock.SERVICE.read_text()).values() if pin.name != "setuptools"
    }
    assert listed.keys() == wanted.keys() > {"grpcio", "protobuf"}
    for name, pin in wanted.items():
        (files,) = listed[name]["externalReferences"]
        assert {f"sha256:{each['content']}" for each in files["hashes"]} == set(pin.hashes)
        assert listed[name]["version"] == pin.version
    refs = {each["ref"] for each in made["dependencies"]}
    assert {on for each in made["dependencies"] for on in each["dependsOn"]} <= refs


# --- what `make audit` would say ---------------------------------------------------------------------------


def with_pin(**changes: object) -> dict[str, lock.Pins]:
    changed = replace(PIN, **changes)  # type: ignore[arg-type]
    return FILES | {INSTALL: FILES[INSTALL] | {(changed.name, changed.version): changed}}


@pytest.mark.parametrize(
    "changes", [{"hashes": ()}, {"hashes": ("sha256:12",)}, {"version": ""}, {"version": ">=1"}], ids=str
)
def test_a_pin_that_leaves_room_is_seen(changes: dict[str, object]) -> None:
    assert len(audit.unpinned(with_pin(**changes))) == 1


@pytest.mark.parametrize(
    "line",
    ["RUN pip install grpcio", "RUN true \\\n && python3 -m pip download -r a.txt", "FROM python:3.13"],
)
def test_an_image_that_installs_what_nobody_locked_is_seen(line: str) -> None:
    assert audit.images_unlocked({"Dockerfile": f"FROM ${{BASE}}\n{line}\n"})


# --- advisories ------------------------------------------------------------------------------------------------


def record(name: str = "gRPCio", **affected: object) -> advisories.Record:
    return {
        "id": "OSV-1",
        "aliases": ["CVE-1"],
        "summary": "bad",
        "affected": [{"package": {"ecosystem": "PyPI", "name": name}, **affected}],
    }


def ranges(*events: dict[str, str], kind: str = "ECOSYSTEM") -> list[dict[str, object]]:
    return [{"type": kind, "events": list(events)}]


GRPCIO = lock.Pin("grpcio", "1.85.1", "", ())


@pytest.mark.parametrize(
    ("affected", "concerned"),
    [
        ({"versions": ["1.85.0", "1.85.1"]}, True),
        ({"versions": ["1.85"]}, False),
        ({"ranges": ranges({"introduced": "0"}, {"fixed": "1.85.1"})}, False),
        ({"ranges": ranges({"introduced": "0"}, {"fixed": "1.85.2"})}, True),
        ({"ranges": ranges({"introduced": "0"}, {"last_affected": "1.85.1"})}, True),
        ({"ranges": ranges({"introduced": "0"}, {"last_affected": "1.85.0"})}, False),
        ({"ranges": ranges({"introduced": "1.86"})}, False),
        ({"ranges": ranges({"introduced": "1.0"}, {"fixed": "1.1"}, {"introduced": "1.80"})}, True),
        ({"ranges": ranges({"introduced": "0"}, kind="GIT")}, False),
    ],
)
def test_a_record_is_about_the_versions_that_it_says(affected: dict[str, object], concerned: bool) -> None:
    found = advisories.about([record(**affected)], [GRPCIO], set())
    assert found == (["grpcio 1.85.1: OSV-1: bad"] if concerned else [])


def test_an_audit_tells_findings_from_not_having_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (grpcio,) = (pin for pin in FILES[INSTALL].values() if pin.name == "grpcio")
    records = tmp_path / "all.zip"
    with zipfile.ZipFile(records, "w") as archive:
        archive.writestr("OSV-1.json", json.dumps(record(versions=[grpcio.version])))
    assert audit.main("", str(records)) == audit.FOUND
    assert f"  grpcio {grpcio.version}: OSV-1: bad" in capsys.readouterr().out
    (tmp_path / "OSV-2.json").write_text(json.dumps(record(versions=["0.1"])))
    assert audit.main("", str(tmp_path / "OSV-2.json")) == audit.CLEAN
    assert audit.main("/bin/false", "") == audit.NOT_ASKED
    assert audit.main("", str(tmp_path / "nowhere")) == audit.NOT_ASKED
    said = capsys.readouterr().out
    assert said.count("nobody could be asked") == 2


def test_an_answer_that_leaves_packages_out_is_no_answer(tmp_path: Path) -> None:
    """The program itself ends with 0 then."""
    program = tmp_path / "pip-audit"
    told = {"dependencies": [{"name": "grpcio", "skip_reason": "not found"}]}
    program.write_text(f"#!/bin/sh\necho '{json.dumps(told)}'\n")
    program.chmod(0o755)
    assert audit.main(str(program), "") == audit.NOT_ASKED
    told = {"dependencies": [{"name": "grpcio", "version": "1", "vulns": [{"id": "X-1", "aliases": []}]}]}
    program.write_text(f"#!/bin/sh\necho '{json.dumps(told)}'\nexit 1\n")
    assert audit.main(str(program), "") == audit.FOUND
