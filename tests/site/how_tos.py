"""The how-to pages of the site, and which of their blocks a test runs.

A block in a language without commands (text, json, yaml, toml) is shown only. Commands and Python are run, or the page
says in a comment before the block why they are not, and which test runs something like them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml
from page_blocks import Block, blocks
from tidy import ROOT

if TYPE_CHECKING:
    from pathlib import Path

# tests/deploy/test_deploy_page.py runs each command of it.
OTHERS = ("deploy",)
SHOWN = ("text", "json", "yaml", "toml")
RUN = ("console", "python")
_SEE = re.compile(r"[^;]+; see (tests/[\w/]+\.py): (test_\w+)")


def pages() -> list[Path]:
    text = (ROOT / "mkdocs.yml").read_text()
    found: Any = yaml.safe_load(text[text.index("\nnav:") :])
    how_tos = next(part["How-to"] for part in found["nav"] if "How-to" in part)
    listed = [ROOT / "docs" / path for entry in how_tos for path in entry.values()]
    return [page for page in listed if page.stem not in OTHERS]


def faults(block: Block) -> str:
    """What is wrong with the block; "" if it is shown, run, or explained."""
    if block.language not in (*SHOWN, *RUN):
        return f"{block}: name its language: one of {', '.join((*SHOWN, *RUN))}"
    if (reason := block.said.get("not run")) is None:
        return ""
    see = _SEE.fullmatch(reason)
    if see is None:
        return f"{block}: the comment needs a reason and a test: not run: REASON; see tests/...: test_..."
    path = ROOT / see[1]
    known = path.exists() and f"def {see[2]}(" in path.read_text()
    return "" if known else f"{block}: {see[1]} has no {see[2]}"


def commands(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "console" and block.is_run]


def python(page: Path) -> list[Block]:
    return [
        block for block in blocks(page) if block.language == "python" and block.is_run and not block.is_file
    ]
