"""The code blocks of a page, and what a comment before a block says about its test.

```python title="train.py"      a file of the reader
```console                      "$ " begins a command; other lines are what it prints, among other things
```console title="terminal 2"   the same, in another terminal; on another machine, if the title is node1, node2, ...

<!-- exit code: 1 -->, <!-- exit code: 0 or 1 -->   the block ends so
<!-- ends: Ctrl-C -->                            it runs until the page is over, or the terminal is used again
<!-- not run: REASON; see tests/lab/test_slurm.py -->   it needs what a test machine lacks; what is tested instead
<!-- shown: REASON -->                           output, or part of a file: nothing to run
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?"
    r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]*)\")?\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_MARKS = ("exit code", "ends", "not run", "shown")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    title: str
    text: str
    mark: str  # "not run: ..."

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def said(self) -> dict[str, str]:
        """What the mark says, by its kind."""
        kind, _, words = self.mark.partition(": ")
        return {kind: words} if kind in _MARKS else {}

    @property
    def is_file(self) -> bool:
        return self.language != "console" and "." in self.title

    @property
    def is_run(self) -> bool:
        return not {"not run", "shown"} & set(self.said)

    @property
    def commands(self) -> list[str]:
        """Each with its continuation lines, which begin with "> "."""
        found: list[str] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append(line[2:])
            elif line.startswith("> ") and found:
                found[-1] += "\n" + line[2:]
        return found

    @property
    def output(self) -> list[str]:
        """The lines that the page shows; "..." alone stands for those that it leaves out."""
        lines = [line.strip() for line in self.text.splitlines() if not line.startswith(("$ ", "> "))]
        return [line for line in lines if line and line != "..."]


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            page,
            text.count("\n", 0, found.start("language")) + 1,
            found["language"],
            found["title"] or "",
            found["text"],
            found["mark"] or "",
        )
        for found in _BLOCK.finditer(text)
    ]


def pattern(shown: str) -> re.Pattern[str]:
    """What a shown line stands for: its numbers may be others, and "..." is anything."""
    parts = []
    for part in re.split(r"(\.\.\.|\d+(?:[.,:]\d+)*|\s+)", shown.strip()):
        if part == "...":
            parts.append(".*")
        elif part[:1].isdigit():
            parts.append(r"\d+(?:[.,:]\d+)*")
        elif part.isspace():
            parts.append(r"\s+")
        else:
            parts.append(re.escape(part))
    return re.compile("".join(parts))


def missing(block: Block, output: str) -> list[str]:
    """Lines that the page shows and the command did not print."""
    printed = [line.strip() for line in output.splitlines()]
    return [line for line in block.output if not any(map(pattern(line).fullmatch, printed))]
