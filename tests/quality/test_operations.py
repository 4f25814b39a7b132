"""docs/operations.md: each row names the transcript or the test that plays it, and none of those is left out."""

from __future__ import annotations

import re

from tidy import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text()
LAB = ROOT / "tests" / "lab" / "test_lab_scenarios.py"
# The page takes what matters to an operator out of many.
ONE_COMMAND = [ROOT / "tests/lab/test_over_ssh.py", ROOT / "tests/shell/test_fleet.py"]


def rows(page: str) -> list[list[str]]:
    tables = [part for part in page.split("\n\n") if re.match(r"\| what (fails|changes)", part)]
    return [row.strip("| ").split(" | ") for table in tables for row in table.splitlines()[2:]]


def named(page: str) -> list[str]:
    return [name for row in rows(page) for name in re.findall(r"`([\w-]+)`", row[-1])]


def test_every_row_says_what_happens_and_names_what_plays_it() -> None:
    for what, happens, last in rows(PAGE):
        assert len(what) > 5
        assert len(happens) > 20
        assert re.fullmatch(r"`[\w-]+`(, `[\w-]+`)?", last), last


def test_every_transcript_and_every_test_has_its_row() -> None:
    texts = {path.stem: path.read_text() for path in (ROOT / "tests" / "scenarios").glob("*.txt")}
    due = {name for name, text in texts.items() if "\n# docs/operations.md\n" in text}
    due |= set(re.findall(r"^def (test_\w+)\(\s*lab: Build", LAB.read_text(), re.MULTILINE))
    more = {each for path in ONE_COMMAND for each in re.findall(r"^def (test_\w+)", path.read_text(), re.M)}
    found = named(PAGE)
    assert len(found) == len(set(found)) > 10
    assert due <= set(found) <= due | more


def test_the_checks_can_fail() -> None:
    head = "| what fails | what happens | played by |\n|---|---|---|\n"
    page = f"# a\n\n{head}| a rank | it restarts | `a-b`, `test_a` |\n"
    assert named(page) == ["a-b", "test_a"]
