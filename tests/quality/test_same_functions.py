"""The script that shows that a fold changed nothing sees what was lost, changed or added."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
import same_functions

if TYPE_CHECKING:
    from pathlib import Path

BOOK = '''"""A book."""
from __future__ import annotations
from typing import TYPE_CHECKING
from launcher.room import chapter

if TYPE_CHECKING:
    from collections.abc import Iterator

def tell() -> Iterator[int]:
    import json
    return chapter.told(json)
'''
CHAPTER = '''"""A chapter."""
LIMIT = 3
def told(x):
    return x  # as it is
class Page:
    def turn(self):
        return LIMIT
'''
FOLDED = '''"""A book, with its chapter."""
from collections.abc import Iterator
import json

LIMIT = 3
def tell() -> Iterator[int]:
    return told(json)

# --- a chapter ---

class Page:
    def turn(self):
        return LIMIT
def told(x):
    return x
'''


def test_a_fold_changes_nothing():
    assert same_functions.differences([BOOK, CHAPTER], [FOLDED], {}) == []


@pytest.mark.parametrize(
    ("old", "new", "seen"),
    [
        ("return x", "return x + 1", ["- def told(x):", "+ def told(x):"]),
        ("LIMIT = 3", "LIMIT = 4", ["- LIMIT = 3", "+ LIMIT = 4"]),
        ("        return LIMIT", "        return 3", ["- class Page:", "+ class Page:"]),
        ("class Page", "def more():\n    pass\nclass Page", ["+ def more():"]),
        ("LIMIT = 3\n", "", ["- LIMIT = 3"]),
    ],
)
def test_what_a_fold_changes_is_seen(old, new, seen):
    assert same_functions.differences([BOOK, CHAPTER], [FOLDED.replace(old, new, 1)], {}) == seen


def test_a_name_that_stood_twice_may_be_renamed():
    renamed = FOLDED.replace("told", "told_in_chapter")
    assert same_functions.differences([BOOK, CHAPTER], [renamed], {})
    assert same_functions.differences([BOOK, CHAPTER], [renamed], {"told": "told_in_chapter"}) == []


def test_revisions_and_the_working_tree_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)

    monkeypatch.chdir(tmp_path)
    room = tmp_path / "room"
    room.mkdir()
    (room / "book.py").write_text(BOOK)
    (room / "chapter.py").write_text(CHAPTER)
    git("init", "-q")
    git("add", "room")
    git("commit", "-qm", "before")
    (room / "chapter.py").unlink()
    (room / "book.py").write_text(FOLDED)
    assert same_functions.main(["HEAD", "--paths", "room"]) == 0
    git("commit", "-qam", "after")
    assert same_functions.main(["HEAD~", "HEAD", "--paths", "room"]) == 0
    (room / "book.py").write_text(FOLDED.replace("LIMIT = 3", "LIMIT = 4"))
    assert same_functions.main(["HEAD", "--paths", "room"]) == 1
    assert "+ LIMIT = 4" in capsys.readouterr().out
