"""Turns what a health source says about this node into a check."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.preflight.checkup import Check, Grade
from launcher.sources.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launcher.sources.findings import Finding

NAME = "health source"
_SHOWN = 5


def name_of(place: str) -> str:
    return f"{NAME} {place}"


def judge_source(place: str, found: Sequence[Finding]) -> Check:
    bad = [finding for finding in found if finding.severity is Severity.UNFIT]
    warns = [finding for finding in found if finding.severity is Severity.WARNING]
    if bad:
        advice = "repair the node, or leave a finding out with --health-ignore NAME"
        return Check(name_of(place), Grade.FAIL, _listed([*bad, *warns]), "nothing makes it unfit", advice)
    if warns:
        return Check(name_of(place), Grade.WARN, _listed(warns), "no warnings", "the node joins all the same")
    return Check(name_of(place), Grade.OK, _listed(found) or "reports no problem", "no problem")


def judge_failure(place: str, problem: str) -> Check:
    """A source that fails never keeps a node out."""
    advice = "check the source; until it answers, the job runs without it"
    return Check(name_of(place), Grade.WARN, f"not asked: {problem}", "an answer", advice)


def _listed(found: Sequence[Finding]) -> str:
    more = len(found) - _SHOWN
    return "; ".join(map(str, found[:_SHOWN])) + (f"; and {more} more" if more > 0 else "")
