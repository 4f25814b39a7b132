"""Find nodes whose software versions or script arguments differ.

Each node reports "torch=2.13.0 nccl=2.27.3 python=3.11.7", and a checksum of the arguments.

Versions that a node does not report are not compared. The most frequent version counts as the usual one. On a tie, it
is the version of the first of these nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from rendezvous.values.types import World

_NODES_NAMED = 4


@dataclass(frozen=True, slots=True)
class Difference:
    what: str  # "torch"
    node: str
    version: str
    usual: str  # the version of most nodes
    example: str  # one of these nodes


def read(text: str) -> dict[str, str]:
    parts = (part.partition("=") for part in text.split())
    return {name: version for name, _, version in parts if version}


def differences(reports: Sequence[tuple[str, str]]) -> tuple[Difference, ...]:
    """Compare the versions of nodes. `reports`: the name of each node with its report."""
    if not reports or all(text == reports[0][1] for _, text in reports):
        return ()
    known = [(node, read(text)) for node, text in reports]
    names = dict.fromkeys(name for _, versions in known for name in versions)
    return tuple(each for name in names for each in _of_one(name, known))


def _of_one(what: str, known: Sequence[tuple[str, dict[str, str]]]) -> Iterable[Difference]:
    counts: dict[str, int] = {}
    example: dict[str, str] = {}
    for node, versions in known:
        if what in versions:
            counts[versions[what]] = counts.get(versions[what], 0) + 1
            example.setdefault(versions[what], node)
    usual = max(counts, key=lambda version: counts[version])
    for node, versions in known:
        if versions.get(what, usual) != usual:
            yield Difference(what, node, versions[what], usual, example[usual])


def prevents_training(difference: Difference) -> bool:
    """Whether such ranks cannot work together: NCCL needs the same version, torch the same minor version."""
    match difference.what:
        case "nccl":
            return True
        case "torch":
            return _minor(difference.version) != _minor(difference.usual)
        case _:
            return False


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def warning(world: World) -> str:
    """One sentence about a world whose nodes differ; "" if they do not."""
    found = differences([(p.agent.node, p.facts.versions) for p in world.placements])
    nodes_of: dict[tuple[str, str, str], list[str]] = {}
    for each in found:
        nodes_of.setdefault((each.what, each.version, each.usual), []).append(each.node)
    parts = [f"{_listed(nodes)} {'has' if len(nodes) == 1 else 'have'} {what} {version} (most nodes: {usual})"
             for (what, version, usual), nodes in nodes_of.items()]  # fmt: skip
    if not parts:
        return ""
    return (
        f"the nodes have different software: {'; '.join(parts[:4])}. Install the same versions on all nodes"
    )


def arguments_warning(world: World) -> str:
    """One sentence about a world whose nodes start the script with different arguments; "" if they are equal."""
    found = differences([(p.agent.node, f"args={p.facts.script_args}") for p in world.placements])
    if not found:
        return ""
    others = f"{len(world.placements) - len(found)} nodes" if len(world.placements) > 2 else found[0].example
    verb = "starts" if len(found) == 1 else "start"
    return (
        f"{_listed([each.node for each in found])} {verb} the script with different arguments than {others}; "
        "if this is not intended, start all nodes with the same arguments"
    )


def _listed(nodes: Sequence[str]) -> str:
    more = len(nodes) - _NODES_NAMED
    return ", ".join(nodes[:_NODES_NAMED]) + (f" and {more} more" if more > 0 else "")
