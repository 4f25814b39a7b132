"""Finding the newest commit that the members of a generation can get, and getting it to all of them.

1. Every rank lists the images that it can read: those in its node's memory, and those in the folder on disk.
2. All lists are put together, so every rank sees the same, and draws the same conclusion: `commits.newest`.
3. Each image of that commit is read through by one rank. A damaged one is named and left out; then again from 2.
4. The parts that everybody who needs them can read are read by each rank for itself; the others are sent.

Nothing is decided by one rank alone, and nothing depends on clocks: all ranks walk through the same
collectives.
"""

from __future__ import annotations

import logging
import socket
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp.elastic import commits, image, scratch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ddp.elastic.team import Team

log = logging.getLogger("ddp.elastic")


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a job goes on from."""

    number: int  # commits made before
    in_memory: bool  # else it was read from disk
    world_size: int  # of the world that made it


@dataclass(frozen=True)
class Sight:
    """The images that this rank can read."""

    images: dict[str, image.Image]
    paths: dict[str, Path]

    def held(self) -> tuple[commits.Held, ...]:
        return tuple(
            commits.Held(
                commits.CommitName(each.head.number, each.head.lineage),
                each.head.part,
                each.head.parts,
                each.head.rank,
                each.head.world_size,
                name,
                in_memory=not each.on_disk,
            )
            for name, each in self.images.items()
        )


def node_name(places: list[Path]) -> str:
    """Ranks with the same folder in the same host's memory are on the same node."""
    return f"{socket.gethostname()}:{places[0]}"


def look(places: list[Path], folder: Path | None) -> Sight:
    sight = Sight({}, {})
    node = node_name(places)
    for path in scratch.slots_in(places):
        _see(sight, path, f"{node}/{path.name}", tells=False)
    files = sorted(folder.iterdir()) if folder is not None and folder.is_dir() else []
    for path in files:
        if commits.parsed(path.name):
            _see(sight, path, f"disk/{path.name}", tells=True)
    return sight


def _see(sight: Sight, path: Path, name: str, tells: bool) -> None:
    try:
        found = image.Image(memoryview(scratch.for_reading(path)))
    except (image.DamagedImage, OSError, ValueError) as error:
        if tells:  # a slot that was being written when its rank died is nothing to tell
            log.warning("%s is left out: %s", path, error)
        return
    # The same name in folders that are not shared may be different files.
    key = f"{name}#{found.index_sum:08x}{found.data_sum:08x}"
    sight.images[key] = found
    sight.paths[key] = path


def choose(team: Team, sight: Sight) -> commits.Choice | None:
    holdings = tuple(team.gather(sight.held()))
    bad: frozenset[str] = frozenset()
    while choice := commits.newest(holdings, bad):
        checksums: dict[str, int] = {}
        damaged: set[str] = set()
        for sums, found in team.gather(_examined(team.rank, sight, choice)):
            checksums |= sums
            damaged |= found
        if not damaged:
            return commits.agreeing(choice, checksums)
        bad |= damaged
    return None


def _examined(rank: int, sight: Sight, choice: commits.Choice) -> tuple[dict[str, int], set[str]]:
    checksums: dict[str, int] = {}
    damaged: set[str] = set()
    for part in choice.parts:
        for source in part:
            if commits.examiner(source) != rank:
                continue
            found = sight.images[source.image]
            try:
                found.check_data()
            except image.DamagedImage as error:
                log.warning("%s is left out: %s", sight.paths[source.image], error)
                damaged.add(source.image)
            else:
                # One image of a part has none to be compared with.
                checksums[source.image] = found.content_sum() if len(part) > 1 else 0
    return checksums, damaged


def parts(
    team: Team, sight: Sight, choice: commits.Choice, my_part: int, regions: int
) -> Iterator[image.Image]:
    """Those that this rank needs, the first part first. Collective: every rank must take all that it is given."""
    stored = _regions(team, sight, choice)
    same = my_part < len(stored) and stored[my_part] == regions
    need = commits.parts_needed(my_part, same, len(choice.parts))
    sent = {each.part: each for each in commits.sendings(choice, tuple(team.gather(need)))}
    for part, sources in enumerate(choice.parts):
        here = next((sight.images[each.image] for each in sources if team.rank in each.ranks), None)
        if part in sent:
            root = sent[part].root
            mine = sight.images[sent[part].image].whole if team.rank == root else None
            received = team.send(mine, root)
            here = here or image.Image(received)
        if part in need:
            assert here is not None
            yield here


def _regions(team: Team, sight: Sight, choice: commits.Choice) -> list[int]:
    """Which regions each part has, as its own writer fingerprinted them."""
    mine = {
        part: sight.images[sources[0].image].head.regions
        for part, sources in enumerate(choice.parts)
        if commits.examiner(sources[0]) == team.rank
    }
    known: dict[int, int] = {}
    for each in team.gather(mine):
        known |= each
    return [known[part] for part in range(len(choice.parts))]


def private(sight: Sight, choice: commits.Choice, rank: int, world_size: int) -> image.Image | None:
    """This very rank's own image, in a world of the same size, if it is still here."""
    for each in sight.images.values():
        head = each.head
        ours = (head.rank, head.world_size) == (rank, world_size)
        if ours and commits.CommitName(head.number, head.lineage) == choice.commit:
            return each
    return None


def new_lineage(team: Team) -> str:
    return team.first(lambda: uuid.uuid4().hex[:12])


def slots_of(sight: Sight, choice: commits.Choice | None) -> set[str]:
    """Names of the slots that hold what was chosen: the new generation writes over others first."""
    if choice is None:
        return set()
    return {
        sight.paths[name].name
        for name, each in sight.images.items()
        if commits.CommitName(each.head.number, each.head.lineage) == choice.commit and not each.on_disk
    }
