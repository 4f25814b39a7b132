"""Reads and writes the table of fault cases in docs/faults.md.

A run of single cases replaces their rows and keeps the other rows.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from fault_case import HANG_TIMEOUT_S, Case, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fault_play import Played

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
_BEGIN, _END = "<!-- faults:begin -->\n", "<!-- faults:end -->"
_TITLES = {
    Kind.DEATH: "A rank dies",
    Kind.HANG: "A rank hangs",
    Kind.NODE: "Nodes, networks and agents",
    Kind.NCCL: "NCCL",
    Kind.INNOCENT: "No failure: the launcher must not act",
}
_HEAD = (
    "| case | setting | fault | verdict | correct | first collective | first step |\n"
    "|---|---|---|---|---|---:|---:|"
)
_VERDICT_CHARS = 320
_ROW = re.compile(
    r"^\| `([^`]+)` \| ([^|]*) \| ([^|]*) \| [^|]* \| ([^|]*) \| ([^|]*) \| [^|]* \|$", re.MULTILINE
)
_YES, _NO, _WRONGED, _SKIPPED = "yes", "no", "no: wrong rank", "skipped"
_LATE = " (late)"


def identity(case: Case) -> tuple[str, str, str]:
    """The cells of a row that do not depend on a run."""
    return case.name, case.where, case.injected


def identities(page: str) -> list[tuple[str, str, str]]:
    return [(match[1], match[2], match[3]) for match in _ROW.finditer(page)]


def in_order(cases: Iterable[Case]) -> list[Case]:
    order = list(_TITLES)
    return sorted(cases, key=lambda case: order.index(case.kind))


def write(found: Sequence[Played], cases: Sequence[Case], machine: str) -> None:
    page = PAGE.read_text()
    rows = {match[1]: match[0] for match in _ROW.finditer(page)} | {
        each.case.name: row(each) for each in found
    }
    before, _, rest = page.partition(_BEGIN)
    after = rest.partition(_END)[2]
    PAGE.write_text(f"{before}{_BEGIN}{_table(rows, cases)}\n\nMachine: {machine}.\n{_END}{after}")


def _table(rows: Mapping[str, str], cases: Sequence[Case]) -> str:
    known = [case for case in in_order(cases) if case.name in rows]
    blocks = [summary(rows[case.name] for case in known)]
    for kind, title in _TITLES.items():
        of_kind = [rows[case.name] for case in known if case.kind is kind]
        if of_kind:
            blocks.append("\n".join([f"## {title}\n", _HEAD, *of_kind]))
    return "\n\n".join(blocks)


def summary(rows: Iterable[str]) -> str:
    cells = [match for line in rows if (match := _ROW.match(line)) and match[4] != _SKIPPED]
    right = sum(match[4] == _YES for match in cells)
    wronged = sum(match[4] == _WRONGED for match in cells)
    late = sum(match[5].endswith(_LATE) for match in cells)
    return (
        f"{len(cells)} cases: {right} correct verdicts ({100 * right / max(1, len(cells)):.1f} %), "
        f"{wronged} wrong ranks named with certainty, {late} recoveries over the time limit. "
        f"Hang timeout: {HANG_TIMEOUT_S:g} s."
    )


def row(played: Played) -> str:
    case = played.case
    said = what_was_said(played)
    met = _s(played.took_s) + (_LATE if played.is_right and not played.is_in_time else "")
    cells = (f"`{case.name}`", case.where, case.injected, said, judged(played), met, _s(played.step_s))
    return f"| {' | '.join(cells)} |"


def what_was_said(played: Played) -> str:
    """For a cell of a table."""
    said = played.skipped or played.problem or str(played.verdict or "none")
    said = " ".join(said.replace("|", "/").split())
    return said if len(said) <= _VERDICT_CHARS else said[: _VERDICT_CHARS - 4].rpartition(" ")[0] + " ..."


def judged(played: Played) -> str:
    if played.skipped:
        return _SKIPPED
    if played.is_right:
        return _YES
    return _WRONGED if played.blames_an_innocent else _NO


def _s(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f} s"
