"""What an error code means: `ddpctl explain` prints its section of docs/errors.md, which the wheel contains."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import fill

_INSTALLED = Path(__file__).parents[2]
_WIDTH = 80


def page() -> str:
    """The text of all sections: from the installed manual, or from the docs/ of a checkout."""
    manual = _INSTALLED / "launcher" / "pages"
    folder = manual if manual.is_dir() else _INSTALLED / "docs"
    return (folder / "errors.md").read_text(encoding="utf-8")


def explanation(word: str) -> str | None:
    """The text of a code, written as DDP-1001, ddp-1001 or 1001; None if there is no such code."""
    name = word.strip().strip("[]").upper()
    code = name if name.startswith("DDP-") else f"DDP-{name}"
    found = re.search(rf"^### ({re.escape(code)}: .*?)(?=^##|\Z)", page(), re.MULTILINE | re.DOTALL)
    return _for_terminals(found[1]) if found else None


def contents() -> str:
    """All codes, a line each."""
    lines = []
    for level, title in re.findall(r"^(###?) (.*)", page(), re.MULTILINE):
        lines.append(f"{title}:" if level == "##" else "  " + title.replace(": ", "  ", 1))
    return "\n".join((*lines, "`ddpctl explain CODE` explains one."))


def _for_terminals(section: str) -> str:
    section = re.sub(r"\[[\w-]+\]\(([\w-]+)\.md\)", r"ddp-launch docs \1", section)
    section = re.sub(r"^(Why it happens|What to do):\n", r"\1:", section, flags=re.MULTILINE)
    return "\n".join(map(_filled, section.rstrip("\n").split("\n")))


def _filled(line: str) -> str:
    return fill(line, _WIDTH, subsequent_indent="  " if line.startswith("- ") else "")
