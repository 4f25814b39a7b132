"""Blocks of the how-to pages: tests/site/test_how_tos.py runs them, or their page says why it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from how_tos import faults, pages
from page_blocks import Block, blocks

if TYPE_CHECKING:
    from pathlib import Path


def test_every_block_is_shown_or_run_or_says_why_not() -> None:
    assert [fault for page in pages() for block in blocks(page) if (fault := faults(block))] == []


def test_what_is_wrong_with_a_block_is_found(tmp_path: Path) -> None:
    def of(language: str, mark: str = "") -> str:
        return faults(Block(tmp_path / "a.md", 7, language, "", "x\n", mark))

    assert (of("text"), of("console")) == ("", "")
    assert "name its language" in of("")
    assert "the comment needs a reason and a test" in of("console", "not run: it is slow")
    assert "has no test_nothing" in of(
        "python", "not run: it is slow; see tests/site/test_how_tos.py: test_nothing"
    )
    assert of("console", "not run: it is slow; see tests/site/test_how_tos.py: test_its_commands") == ""
