"""What a lesson of the warm pool depends on: the files that ranks have executed, and those that would come first."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from launcher.template import lessons, pool_key
from launcher.template.import_records import Record
from launcher.template.lessons import Lesson

if TYPE_CHECKING:
    from pathlib import Path

STDLIB = "/usr/lib/python3/"


def test_the_files_of_the_user_and_those_that_would_be_found_first() -> None:
    packages = "/venv/site-packages/"
    origins = {"m": f"{packages}m.py", "json": f"{STDLIB}json/__init__.py", "own": "/job/own.py"}
    record = Record({key: {} for key in ("m", "json", "own", "a.b")}, {}, origins, {})
    found = lessons.files_of_user("/job/train.py", [record], ["/lib", packages, STDLIB], STDLIB)
    beside = {f"{folder}/a/b{end}" for folder in ("/job", "/lib") for end in (".py", "/__init__.py")}
    assert found == {"/job/train.py", "/job/own.py", *beside}


def test_a_file_that_changed_after_the_ranks_were_forked_gives_no_lesson(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("1")
    os.utime(file, (100.0, 100.0))
    assert lessons.marks_before([str(file), "/not/there"], 101.0) == {
        str(file): lessons.freshness.mark(str(file)),
        "/not/there": None,
    }
    assert lessons.marks_before([str(file)], 99.0) is None


def test_a_lesson_is_taken_once_and_only_while_its_files_are_unchanged(tmp_path: Path) -> None:
    file, path = tmp_path / "train.py", str(tmp_path / "a.lesson")
    file.write_text("1")
    marks = {str(file): lessons.freshness.mark(str(file)), str(tmp_path / "new.py"): None}
    lesson = Lesson(("--lr", "1"), (("json.tool", {"A": "1", "B": None}),), marks)
    lessons.write(path, lesson)
    assert os.stat(path).st_mode & 0o077 == 0
    assert lessons.take(path) == lesson
    assert lessons.take(path) is None
    lessons.write(path, lesson)
    (tmp_path / "new.py").write_text("")
    assert lessons.take(path) is None


def test_damaged_and_empty_lessons_are_none(tmp_path: Path) -> None:
    path = tmp_path / "a.lesson"
    for text in ("", "{", "[]", '[["a"], 1, {}]', "[[], [], {}]"):
        path.write_text(text)
        assert lessons.take(str(path)) is None, text


def test_the_arguments_of_the_script_belong_to_the_key() -> None:
    key = {"folder": "/job"}
    one, two = pool_key.learned(key, ["--lr", "1"]), pool_key.learned(key, ["--lr 1"])
    assert pool_key.has_learned(one)
    assert not pool_key.has_learned(key)
    assert len({pool_key.name_of(each) for each in (key, one, two)}) == 3
