"""A template of the warm pool notices that an interpreter would import something else now."""

from __future__ import annotations

import os
import types
from typing import TYPE_CHECKING

import pytest

from launcher.template import freshness, pool_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "site-packages"
    (folder / "thing-1.0.dist-info").mkdir(parents=True)
    (folder / "thing").mkdir()
    (folder / "thing" / "__init__.py").write_text("VALUE = 1\n")
    (folder / "own.pth").write_text("/somewhere\n")
    (folder / "native.so").write_text("")
    return folder


def snapshot_of(folder: Path) -> freshness.ImportedFiles:
    module = types.ModuleType("thing")
    module.__file__ = str(folder / "thing" / "__init__.py")
    modules = {"thing": module, "builtin": types.ModuleType("builtin")}
    return freshness.take(modules, [str(folder), str(folder / "absent")], [str(folder / "native.so")])


def later(path: Path) -> None:
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 1_000_000))


def touch_distribution(folder: Path) -> None:
    (folder / "thing-1.0.dist-info" / "entry_points.txt").write_text("")
    later(folder / "thing-1.0.dist-info")


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "module edited": (
        lambda folder: later(folder / "thing" / "__init__.py"),
        "thing/__init__.py has changed",
    ),
    "module gone": (
        lambda folder: (folder / "thing" / "__init__.py").unlink(),
        "thing/__init__.py has changed",
    ),
    "native edited": (lambda folder: later(folder / "native.so"), "native.so has changed"),
    "pth edited": (lambda folder: (folder / "own.pth").write_text("/else\n"), "own.pth has changed"),
    "new pth": (lambda folder: (folder / "new.pth").write_text(""), "new.pth is new"),
    "new module": (lambda folder: (folder / "typing.py").write_text(""), "typing.py is new"),
    "new package": (lambda folder: (folder / "json").mkdir(), "json is new"),
    "new distribution": (lambda folder: (folder / "more-2.dist-info").mkdir(), "more-2.dist-info is new"),
    "entry points": (touch_distribution, "thing-1.0.dist-info has changed"),
    "folder made": (
        lambda folder: ((folder / "absent").mkdir(), (folder / "absent" / "m.py").write_text("")),
        "absent is new",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_noticed(what: str, library: Path) -> None:
    snapshot = snapshot_of(library)
    assert freshness.change(snapshot) == ""
    act, words = CHANGES[what]
    act(library)
    assert freshness.change(snapshot).endswith(words)


def test_what_is_not_imported_does_not_matter(library: Path) -> None:
    snapshot = snapshot_of(library)
    for name in ("notes.txt", ".train.py.swp", "4913", "train.py~"):
        (library / name).write_text("")
    (library / "__pycache__").mkdir()
    (library / "thing" / "unused.py").write_text("")
    assert freshness.change(snapshot) == ""


def test_a_file_that_changed_during_the_import_counts_as_changed(library: Path) -> None:
    snapshot = snapshot_of(library)
    newest = max(seen[0] for seen in snapshot.files.values() if seen is not None) / 1e9
    assert freshness.changed_after(snapshot, newest + 1) == ""
    assert freshness.changed_after(snapshot, newest - 1).endswith("changed during the import")


@pytest.mark.parametrize(
    ("line", "runs"),
    [
        ("import os; os.environ['SEEN'] = '1'", True),
        ("../somewhere", False),
        ("# import os", False),
        (
            "import __editable___some_project_1_0_finder; __editable___some_project_1_0_finder.install()",
            False,
        ),
        ("import os; var = 'X'; os.environ.get(var) and __import__('_distutils_hack').add_shim()", False),
    ],
)
def test_code_in_a_pth_file_runs_at_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, runs: bool
) -> None:
    """A fork would have what it did in another process, and not its threads."""
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "some.pth").write_text(f"{line}\n")
    monkeypatch.setattr("sys.path", [str(site), str(tmp_path / "not-there/site-packages")])
    assert freshness.starts_code_of_the_user() == (
        f"{site}/some.pth runs code at each start of Python" if runs else ""
    )


def test_a_folder_that_others_can_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        pool_folder.open_folder(str(tmp_path / "pool"))
    pool_folder.open_folder(str(tmp_path / "pool"), create=True).close()
    assert (tmp_path / "pool").stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "pool")
    with pytest.raises(pool_folder.Unusable, match="cannot be used"):
        pool_folder.open_folder(str(tmp_path / "link"))
    (tmp_path / "pool").chmod(0o750)
    with pytest.raises(pool_folder.Unusable, match="can be used by others"):
        pool_folder.open_folder(str(tmp_path / "pool"))


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    pool_folder.open_folder(str(tmp_path / "pool"), create=True).close()
    os.chown(tmp_path / "pool", 65534, 65534)
    with pytest.raises(pool_folder.Unusable, match="belongs to another user"):
        pool_folder.open_folder(str(tmp_path / "pool"))


def test_notes_stay_short_and_the_pool_is_off_after_a_reboot(tmp_path: Path) -> None:
    folder = pool_folder.open_folder(str(tmp_path / "pool"), create=True)
    for number in range(2000):
        folder.note(f"event\n{number}")
    assert folder.notes()[-1].endswith("event 1999")
    assert (tmp_path / "pool" / "notes").stat().st_size < 40_000
    settings = pool_folder.PoolSettings(60.0, 2, 1 << 30, pool_folder.boot_id())
    folder.turn_on(settings)
    assert folder.settings() == settings
    folder.turn_on(settings._replace(boot="another"))
    assert folder.settings() is None
    folder.close()


def test_a_pool_that_nobody_uses_is_off(tmp_path: Path) -> None:
    folder = pool_folder.open_folder(str(tmp_path / "pool"), create=True)
    folder.turn_on(pool_folder.PoolSettings(60.0, 2, 1 << 30, pool_folder.boot_id()))
    assert folder.is_on()
    os.utime(tmp_path / "pool" / "pool.json", (0, 0))
    seed = folder.hold_seed()
    assert folder.is_on()  # a command still runs, and will leave a template
    os.close(seed)
    os.utime(tmp_path / "pool" / "pool.json", (0, 0))
    assert not folder.is_on()
    assert folder.settings() is None
    folder.close()


@pytest.mark.parametrize(
    "sent", [b"", b"\0\0", b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"\0\0\0\2{", b"\0\0\0\1\xff"]
)
def test_what_is_no_message_is_refused(sent: bytes) -> None:
    import socket

    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(OSError, match=r"message|ended"):
            pool_folder.receive(ours)
