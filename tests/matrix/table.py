"""Results of the matrix, and the table that docs/compatibility.md has of them. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from cases import CASES, Case

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PASSED, MISSING, FAILED, NOT_RUN = "yes", "no", "fails", "-"


@dataclass(frozen=True)
class Result:
    """Of one case: its outcome, and why it is missing, failed, or did not run."""

    outcome: str
    reason: str = ""


_LATE = Result(NOT_RUN, "not all of its tests ran within the time")


@dataclass(frozen=True)
class Column:
    """Of one release, with one Python."""

    torch: str
    python: str
    took_s: int
    results: Mapping[str, Result] = field(default_factory=dict)

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return numbers(self.torch), numbers(self.python)

    @property
    def wish(self) -> str:
        """The name of this release and Python on the command line, without the name of the build."""
        return f"{self.torch.partition('+')[0]}@{'.'.join(self.python.split('.')[:2])}"


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition("+")[0].split(".") if part.isdigit())


def results_of(report: str, cases: Sequence[Case] = CASES, is_whole: bool = True) -> dict[str, Result]:
    """From pytest's report in XML. If pytest did not run to its end (`is_whole`), the last case is not complete."""
    tests = list(ElementTree.fromstring(report).iter("testcase")) if report else []
    found = {case.name: _result([each for each in tests if _belongs(each, case)]) for case in cases}
    begun = [name for name, result in found.items() if result != _LATE]
    if begun and not is_whole and found[begun[-1]].outcome != FAILED:
        found[begun[-1]] = _LATE
    return found


def _belongs(test: ElementTree.Element, case: Case) -> bool:
    module, name = test.get("classname", ""), test.get("name", "")
    if not module:  # a file that was skipped, or that cannot be imported
        path = name.replace(".", "/") + ".py"
        return any(each.partition("::")[0] == path for each in case.tests)
    full = f"{module.replace('.', '/')}.py::{name}"
    return any(full == each or full.startswith((f"{each}::", f"{each}[")) for each in case.tests)


def _result(tests: Sequence[ElementTree.Element]) -> Result:
    failures = [bad for test in tests for bad in (*test.iterfind("failure"), *test.iterfind("error"))]
    if failures:
        return Result(FAILED, _first_line(failures[0].get("message", "")))
    if not tests:
        return _LATE
    skipped = [each.get("message", "") for test in tests for each in test.iterfind("skipped")]
    return Result(MISSING, skipped[0]) if skipped else Result(PASSED)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:160]


def merged(old: Iterable[Column], new: Iterable[Column]) -> list[Column]:
    """With the newer results of each release and Python, in their order."""
    found = {column.key: column for column in old}
    for column in new:
        before = found.get(column.key)
        results = {**(before.results if before else {}), **column.results}
        found[column.key] = replace(column, results=results)
    return [found[key] for key in sorted(found)]


def rendered(columns: Sequence[Column], cases: Sequence[Case] = CASES) -> str:
    """The releases and the outcome of each case, as Markdown."""
    releases = ", ".join(column.wish for column in columns)
    rows = [f"| {case.name} | {case.shows} | {_outcome(case, columns)} |" for case in cases]
    return "\n".join(
        [f"torch and Python: {releases}.", "", "| case | what it shows | |", "|---|---|---|", *rows]
    )


def _outcome(case: Case, columns: Sequence[Column]) -> str:
    """That of most releases, behind those that differ."""
    found: dict[Result, list[str]] = {}
    for column in columns:
        found.setdefault(column.results.get(case.name, Result(NOT_RUN)), []).append(column.wish)
    most = max(found, key=lambda result: len(found[result]), default=Result(NOT_RUN))
    others = [f"{_told(result, ' with ' + ', '.join(found[result]))}; " for result in found if result != most]
    return "".join([*others, _told(most, " with all others" if others else "")])


def _told(result: Result, where: str) -> str:
    return f"{result.outcome}{where}" + (f": {result.reason}" if result.reason else "")


def to_json(columns: Iterable[Column]) -> list[dict[str, Any]]:
    return [asdict(column) for column in columns]


def from_json(data: Iterable[Mapping[str, Any]]) -> list[Column]:
    return [
        Column(
            each["torch"],
            each["python"],
            each["took_s"],
            {name: Result(**result) for name, result in each["results"].items()},
        )
        for each in data
    ]
