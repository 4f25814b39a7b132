"""The commands of docs/deploy.md, block by block."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"


def blocks() -> list[list[str]]:
    found = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [block.splitlines() for block in found]


def commands() -> list[str]:
    return [command for block in blocks() for command in block]
