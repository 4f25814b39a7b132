"""How wheels are made: the tag that a module may have, and archives that come out the same."""

from __future__ import annotations

import os
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "deploy" / "wheels"))

import archives
import manylinux
import provenance

# As readelf prints it, shortened.
READELF = """
 0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]
 0x0000000000000001 (NEEDED)             Shared library: [ld-linux-x86-64.so.2]
Version needs section '.gnu.version_r' contains 2 entries:
  000000: Version: 1  File: libc.so.6  Cnt: 2
  0x0010:   Name: GLIBC_2.14  Flags: none  Version: 8
  0x0020:   Name: GLIBC_2.2.5  Flags: none  Version: 5
"""


@pytest.mark.parametrize(
    ("versions", "tag"),
    [
        ({"GLIBC_2.2.5", "GLIBC_2.14"}, "manylinux2014_x86_64.manylinux_2_17_x86_64"),
        ({"GLIBC_2.17", "GLIBC_2.28"}, "manylinux_2_28_x86_64"),
        ({"GLIBC_2.4", "GLIBC_2.34"}, "manylinux_2_34_x86_64"),
    ],
)
def test_the_tag_is_the_oldest_glibc_that_has_all_symbols(versions: set[str], tag: str) -> None:
    assert manylinux.platform_tag(manylinux.glibc_of({"libc.so.6"}, versions), "x86_64") == tag


@pytest.mark.parametrize(
    ("libraries", "versions"),
    [({"libc.so.6", "libgomp.so.1"}, set()), ({"libc.so.6"}, {"GCC_3.0"}), (set(), {"GLIBCXX_3.4"})],
)
def test_what_not_every_system_has_is_rejected(libraries: set[str], versions: set[str]) -> None:
    with pytest.raises(manylinux.NotPortable):
        manylinux.glibc_of(libraries, versions)


def test_libraries_and_versions_are_found_in_what_readelf_says() -> None:
    libraries, versions = manylinux.libraries_and_versions(READELF)
    assert libraries == {"libc.so.6", "ld-linux-x86-64.so.2"}
    assert versions == {"GLIBC_2.14", "GLIBC_2.2.5"}


def sources(folder: Path, names: list[str], at: float, mode: int) -> Path:
    """An archive of files that were written at that time, with that mode, and added in that order."""
    path = folder / "a-1.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            file = folder / name
            file.write_text(name)
            file.chmod(mode)
            os.utime(file, (at, at))
            archive.add(file, f"a-1/{name}")
    return path


def test_an_archive_of_sources_does_not_depend_on_when_and_where(tmp_path: Path) -> None:
    made = []
    for number, (names, mode) in enumerate(((["x", "y"], 0o600), (["y", "x"], 0o664))):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = sources(folder, names, 1e9 + number * 1000, mode)
        archives.normalise_sdist(path, 1_700_000_000)
        made.append(path.read_bytes())
    assert made[0] == made[1]
    with tarfile.open(tmp_path / "0/a-1.tar.gz") as archive:
        assert [(each.name, each.mode, each.uid) for each in archive] == [
            ("a-1/x", 0o644, 0),
            ("a-1/y", 0o644, 0),
        ]


def wheel(folder: Path, names: list[str], hour: int) -> Path:
    folder.mkdir()
    path = folder / "a-1-cp311-abi3-linux_x86_64.whl"
    texts = {
        "a/x.py": "x",
        "a-1.dist-info/WHEEL": "Wheel-Version: 1.0\nTag: cp311-abi3-linux_x86_64\n\n",
        "a-1.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, 1, hour, 0, 0)), texts[name])
    return path


def test_a_wheel_does_not_depend_on_when_either_and_gets_its_tags(tmp_path: Path) -> None:
    names = ["a/x.py", "a-1.dist-info/WHEEL", "a-1.dist-info/RECORD"]
    tags = "manylinux2014_x86_64.manylinux_2_17_x86_64"
    made = []
    for number, order in enumerate((names, names[::-1])):
        raw = wheel(tmp_path / str(number), order, number)
        made.append(archives.normalise_wheel(raw, tags, 1_700_000_000, tmp_path))
        made[-1] = made[-1].rename(tmp_path / f"{number}.whl")
    assert made[0].read_bytes() == made[1].read_bytes()
    with zipfile.ZipFile(made[0]) as archive:
        said = archive.read("a-1.dist-info/WHEEL").decode().splitlines()
        assert said == ["Wheel-Version: 1.0", *(f"Tag: cp311-abi3-{tag}" for tag in tags.split("."))]
        rows = archive.read("a-1.dist-info/RECORD").decode().splitlines()
    assert [row.split(",")[0] for row in rows] == [
        "a-1.dist-info/WHEEL",
        "a/x.py",
        "a-1.dist-info/RECORD",
    ]


def test_the_statement_names_every_archive_and_the_commit() -> None:
    source = {"commit": "c" * 40, "changed": []}
    made = provenance.statement({"a.whl": "0" * 64}, source, {"python": "3.11.7"}, 0)
    assert made["subject"] == [{"name": "a.whl", "digest": {"sha256": "0" * 64}}]
    definition = made["predicate"]["buildDefinition"]
    assert definition["resolvedDependencies"][0]["digest"] == {"gitCommit": "c" * 40}
    assert definition["resolvedDependencies"][1] == {"name": "python", "annotations": {"version": "3.11.7"}}
