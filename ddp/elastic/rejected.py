"""A commit whose state has turned out to be bad, which the next generation skips: `State.reject`.

A rank that sees NaN soon after a resume cannot tell whether the commit is bad or its next batch. So only the script
says so, and only one commit is skipped: if training fails in the same way from an older one, the state was not the
reason. Commits that were made since the resume contain the same state, and are skipped with it.

The mark is a file in the memory of the node and in a folder on disk, where later jobs find it too.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ddp.telemetry.coded import CodedError

if TYPE_CHECKING:
    from pathlib import Path

    from ddp.elastic.commits import CommitName, Holdings

log = logging.getLogger("ddp.elastic")
_FILE = "rejected-commit.json"


class CommitRejected(CodedError, RuntimeError):
    """The script has rejected the commit from which it has resumed."""

    code = "DDP-8005"


@dataclass(frozen=True, slots=True)
class Rejected:
    number: int
    lineages: tuple[str, ...]  # of the commit, and of those that were made since its resume
    reason: str

    def has(self, commit: CommitName) -> bool:
        return commit.number >= self.number and commit.lineage in self.lineages


def mark(places: Iterable[Path], rejected: Rejected) -> Rejected | None:
    """Write the mark. Return the one that is there already, and remains."""
    for place in places:
        if (known := read((place,))) is not None:
            return known if known.lineages[0] != rejected.lineages[0] else None
    for place in places:
        with suppress(OSError):  # a folder on disk that nothing has been written to yet
            written = place / f"{_FILE}.{os.getpid()}"
            written.write_text(json.dumps(asdict(rejected)))
            written.rename(place / _FILE)
    return None


def read(places: Iterable[Path]) -> Rejected | None:
    for place in places:
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads((place / _FILE).read_text())
            return Rejected(int(found["number"]), tuple(found["lineages"]), str(found["reason"]))
    return None


def without(holdings: Holdings, rejected: Rejected) -> Holdings:
    return tuple(tuple(each for each in held if not rejected.has(each.commit)) for held in holdings)


def tell(rejected: Rejected, resumed_from: int | None) -> None:
    if resumed_from is None:
        log.warning(
            "ddp.elastic: commit %d was rejected (%s), and there is no older one: resuming from it all the same",
            *(rejected.number, rejected.reason),
        )
    else:
        log.warning(
            "ddp.elastic: skipped commit %d and those made from it, because it was rejected: %s. Resuming from "
            "commit %d",
            *(rejected.number, rejected.reason, resumed_from),
        )
