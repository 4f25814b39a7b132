"""A report of checks, as a table for people and as JSON for programs."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING, Any

from launcher.preflight.checkup import Grade, exit_code

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launcher.preflight.checkup import Check, Report

_COLORS = {Grade.OK: "32", Grade.SKIPPED: "2", Grade.WARN: "33", Grade.FAIL: "31;1"}
_NAME_WIDTH = 34
_INDENT = 8


def table(report: Report, *, width: int = 100, color: bool = False) -> str:
    names = min(_NAME_WIDTH, max((len(check.name) for check in report.checks), default=0))
    lines = [f"{report.node}: {report.level} check, {report.took_s:.1f} s"]
    for check in report.checks:
        lines += _row(check, names, width, color)
    return "\n".join([*lines, _total(report.checks)])


def _row(check: Check, names: int, width: int, color: bool) -> list[str]:
    grade = f"{check.grade:7}"
    if color:
        grade = f"\x1b[{_COLORS[check.grade]}m{grade}\x1b[0m"
    left = _INDENT + names + 2
    floor = f" (required: {check.floor})" if check.floor and check.grade in (Grade.WARN, Grade.FAIL) else ""
    lines = wrap(check.found + floor, max(30, width - left), break_on_hyphens=False) or [""]
    name = check.name
    rows = [f"{grade} {name:{names}}  {lines[0]}" if len(name) <= names else f"{grade} {name}"]
    rows += [" " * left + line for line in (lines if len(name) > names else lines[1:])]
    if check.advice:
        rows += [
            " " * left + line
            for line in wrap("→ " + check.advice, max(30, width - left), break_on_hyphens=False)
        ]
    return rows


def _total(checks: Sequence[Check]) -> str:
    count = {grade: sum(1 for check in checks if check.grade is grade) for grade in Grade}
    if count[Grade.FAIL]:
        return f"failed: {_of(count[Grade.FAIL], 'check')} failed, {_of(count[Grade.WARN], 'warning')}"
    if count[Grade.WARN]:
        return f"passed, with {_of(count[Grade.WARN], 'warning')}"
    return "passed"


def _of(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def as_json(report: Report, **more: Any) -> dict[str, Any]:
    return {
        "node": report.node,
        "level": report.level,
        "fit": report.healthy,
        "exit_code": exit_code(report.checks),
        "took_s": round(report.took_s, 3),
        "block": report.block,
        "hardware": report.hardware,
        "versions": {name: getattr(report.versions, name) for name in report.versions.__slots__},
        "checks": [
            {
                "name": check.name,
                "grade": check.grade.value,
                "found": check.found,
                "floor": check.floor,
                "advice": check.advice,
            }
            for check in report.checks
        ],
        **more,
    }
