"""Reads and writes the table of fault cases in docs/faults.md.

A row has cells of the play with restarts, and cells of the play in place. A run replaces the cells of what it played.
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
    "| case | setting | fault | verdict | correct | first collective | first step "
    "| in place: correct | processes kept | first step |\n"
    "|---|---|---|---|---|---:|---:|---|---|---:|"
)
_VERDICT_CHARS = 320
_CELLS, _OF_RESTART, _IN_PLACE = 10, slice(3, 7), slice(7, 10)
_ROW = re.compile(
    r"^\| `" + r" \| ".join([r"([^`|]+)`", *[r"([^|]*)"] * (_CELLS - 1)]) + r" \|$", re.MULTILINE
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
    known = {match[1]: match[0] for match in _ROW.finditer(page)}
    before, _, rest = page.partition(_BEGIN)
    after = rest.partition(_END)[2]
    table = _table({_name(line): line for line in rows(found, known.values())}, cases)
    PAGE.write_text(f"{before}{_BEGIN}{table}\n\nMachine: {machine}.\n{_END}{after}")


def _table(rows: Mapping[str, str], cases: Sequence[Case]) -> str:
    known = [case for case in in_order(cases) if case.name in rows]
    blocks = [summary(rows[case.name] for case in known)]
    for kind, title in _TITLES.items():
        of_kind = [rows[case.name] for case in known if case.kind is kind]
        if of_kind:
            blocks.append("\n".join([f"## {title}\n", _HEAD, *of_kind]))
    return "\n\n".join(blocks)


def summary(rows: Iterable[str]) -> str:
    cells = [match for line in rows if (match := _ROW.match(line)) and match[5] != _SKIPPED]
    return f"{_of_restarts(cells)} {_in_place(cells)} Hang timeout: {HANG_TIMEOUT_S:g} s."


def _of_restarts(cells: Sequence[re.Match[str]]) -> str:
    played = [match for match in cells if match[5]]
    right = sum(match[5] == _YES for match in played)
    wronged = sum(match[5] == _WRONGED for match in played)
    late = sum(match[6].endswith(_LATE) for match in played)
    return (
        f"{len(played)} cases: {right} correct verdicts ({100 * right / max(1, len(played)):.1f} %), "
        f"{wronged} wrong ranks named with certainty, {late} recoveries over the time limit."
    )


def _in_place(cells: Sequence[re.Match[str]]) -> str:
    played = [match for match in cells if match[8] not in ("", _SKIPPED)]
    right = sum(match[8] == _YES for match in played)
    kept = [tuple(map(int, match[9].split(" of "))) for match in played if match[9]]
    whole = sum(one == of for one, of in kept)
    return (
        f"In place: {len(played)} cases, {right} correct verdicts, {sum(match[8] == _WRONGED for match in played)} "
        f"wrong ranks named with certainty; all survivors kept their processes in {whole} cases."
    )


def rows(found: Iterable[Played], older: Iterable[str] = ()) -> list[str]:
    """One for each case."""
    rows = {_name(line): line for line in older}
    for played in found:
        rows[played.case.name] = _row(played, rows.get(played.case.name))
    return list(rows.values())


def _name(line: str) -> str:
    match = _ROW.match(line)
    assert match is not None, line
    return match[1]


def _row(played: Played, older: str | None) -> str:
    match = _ROW.match(older) if older is not None else None
    cells = [""] * _CELLS if match is None else [f"`{match[1]}`", *match.groups()[1:]]
    cells[:3] = f"`{played.case.name}`", played.case.where, played.case.injected
    if played.in_place:
        kept, of = len(played.kept & played.case.survivors), len(played.case.survivors)
        cells[_IN_PLACE] = judged(played), "" if played.skipped else f"{kept} of {of}", _s(played.step_s)
        cells[3] = cells[3] or what_was_said(played)
    else:
        met = _s(played.took_s) + (_LATE if played.is_right and not played.is_in_time else "")
        cells[_OF_RESTART] = what_was_said(played), judged(played), met, _s(played.step_s)
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
