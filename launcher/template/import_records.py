"""What the ranks of this node have imported, and what of it the zygote may try to import: pure functions.

A record is text: one JSON list per line.

    ["env", {"NAME": "value", ...}]    variables that differ from those the rank started with; null: it removed them
    ["begin", "module", "outer"]       an import begins, in the code of the outer module or of the script (""), under
                                       the variables of the last "env"
    ["from", "module", "/path/..."]    where that module came from
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

Variables = dict[str, "str | None"]
# Each fork gets a random state of its own for them. They come first, so that nothing else is refused for their sake.
RESEEDED = ("numpy.random",)
_INSTALLED = ("/site-packages/", "/dist-packages/")
# Also our own library, which may be used from a checkout.
_LIBRARY = os.path.normpath(os.path.join(os.path.abspath(__file__), "../../../ddp")) + os.sep


class Record(NamedTuple):
    """The imports of one rank, in the order in which they began."""

    environments: dict[str, Variables]  # by module: the changed variables when its import began
    outer: dict[str, str]  # by module: the module that imported it
    origins: dict[str, str]  # by module: its file
    last: Variables  # the changed variables at the last import


class Candidate(NamedTuple):
    """A module that all ranks have imported from the same file."""

    name: str
    variables: Variables  # that were set or removed when its import began
    unsettled: frozenset[str]  # variables that differ between the ranks, or have changed since


class Verdict(NamedTuple):
    """What a trial found out about a module."""

    name: str
    reason: str  # why it must not be imported before a fork; "": it may be


def parse(text: bytes) -> Record:
    """Read a record that may still grow: the last line can be incomplete."""
    environments: dict[str, Variables] = {}
    origins: dict[str, str] = {}
    outer: dict[str, str] = {}
    now: Variables = {}
    for line in text[: text.rfind(b"\n") + 1].splitlines():
        match json.loads(line):
            case ["env", changed]:
                now = changed
            case ["begin", name, importer]:
                environments.setdefault(name, now)
                outer.setdefault(name, importer)
            case ["from", name, origin]:
                origins[name] = origin
    return Record(environments, outer, origins, now)


def candidates(records: Sequence[Record], imported: Container[str], stdlib: str) -> list[Candidate]:
    """Return what the script has imported in all ranks and the zygote has not, in the order of the first rank.

    - What installed packages import in turn comes with them. On its own, it might be imported in another order.
    - Only modules of the standard library and of installed packages: the script's own files may change between two
      generations, and importing them may do anything.
    """
    found = []
    for name, variables in records[0].environments.items():
        if name in imported or not _same_everywhere(name, records, stdlib):
            continue
        importer = records[0].origins.get(records[0].outer[name], "")
        if is_installed(importer, stdlib) and name not in RESEEDED:
            continue
        changed = [
            variables,
            *(each.environments[name] for each in records),
            *(each.last for each in records),
        ]
        names = {key for each in changed for key in each}
        unsettled = {key for key in names if any(not _same(key, each, variables) for each in changed)}
        found.append(Candidate(name, variables, frozenset(unsettled)))
    return sorted(found, key=lambda candidate: candidate.name not in RESEEDED)


def _same_everywhere(name: str, records: Sequence[Record], stdlib: str) -> bool:
    origin = records[0].origins.get(name, "")
    if not is_installed(origin, stdlib):
        return False
    return all(name in each.environments and each.origins.get(name) == origin for each in records)


def is_installed(origin: str, stdlib: str) -> bool:
    return (
        origin in ("built-in", "frozen")
        or origin.startswith((stdlib, _LIBRARY))
        or any(each in origin for each in _INSTALLED)
    )


def _same(key: str, one: Mapping[str, str | None], other: Mapping[str, str | None]) -> bool:
    return (key in one) == (key in other) and one.get(key) == other.get(key)


def difference(tried: Record, records: Sequence[Record], stdlib: str) -> str:
    """Return what an import did otherwise in the zygote than in some rank; "" if nothing."""
    for name in tried.environments:
        origin = tried.origins.get(name)
        theirs = [each.origins.get(name, "" if name not in each.environments else origin) for each in records]
        if origin is None:  # an optional module that is not there
            if any(theirs):
                return f"it imports {name}, which only the ranks find"
        elif not is_installed(origin, stdlib):
            return f"it imports {name}, which is not an installed package"
        elif any(each != origin for each in theirs):
            return f"it imports {name}, which a rank does not"
    return ""


def after_trial(
    tried: Sequence[Candidate], verdicts: Sequence[Verdict]
) -> tuple[list[Candidate], dict[str, str], list[Candidate]]:
    """Return what may be imported, what may not and why, and what another trial has to try.

    A trial ends at the first module that may not be imported. If it ends without a reason, the module that came next
    has ended the process. A verdict without a name says why the trial itself failed: nothing more is tried.
    """
    reasons = {verdict.name: verdict.reason for verdict in verdicts}
    if "" in reasons:
        return [], {"the rest": reasons[""]}, []
    passed = [each for each in tried if reasons.get(each.name) == ""]
    refused = {name: reason for name, reason in reasons.items() if reason}
    last = max((index for index, each in enumerate(tried) if each.name in reasons), default=-1)
    left = list(tried[last + 1 :])
    if not refused and left:
        refused = {left[0].name: "its import ends the process"}
    parents = tuple(f"{name}." for name in refused)
    return (
        passed,
        refused,
        [each for each in left if each.name not in refused and not each.name.startswith(parents)],
    )
