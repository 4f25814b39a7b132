"""The results of `make gpu`: one JSON file, written anew after each part, from which the next run goes on.

    {"format": 1, "machine": {...}, "rehearsal": false, "parts": {NAME: {"outcome": ..., "findings": [...]}}}

A finding is one of these:

    {"kind": "comparison", "table", "name", "unit", "theirs": [...], "ours": [...], "target": ratio or null}
    {"kind": "figure", "table", "name", "unit", "values": [...], "limit": number or null}
    {"kind": "check", "name", "ok", "detail"}
    {"kind": "fault", "name", "setting", "injected", "verdict", "correct", "collective_s", "step_s"}
    {"kind": "sharing", "mode", "works", "detail"}
    {"kind": "not run", "why"}
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import gpu_format

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1
ATTEMPTS = 3  # of a part that fails, in as many runs
Finding = dict[str, Any]


class Outcome(StrEnum):
    DONE = "done"
    FAILED = "failed"
    LATE = "stopped at its time limit"
    NOT_RUN = "not run"  # it cannot run on this machine


class WrongResults(Exception):
    """The file cannot be continued; the text says why and what to do."""


@dataclass
class PartResult:
    outcome: Outcome
    took_s: float = 0.0
    why: str = ""
    findings: list[Finding] = field(default_factory=list)
    attempts: int = 1

    def after(self, earlier: PartResult | None) -> PartResult:
        """What to keep of two attempts: an attempt that found less does not replace one that found more."""
        if earlier is None:
            return self
        worse = self.outcome is not Outcome.DONE and len(self.findings) < len(earlier.findings)
        kept = earlier if worse else self
        return PartResult(kept.outcome, kept.took_s, kept.why, kept.findings, earlier.attempts + 1)


@dataclass
class Results:
    machine: dict[str, Any] = field(default_factory=dict)
    rehearsal: bool = False
    parts: dict[str, PartResult] = field(default_factory=dict)

    def is_left(self, name: str) -> bool:
        result = self.parts.get(name)
        if result is None:
            return True
        return result.outcome in (Outcome.FAILED, Outcome.LATE) and result.attempts < ATTEMPTS

    def sharing(self) -> str:
        """How several ranks get on with one card here, as the part `sharing` has found; "" if they cannot."""
        part = self.parts.get("sharing")
        works = (each["mode"] for each in (part.findings if part else []) if each.get("works"))
        return next(works, "")

    def findings(self, kind: str) -> list[Finding]:
        return [each for part in self.parts.values() for each in part.findings if each["kind"] == kind]


def left_in_order(names: list[str], results: Results) -> list[str]:
    """Those never tried come before those that failed."""
    left = [name for name in names if results.is_left(name)]
    return sorted(left, key=lambda name: name in results.parts)


def to_json(results: Results) -> str:
    whole = {"format": FORMAT, "machine": results.machine, "rehearsal": results.rehearsal}
    return json.dumps(whole | {"parts": {k: asdict(v) for k, v in results.parts.items()}}, indent=1) + "\n"


def from_json(text: str) -> Results:
    try:
        whole = json.loads(text)
        known = whole["format"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise WrongResults("it is not a file of results of `make gpu`") from None
    if known != FORMAT:
        raise WrongResults(f"its format is {known!r}, and this version reads format {FORMAT}")
    gpu_format.check(whole, tuple(Outcome))
    parts = {
        name: PartResult(**(each | {"outcome": Outcome(each["outcome"])}))
        for name, each in whole["parts"].items()
    }
    return Results(whole["machine"], whole["rehearsal"], parts)


def read(path: Path) -> Results | None:
    if not path.exists():
        return None
    try:
        return from_json(path.read_text())
    except (WrongResults, gpu_format.Damaged, UnicodeDecodeError) as error:
        why = "it is not a text file" if isinstance(error, UnicodeDecodeError) else error
        raise WrongResults(f"cannot go on with {path}: {why}. Remove it, or name another folder") from None
    except OSError as error:
        raise WrongResults(
            f"cannot read {path}: {error.strerror}. Name another folder with RESULTS="
        ) from None


def write(path: Path, results: Results) -> None:
    """Whole or not at all, also if the machine goes away while it is written."""
    part = path.with_suffix(".part")
    with part.open("w") as file:
        file.write(to_json(results))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def same_machine(results: Results, machine: dict[str, Any]) -> bool:
    """Figures of two machines, or of two releases of torch, do not belong into one table."""
    compared = ("devices", "torch", "nccl", "python")
    return all(results.machine.get(key) == machine.get(key) for key in compared)
