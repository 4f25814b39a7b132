"""Keeps the results of the fault suite in results.json, and writes docs/faults.md from them.

A case has a play with restarts, and most have one in place. A run replaces the results of what it played. The page has
the times of each kind of fault; the documentation site also has a row for each fault, and results.json each case.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fault_case import HANG_TIMEOUT_S, Case, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fault_play import Played

    Result = dict[str, Any]  # what came of one play
    Results = dict[str, dict[str, Result]]  # by case, then by way of recovery

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
FILE = Path(__file__).with_name("results.json")
RESTART, IN_PLACE = "restart", "in place"
_BEGIN, _END = "<!-- faults:begin -->\n", "<!-- faults:end -->"
_TITLES = {
    Kind.DEATH: "A rank dies",
    Kind.HANG: "A rank hangs",
    Kind.NODE: "Nodes, networks and agents",
    Kind.NCCL: "NCCL",
    Kind.INNOCENT: "No failure: the launcher must not act",
}
_HEAD = "| cases | fault | verdict |\n|---|---|---|"
_VERDICT_CHARS = 100
_YES, _NO, _WRONGED, _SKIPPED = "yes", "no", "no: wrong rank", "skipped"


# --- what was found --------------------------------------------------------------------------------


def load() -> tuple[Results, str]:
    """The results of each case, and the machine."""
    kept = json.loads(FILE.read_text())
    return kept["cases"], kept["machine"]


def write(found: Sequence[Played], cases: Sequence[Case], machine: str) -> None:
    results = results_of(found, load()[0])
    known = {case.name: results[case.name] for case in in_order(cases) if case.name in results}
    lines = [f"  {json.dumps(name)}: {json.dumps(ways)}" for name, ways in known.items()]
    cases_text = "{\n" + ",\n".join(lines) + "\n }"
    FILE.write_text(f'{{"machine": {json.dumps(machine)},\n "cases": {cases_text}}}\n')
    PAGE.write_text(with_table(PAGE.read_text(), known, machine, cases))


def results_of(found: Iterable[Played], older: Results | None = None) -> Results:
    results = {name: dict(ways) for name, ways in (older or {}).items()}
    for played in found:
        way = IN_PLACE if played.in_place else RESTART
        results.setdefault(played.case.name, {})[way] = _result(played)
    return results


def _result(played: Played) -> Result:
    result = {"verdict": what_was_said(played), "correct": judged(played), "first_step_s": played.step_s}
    if played.in_place:
        return result | {"kept": len(played.kept & played.case.survivors), "of": len(played.case.survivors)}
    late = played.is_right and not played.is_in_time
    return result | {"first_collective_s": played.took_s, "late": late}


def what_was_said(played: Played) -> str:
    """In one line, as a cell of a table may have it."""
    said = played.skipped or played.problem or str(played.verdict or "none")
    return " ".join(said.replace("|", "/").split())


def judged(played: Played) -> str:
    if played.skipped:
        return _SKIPPED
    if played.is_right:
        return _YES
    return _WRONGED if played.blames_an_innocent else _NO


# --- the page --------------------------------------------------------------------------------------


def in_order(cases: Iterable[Case]) -> list[Case]:
    order = list(_TITLES)
    return sorted(cases, key=lambda case: order.index(case.kind))


def names(page: str) -> list[str]:
    """The cases that a page with all rows shows."""
    cells = re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def with_table(page: str, results: Results, machine: str, cases: Sequence[Case]) -> str:
    before, _, rest = page.partition(_BEGIN)
    after = rest.partition(_END)[2]
    rows = ["| faults | cases | median (longest) |", "|---|---:|---|"]
    for title, of_kind in _by_kind(cases, results):
        count, _, times = _times({case.name: results[case.name] for case in of_kind}).partition(" cases. ")
        rows.append(
            f"| {title} | {count.removesuffix(' cases.')} | {times.removeprefix('Median (longest): ')} |"
        )
    table = summary(results) + "\n\n" + "\n".join(rows)
    return f"{before}{_BEGIN}{table}\n\nMachine: {machine}.\n{_END}{after}"


def all_rows(results: Results, cases: Sequence[Case]) -> str:
    """The page of the site."""
    blocks = [
        "# Every fault and its verdict",
        "How they are played, and how fast the job recovers: [faults](../faults.md). Cases of one row differ in the "
        "DDP class, the backend, the start or the number of nodes. The text of a verdict is cut.",
    ]
    blocks += [f"## {title}\n\n{_rows(of_kind, results)}" for title, of_kind in _by_kind(cases, results)]
    return "\n\n".join(blocks) + "\n"


def _by_kind(cases: Sequence[Case], results: Results) -> Iterable[tuple[str, list[Case]]]:
    for kind, title in _TITLES.items():
        if of_kind := [case for case in cases if case.kind is kind and case.name in results]:
            yield title, of_kind


def _rows(cases: Sequence[Case], results: Results) -> str:
    """A row for each fault: that of several settings is one, with the verdict of the first, if all are correct."""
    rows: list[list[Case]] = []
    for case in cases:
        before = rows[-1] if rows else []
        same = bool(before) and case.injected in ("the same", before[0].injected)
        if same and not any(_wrong(results[each.name]) for each in (case, *before)):
            before.append(case)
        else:
            rows.append([case])
    cells: list[tuple[str, str, str]] = []
    for row in rows:
        names, fault, verdict = (
            ", ".join(f"`{each.name}`" for each in row),
            row[0].injected,
            _shown(results[row[0].name]),
        )
        if cells and cells[-1][2] == verdict:  # neighbours with one verdict
            names, fault = f"{cells[-1][0]}, {names}", f"{cells[-1][1]}; {fault}"
            cells.pop()
        cells.append((names, fault, verdict))
    return "\n".join([_HEAD, *(f"| {' | '.join(row)} |" for row in cells)])


def _shown(ways: Mapping[str, Result]) -> str:
    played = ways.get(RESTART) or ways[IN_PLACE]
    said = str(played["verdict"])
    if len(said) > _VERDICT_CHARS:
        said = said[: _VERDICT_CHARS - 4].rpartition(" ")[0] + " ..."
    return f"{said} ({'; '.join(_wrong(ways))})" if _wrong(ways) else said


def _wrong(ways: Mapping[str, Result]) -> list[str]:
    return [
        f"{way}: {each['correct']}" for way, each in ways.items() if each["correct"] not in (_YES, _SKIPPED)
    ]


def _times(results: Results) -> str:
    ways = [(RESTART, "first_collective_s"), (RESTART, "first_step_s"), (IN_PLACE, "first_step_s")]
    titles = ("first collective after a restart", "first step", "first step in place")
    parts = []
    for (way, key), title in zip(ways, titles, strict=True):
        times = [each[way][key] for each in results.values() if way in each and each[way][key] is not None]
        if times:
            parts.append(f"{title} {statistics.median(times):.2f} s ({max(times):.2f} s)")
    return (
        f"{len(results)} cases. Median (longest): {', '.join(parts)}." if parts else f"{len(results)} cases."
    )


def summary(results: Results) -> str:
    restarts = [ways[RESTART] for ways in results.values() if RESTART in ways]
    in_place = [ways[IN_PLACE] for ways in results.values() if IN_PLACE in ways]
    played = [each for each in in_place if each["correct"] != _SKIPPED]
    late = sum(each["late"] for each in restarts)
    whole = sum(each["kept"] == each["of"] for each in played)
    return (
        f"{_verdicts(restarts)}, {late} recoveries over the time limit. In place: {_verdicts(in_place)}; all survivors "
        f"kept their processes in {whole} cases. Hang timeout: {HANG_TIMEOUT_S:g} s."
    )


def _verdicts(plays: Sequence[Result]) -> str:
    played = [each for each in plays if each["correct"] != _SKIPPED]
    right = sum(each["correct"] == _YES for each in played)
    wronged = sum(each["correct"] == _WRONGED for each in played)
    return f"{len(played)} cases, {right} correct verdicts, {wronged} wrong ranks named with certainty"
