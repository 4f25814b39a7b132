"""`make gpu-bundle`: what goes into pieces comes out of them whole, or it is said what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import bundle_install
import gpu_bundle
import pytest

if TYPE_CHECKING:
    from pathlib import Path

CONTENTS = {"large-1.whl": bytes(range(250)) * 10, "small-2.whl": b"small", "empty-3.whl": b"\0"}


@pytest.fixture
def pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(gpu_bundle, "PIECE_BYTES", 1000)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name, content in CONTENTS.items():
        (wheels / name).write_bytes(content)
    return gpu_bundle.lay_out(wheels, tmp_path / "bundle")


def test_pieces_are_small_and_come_out_whole(tmp_path: Path, pieces: list[Path]) -> None:
    assert len(pieces) > 1
    for piece in pieces:
        files = [path for path in piece.iterdir() if path.name != "manifest.json"]
        assert sum(path.stat().st_size for path in files) <= 1000
    into = tmp_path / "joined"
    into.mkdir()
    wheels = bundle_install.joined(tmp_path / "bundle", into)
    assert {wheel.name: wheel.read_bytes() for wheel in wheels} == CONTENTS


def test_a_missing_piece_is_named(tmp_path: Path, pieces: list[Path]) -> None:
    into = tmp_path / "joined"
    into.mkdir()
    next(pieces[-1].glob("large*")).unlink()
    with pytest.raises(bundle_install.Incomplete, match=r"large-1\.whl is missing or incomplete"):
        bundle_install.joined(tmp_path / "bundle", into)
    with pytest.raises(bundle_install.Incomplete, match="no piece of a bundle"):
        bundle_install.joined(into, into)


def test_wheels_are_unpacked_where_pip_is_not_there(tmp_path: Path) -> None:
    wheel = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a/__init__.py", "value = 3")
        archive.writestr("a-1.data/platlib/b.py", "value = 4")
        archive.writestr("a-1.data/scripts/run", "#!python")
    bundle_install.unpack(wheel, tmp_path / "site")
    command = [sys.executable, "-c", "import a, b; print(a.value, b.value)"]
    env = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    assert subprocess.run(command, env=env, capture_output=True, text=True).stdout == "3 4\n"
    assert not (tmp_path / "site" / "run").exists()


def test_versions_are_those_of_the_lock() -> None:
    pinned = gpu_bundle.pins(gpu_bundle.requirements())
    assert set(pinned) == set(gpu_bundle.NEEDED)
