"""What was said on the terminals of a job, as a verdict: who is blamed, how surely, in which words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fault_case import Case

_RESTART = re.compile(
    r"ddp-launch: (.*?); (?:\S+ is excluded: .*?; )?(?:not in place: .*?; )?"
    r"(?:restarting|continuing|waiting|healing|pausing) .*"
)
_OF_RANK = re.compile(r"rank (\d+) on \S+: ")
_ALSO = re.compile(r"; the same for (ranks? [-\d, and]+)$")
_CONSEQUENCE = re.compile(r"rank \d+ on \S+ lost the connection to its peers$")
_UNCERTAIN = re.compile(r"(?:[a-z-]+; )?cause uncertain: (ranks? [-\d, and]+):")
_NO_RANK = "hang; no rank is the cause: "
_MISMATCH = re.compile(
    r"\S+; the (?:collectives of the ranks do not match|ranks called different collectives)"
)


@dataclass(frozen=True)
class Verdict:
    words: str
    blamed: tuple[int, ...] = ()
    certain: bool = True

    def __str__(self) -> str:
        return self.words

    def is_right_for(self, case: Case) -> bool:
        if re.search(case.says, self.words) is None:
            return False
        return case.blamed in (None, self.blamed) and case.certain in (None, self.certain)


def verdict_of(terminals: Iterable[str]) -> Verdict | None:
    """The last word of each node, which must be the same on all of them; None where nothing was restarted."""
    last = {words[-1] for text in terminals if (words := _restarts(text))}
    assert len(last) <= 1, f"the nodes say different things: {sorted(last)}"
    return _read(last.pop()) if last else None


def _restarts(text: str) -> list[str]:
    """Without those of the first moment, when only the report of a mere consequence had come."""
    words = [match[1] for line in text.splitlines() if (match := _RESTART.fullmatch(line))]
    return [each for each in words if not _CONSEQUENCE.match(each)] or words


def _read(words: str) -> Verdict:
    if named := _UNCERTAIN.match(words):
        return Verdict(words, tuple(_ranks(named[1])), certain=False)
    if words.startswith(_NO_RANK) or _MISMATCH.match(words):
        return Verdict(words, certain=False)
    first, also = _OF_RANK.match(words), _ALSO.search(words)
    blamed = {int(first[1])} if first else set()
    return Verdict(words, tuple(sorted(blamed.union(_ranks(also[1]) if also else ()))))


def _ranks(words: str) -> list[int]:
    """Of "ranks 0-2 and 5"."""
    found: list[int] = []
    for begin, end in re.findall(r"(\d+)(?:-(\d+))?", words):
        found += range(int(begin), int(end or begin) + 1)
    return found
