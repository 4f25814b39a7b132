"""Whether a file of results has all that the next run and the pages read from it. gpu_results describes the format."""

from __future__ import annotations

from typing import Any


class Damaged(Exception):
    """The text names the place in the file, and what is wrong with it."""


_NUMBER = (int, float)
_PERHAPS = (int, float, type(None))
_MACHINE = {"devices": list, "torch": str, "python": str}
_PART = {"outcome": str, "took_s": _NUMBER, "why": str, "findings": list, "attempts": int}
_FINDINGS: dict[str, dict[str, Any]] = {
    "comparison": {"table": str, "name": str, "unit": str, "theirs": list, "ours": list, "target": _PERHAPS},
    "figure": {"table": str, "name": str, "unit": str, "values": list, "limit": _PERHAPS},
    "check": {"name": str, "ok": bool},
    "fault": {
        "name": str,
        "setting": str,
        "injected": str,
        "verdict": str,
        "correct": str,
        "collective_s": _PERHAPS,
        "step_s": _PERHAPS,
    },
    "sharing": {"mode": str, "works": bool},
    "not run": {"why": str},
}


def check(whole: Any, outcomes: tuple[str, ...]) -> None:
    """Raise Damaged. `outcomes`: those that a part can have."""
    _object(whole, {"machine": dict, "rehearsal": bool, "parts": dict}, "the file")
    _object(whole["machine"], _MACHINE, "'machine'")
    _all(whole["machine"]["devices"], str, "'devices' of 'machine'")
    for name, part in whole["parts"].items():
        where = f"the part {name!r}"
        _object(part, _PART, where)
        if part["outcome"] not in outcomes:
            raise Damaged(f"{where} has the unknown outcome {part['outcome'][:40]!r}")
        if more := sorted(set(part) - set(_PART)):
            raise Damaged(f"{where} has the unknown entry {more[0][:40]!r}")
        for finding in part["findings"]:
            _finding(finding, f"a finding of {where}")


def _finding(finding: Any, where: str) -> None:
    _object(finding, {"kind": str}, where)
    wanted = _FINDINGS.get(finding["kind"])
    if wanted is None:
        raise Damaged(f"{where} is of the unknown kind {finding['kind'][:40]!r}")
    _object(finding, wanted, where)
    for key in ("theirs", "ours", "values"):
        _all(finding.get(key, []), _NUMBER, f"{key!r} in {where}")


def _object(value: Any, wanted: dict[str, Any], where: str) -> None:
    if not isinstance(value, dict):
        raise Damaged(f"{where} is not an object")
    for key, kind in wanted.items():
        if key not in value:
            raise Damaged(f"{where} has no {key!r}")
        if not _is(value[key], kind):
            raise Damaged(f"{key!r} of {where} is {type(value[key]).__name__}, which does not belong there")


def _all(values: list[Any], kind: Any, where: str) -> None:
    if not all(_is(each, kind) for each in values):
        raise Damaged(f"{where} has an entry of another type")


def _is(value: Any, kind: Any) -> bool:
    """A bool is an int for Python, and not for us."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
