"""The list of differences in differences.txt, and what differs beyond it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jobs import flat

if TYPE_CHECKING:
    from jobs import Seen

PAGE = Path(__file__).with_name("differences.txt")
WAYS = ("cold", "warm", "restart", "pool")
MOMENTS = ("begin", "torch", "step")
_ABSENT = "-"
_ROW = re.compile(r"^\| `.*\|$", re.M)
_QUOTED = re.compile(r"`([^`]+)`")


class Difference(NamedTuple):
    ways: frozenset[str]
    moment: str
    fact: str
    theirs: str
    ours: str

    def __str__(self) -> str:
        start, values = "/".join(sorted(self.ways)), f"torchrun {self.theirs[:300]}, ours {self.ours[:300]}"
        return f"{self.moment} {start}: {self.fact}: {values}"


@dataclass(frozen=True)
class Line:
    """A row of the page. In its words, * stands for anything."""

    facts: tuple[re.Pattern[str], ...]
    when: frozenset[str]
    theirs: re.Pattern[str]
    ours: re.Pattern[str]
    text: str

    def permits(self, one: Difference) -> bool:
        return (
            one.moment in self.when
            and not self.when.isdisjoint(one.ways)
            and any(fact.fullmatch(one.fact) for fact in self.facts)
            and self.theirs.fullmatch(one.theirs) is not None
            and self.ours.fullmatch(one.ours) is not None
        )


def lines() -> list[Line]:
    return [_line(row) for row in _ROW.findall(PAGE.read_text())]


def _line(row: str) -> Line:
    facts, when, theirs, ours, _why = (cell.strip() for cell in row.strip("|").split("|"))
    words = set(when.replace(",", " ").split()) - {"always"}
    assert words <= {*WAYS, *MOMENTS}, f"{when}: not a way to start, or a moment"
    for choices in (WAYS, MOMENTS):
        if words.isdisjoint(choices):
            words.update(choices)
    values = [_QUOTED.findall(each) or ["*"] for each in (theirs, ours)]
    patterns = [_pattern(each) for each in _QUOTED.findall(facts)]
    return Line(tuple(patterns), frozenset(words), _pattern(values[0][0]), _pattern(values[1][0]), row)


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(re.escape(text).replace(r"\*", ".*"), re.S)


def differences(way: str, torchruns: Seen, ours: Seen) -> list[Difference]:
    """A rank that begins without torch is in a new interpreter, however it was asked to start."""
    ways = {way} if "numpy" in ours["begin"]["modules"] else {way, "cold"}
    found = []
    for moment in torchruns:
        theirs, mine = dict(flat(torchruns[moment])), dict(flat(ours.get(moment, {})))
        for fact in sorted({*theirs, *mine}):
            values = [_word(each.get(fact, _ABSENT)) for each in (theirs, mine)]
            if values[0] != values[1]:
                found.append(Difference(frozenset(ways), moment, fact, *values))
    return found


def permitted(found: list[Difference]) -> dict[Difference, list[Line]]:
    """Each difference, with the rows that permit it."""
    page = lines()
    return {one: [line for line in page if line.permits(one)] for one in found}


def _word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
