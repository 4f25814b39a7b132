"""What becomes of tokens when the key file is deleted, damaged or opened to others: a policy, and no silence."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

import pytest

from rendezvous.access import auth
from rendezvous.access.auth import Denied, Gate, Grant, Role, add_key, read_keys, sign

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "_RELOAD_S", 0.0)


def a_token(path: Path) -> str:
    return sign(Grant("g", "*", Role.OPERATOR, time.time() + 999), read_keys(str(path))[-1])


def is_accepted(gate: Gate, token: str) -> bool:
    try:
        gate.holder_of(token)
    except Denied:
        return False
    return True


def delete(path: Path) -> None:
    path.unlink()


def open_to_others(path: Path) -> None:
    """Replaced by a file with another key, which other users can read."""
    path.unlink()
    add_key(str(path))
    path.chmod(0o644)


def damage(path: Path) -> None:
    path.write_text("nonsense\n")


def put_a_folder_there(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("spoil", [delete, open_to_others, damage, put_a_folder_there])
def test_the_keys_stay_and_it_is_told_until_the_file_can_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: object
) -> None:
    path = tmp_path / "keys"
    add_key(str(path))
    gate, token = Gate(str(path)), a_token(path)
    assert (is_accepted(gate, token), gate.problem) == (True, "")
    spoil(path)  # type: ignore[operator]
    with caplog.at_level(logging.INFO, "rendezvous"):
        assert [is_accepted(gate, token) for _ in range(5)] == [True] * 5
        assert str(path) in gate.problem
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert "remain valid" in caplog.text
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        add_key(str(path))
        assert not is_accepted(gate, token)
        assert is_accepted(gate, a_token(path))
        assert gate.problem == ""
        assert "can be used again" in caplog.text


def test_a_mode_that_changes_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    add_key(str(path))
    gate = Gate(str(path))
    os.chmod(path, 0o644)
    assert "other users can read" in gate.problem
    os.chmod(path, 0o600)
    assert gate.problem == ""


def test_a_file_without_keys_rejects_all_tokens(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    add_key(str(path))
    gate, token = Gate(str(path)), a_token(path)
    path.write_text("# none\n")
    assert not is_accepted(gate, token)
    assert gate.problem == ""


def test_a_session_of_the_page_is_no_token_and_a_token_is_no_session(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    add_key(str(path))
    gate, token = Gate(str(path)), a_token(path)
    session = gate.session_of(token)
    assert gate.holder_of_session(session) == gate.holder_of(token)
    with pytest.raises(Denied):
        gate.holder_of(session)
    with pytest.raises(Denied):
        gate.holder_of_session(token)
    with pytest.raises(Denied):
        gate.session_of(session)
    path.write_text("# none\n")
    with pytest.raises(Denied):
        gate.holder_of_session(session)
