"""Writes docs/errors.md and a page of each error code in docs/errors/; `make errors` runs it."""

from __future__ import annotations

from pathlib import Path

from rendezvous.explained.entry import markdown
from rendezvous.explained.table import AREAS, ENTRIES

HERE = Path(__file__).parent
HEAD = """\
# Error codes

`make errors` generates this page, and the page of each code, from the table in `rendezvous/explained`.

Each error of `ddp-launch`, `ddp-rendezvous`, `ddpctl` and `ddp` ends with a code, for example `[DDP-1004]`. A code
keeps its number and its meaning in all later releases, so you can search for it, and a program can compare it. The box
at the end of a failed job has a row `code`. `failure.json`, and `ddpctl status`, `get` and `why` with `-o json`, have a
key `code`. The exceptions of `ddp` have an attribute `code`.

In a terminal, `ddpctl explain DDP-1004` prints the page of a code. It needs no service and no network.
"""


def pages() -> dict[str, str]:
    """The text of each page, by its path in docs/."""
    lines = [HEAD]
    for digit, title in AREAS.items():
        lines += [f"## {title}", "", "| code | name | meaning |", "|---|---|---|"]
        lines += [
            f"| [{each.code}](errors/{each.code}.md) | {each.code.phrase} | {each.meaning} |"
            for each in ENTRIES
            if each.code[4] == digit
        ]
        lines.append("")
    made = {f"errors/{each.code}.md": markdown(each) for each in ENTRIES}
    return {"errors.md": "\n".join(lines), **made}


def main() -> None:
    (HERE / "errors").mkdir(exist_ok=True)
    for path in (HERE / "errors").glob("*.md"):
        path.unlink()
    for name, text in pages().items():
        (HERE / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
